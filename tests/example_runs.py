"""Runs of examples/pretrain_gpt.py and examples/train_hf.py in forks of a process that has imported torch and what the
script needs once, so that a run costs what it computes; one fork is one rank.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import runpy
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import forks

EXAMPLES = Path(__file__).parents[1] / "examples"


@dataclass(frozen=True)
class Run:
    """What a run gave.

    Args:
        codes: exit status of each rank.
        output: of rank 0, what it printed.
        errors: of each rank, what it printed on standard error.
    """

    codes: list[int]
    output: str
    errors: list[str]


PARTS = {
    "pretrain_gpt.py": ("gpt_trainer",),
    "train_hf.py": ("hf_trainer", "transformers.models.qwen3.modeling_qwen3"),
}
"""Script -> modules that import what it needs."""


class Server(forks.Server):
    """The process that forks.

    Args:
        script: a name in examples/.
    """

    def __init__(self, script: str = "pretrain_gpt.py") -> None:
        super().__init__(f"from tests import example_runs; example_runs.serve({script!r})")

    def run(self, words: list[str], ranks: int = 1, seconds: float = 300, kill_once: str = "") -> Run:
        """``torchrun --nproc_per_node ranks examples/SCRIPT words``.

        Args:
            words: of the command line.
            ranks: processes; one is started without torchrun.
            seconds: after which all are killed.
            kill_once: a file at whose appearance all are killed.
        """
        with tempfile.TemporaryDirectory() as folder:
            request = {"words": words, "ranks": ranks, "seconds": seconds, "folder": folder, "kill_once": kill_once}
            codes = self.ask(request)
            errors = [Path(folder, f"{rank}.err").read_text(errors="replace") for rank in range(ranks)]
            return Run(codes, Path(folder, "0.out").read_text(errors="replace"), errors)


def read_log(out: Path) -> list[dict[str, Any]]:
    """What a script wrote of each step of a run under ``--save out``."""
    return json.loads((Path(out) / "log.json").read_text())


def serve(script: str) -> None:
    """Answer requests until standard input ends."""
    forks.answer(functools.partial(_run, script), functools.partial(_prepare, PARTS[script]))


def _prepare(modules: tuple[str, ...]) -> None:
    sys.path.insert(0, str(EXAMPLES))
    for module in modules:
        importlib.import_module(module)
    forks.search_less()
    import matplotlib
    import torch._dynamo.utils  # noqa: F401

    import mindspeed_fx.backend  # noqa: F401

    matplotlib.use("Agg")
    import matplotlib.pyplot  # noqa: F401


def _run(script: str, request: dict[str, Any]) -> list[int]:
    port, kill_once = forks.free_port(), request["kill_once"]
    pids = [_fork(script, rank, port, request) for rank in range(request["ranks"])]
    is_there = lambda: bool(kill_once) and os.path.exists(kill_once)  # noqa: E731
    return forks.wait(pids, request["seconds"], grace=10, stop=is_there)[0]


def _fork(script: str, rank: int, port: int, request: dict[str, Any]) -> int:
    def run() -> int:
        if request["ranks"] > 1:
            forks.take_place(rank, request["ranks"], port)
        if script == "pretrain_gpt.py":
            forks.share_write_results()
        return _run_script(script, request["words"])

    return forks.start(run, *(f"{request['folder']}/{rank}.{suffix}" for suffix in ("out", "err")))


def _run_script(script: str, words: list[str]) -> int:
    """Exit status of the script, as Python gives it."""
    sys.argv = [str(EXAMPLES / script), *words]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if not isinstance(end.code, (int, type(None))):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
