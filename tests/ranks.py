"""``torch.multiprocessing.spawn`` for tests: each rank is a fork of a process that has imported torch and mindspeed_fx
and compiled once, so that a rank starts in milliseconds and costs what it computes (orders are searched for shortly).
"""

from __future__ import annotations

import base64
import importlib
import os
import pickle
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tests import forks


def spawn(worker: Callable[..., None], args: tuple = (), nprocs: int = 2, seconds: float = 900) -> None:
    """Call ``worker(rank, *args)`` in ``nprocs`` processes, in this one's environment.

    Args:
        worker: a function at the top of a module.
        args: what pickle takes.
        seconds: after which all ranks are killed.

    Raises:
        AssertionError: a rank failed, with its output; one that another waits for is killed after ten seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        call = base64.b64encode(pickle.dumps((worker.__module__, worker.__qualname__, args, dict(os.environ)))).decode()
        request = {"call": call, "nprocs": nprocs, "seconds": seconds, "folder": folder}
        codes, late = _server().ask(request)
        outputs = [Path(folder, f"{rank}.txt").read_text(errors="replace") for rank in range(nprocs)]
    print(*outputs, sep="\n")
    assert not late and not any(codes), "\n".join(
        [f"exit statuses {codes}{', out of time' if late else ''}", *(text[-6000:] for text in outputs)]
    )


@cache
def _server() -> forks.Server:
    return forks.Server("from tests import ranks; ranks.serve()")


def serve() -> None:
    """Answer requests until standard input ends."""
    forks.answer(_run, forks.search_less)


def _run(request: dict[str, Any]) -> tuple[list[int], bool]:
    if _call_of(request)[0].startswith("tests.megatron"):
        _prepare_megatron()
    pids = [_fork(rank, request) for rank in range(request["nprocs"])]
    return forks.wait(pids, request["seconds"], grace=10)


@cache
def _prepare_megatron() -> None:
    """Import what ranks of Megatron need, and patch nothing."""
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer  # noqa: F401

    import mindspeed_fx.megatron.table  # noqa: F401
    import mindspeed_fx.megatron.training  # noqa: F401
    import tests.megatron.gpt_models  # noqa: F401

    forks.leave_imports_alone()


def _call_of(request: dict[str, Any]) -> tuple[str, str, tuple, dict[str, str]]:
    """Module and name of the worker, its arguments, and the environment."""
    return pickle.loads(base64.b64decode(request["call"]))


def _fork(rank: int, request: dict[str, Any]) -> int:
    def run() -> int:
        module, name, args, environ = _call_of(request)
        os.environ.clear()
        os.environ.update(environ)
        getattr(importlib.import_module(module), name)(rank, *args)
        return 0

    return forks.start(run, Path(request["folder"], f"{rank}.txt"))
