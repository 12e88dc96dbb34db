"""Runs files of Megatron-core's tests, one after the other, each in forked processes, one a rank.

Started by ``__main__`` as ``python session.py REQUEST.json``: a process of its own, because the checkout's package of
tests has the name of ours. It imports torch, Megatron-core and the adaptor once; the forks have them.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

PLUGINS = ("pytest_timeout", "pytest_mock", "pytest_asyncio")
"""Of pytest, that the tests use; a test whose plugin is not installed fails by its name."""

ENDLESS = {
    "pipeline_parallel/test_schedules.py::test_forward_backward_pipelining_with_interleaving_with_custom_pgs": (
        "ranks make different groups under one name, of which gloo makes none: NCCL connects at first use, and they "
        "are not used"
    ),
    "dist_checkpointing/test_serialization.py::TestSerialization::test_remove_sharded_tensors": (
        "rank 0 ends in torch 2.13, whose FileSystemWriter has no `metadata_path`, which Megatron 0.16.1 asks for, and "
        "the other ranks wait for it"
    ),
}
"""Tests that wait for ever over gloo, and why: they are not begun."""

PRELOADED = (
    "torch._dynamo.utils",
    "mindspeed_fx.backend",
    "mindspeed_fx.megatron_adaptor",
    "megatron.training.training",
    "on_cpu",
)
"""Imported before ranks are forked; the adaptor before Megatron's training, as its users do."""


def main(request: dict[str, Any]) -> None:
    sys.path.insert(0, request["checkout"])
    os.chdir(request["checkout"])
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    os.environ["MINDSPEED_FX_COMPILE"] = str(int(request["compile"]))
    import torch

    torch.set_num_threads(1)
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    for file in request["files"]:
        run_file(file, request)


def run_file(file: str, request: dict[str, Any]) -> None:
    """One file on all ranks; those that have not ended in time are killed."""
    start = time.monotonic()
    folder = Path(request["folder"]) / file.replace("/", "~")
    folder.mkdir(parents=True)
    port = _free_port()
    pids = [_fork(file, rank, port, folder, request) for rank in range(request["world"])]
    waiting, late = set(pids), False
    while waiting:
        for pid in list(waiting):
            if os.waitpid(pid, os.WNOHANG)[0]:
                waiting.discard(pid)
        if not late and time.monotonic() - start > request["seconds"]:
            late = True
            for pid in waiting:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    for pid in pids:
        _end_children(pid)
    (folder / "end.json").write_text(json.dumps({"late": late, "seconds": round(time.monotonic() - start, 1)}))
    print(f"{file}: {time.monotonic() - start:.0f} s{', out of time' if late else ''}", flush=True)


def _end_children(pid: int) -> None:
    """End what a rank has started, such as the process of an asynchronous save, and left behind."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _fork(file: str, rank: int, port: int, folder: Path, request: dict[str, Any]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        output = os.open(folder / f"{rank}.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": request["world"], "MASTER_PORT": port}
        os.environ.update({k: str(v) for k, v in places.items()}, MASTER_ADDR="127.0.0.1")
        _run_pytest(file, rank, folder, request)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _run_pytest(file: str, rank: int, folder: Path, request: dict[str, Any]) -> None:
    import on_cpu
    import pytest

    on_cpu.share_gloo_loop()
    on_cpu.answer_test_modules()
    on_cpu.answer_engine_specs()
    if request["compile"]:
        on_cpu.compile_modules()
    options = ["-o", "addopts=", "-p", "no:cacheprovider", "-q", "--tb=short", "--continue-on-collection-errors"]
    limits = [f"--timeout={request['test_seconds']}", "--timeout-method=signal", f"--basetemp={folder}/rank{rank}"]
    only = ["-k", request["only"]] if request["only"] else []
    plugins = [w for name in PLUGINS if importlib.util.find_spec(name) for w in ("-p", name)]
    endless = [w for test in ENDLESS for w in ("--deselect", f"tests/unit_tests/{test}")]
    pytest.main(
        [*options, *limits, *plugins, *only, *endless, file], plugins=[on_cpu.Recorder(folder / f"{rank}.jsonl")]
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
