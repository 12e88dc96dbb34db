"""``torch.multiprocessing.spawn`` for tests: each rank is a fork of a process that has imported torch and mindspeed_fx
and compiled once, so that a rank starts in milliseconds and costs what it computes.
"""

from __future__ import annotations

import atexit
import base64
import importlib
import json
import os
import pickle
import subprocess
import sys
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
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        call = base64.b64encode(pickle.dumps((worker.__module__, worker.__qualname__, args, dict(os.environ)))).decode()
        request = {"call": call, "nprocs": nprocs, "seconds": seconds, "folder": folder}
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        if not answer:
            raise RuntimeError("the server of ranks has ended; see its output above")
        codes, late = json.loads(answer)
        outputs = [Path(folder, f"{rank}.txt").read_text(errors="replace") for rank in range(nprocs)]
    print(*outputs, sep="\n")
    assert not late and not any(codes), "\n".join(
        [f"exit statuses {codes}{', out of time' if late else ''}", *(text[-6000:] for text in outputs)]
    )


@cache
def _server() -> subprocess.Popen[str]:
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-c", "from tests import ranks; ranks.serve()"]
    server = subprocess.Popen(command, **pipes, text=True, env=environ)
    atexit.register(server.kill)
    return server


def serve() -> None:
    """Answer requests, one on a line of standard input, until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _prepare()
    for line in sys.stdin:
        request = json.loads(line)
        pids = [_fork(rank, request) for rank in range(request["nprocs"])]
        print(json.dumps(forks.wait(pids, request["seconds"], grace=10)), file=answers, flush=True)


def _prepare() -> None:
    """Import what every rank needs, and what compiling imports late."""
    import torch
    from torch._dynamo.utils import counters

    import mindspeed_fx.backend  # noqa: F401

    torch.set_num_threads(1)
    torch.compile(torch.nn.functional.silu, backend="mindspeed", options={"codegen": "eager"})(torch.ones(2))
    torch._dynamo.reset()
    counters.clear()


def _fork(rank: int, request: dict[str, Any]) -> int:
    def run() -> int:
        module, name, args, environ = pickle.loads(base64.b64decode(request["call"]))
        os.environ.clear()
        os.environ.update(environ)
        getattr(importlib.import_module(module), name)(rank, *args)
        return 0

    return forks.start(run, Path(request["folder"], f"{rank}.txt"))
