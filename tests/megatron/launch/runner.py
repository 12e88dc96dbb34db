"""Runs an entry script of Megatron-LM over gloo as its users do, and reads what every iteration logged.

A server process (:func:`serve`) imports torch, Megatron and the adaptor once; each rank of each run is a fork of it, so
that a run costs seconds, and nothing of the caller's process, such as process groups, is in it.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import shutil
import signal
import sys
import tarfile
import tempfile
import traceback
import zlib
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tests import forks

HERE = Path(__file__).parent
ARCHIVE = HERE / "megatron_lm_0.16.1_training.tar.gz"
ENTRIES = HERE / "entries"
"""Entry scripts that Megatron-LM has not."""


@dataclass
class Run:
    """What one run of a script gave.

    Args:
        losses: iteration -> name -> value, of the rank that holds the loss.
        grad_norms: iteration -> global norm of the gradients.
        graphs: of each rank, graphs compiled.
        chunks: of each rank, chunks of the model that were compiled.
        breaks: texts of graph breaks, over all ranks.
        error: the last lines of the first rank that failed; None when all ended well.
        output: of each rank, what it printed.
    """

    losses: dict[int, dict[str, float]] = field(default_factory=dict)
    grad_norms: dict[int, float] = field(default_factory=dict)
    graphs: list[int] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    breaks: list[str] = field(default_factory=list)
    error: str | None = None
    output: list[str] = field(default_factory=list)


@cache
def checkout() -> Path:
    """A folder with Megatron-LM's training package and entry scripts, as a user's checkout has them."""
    given = os.environ.get("MEGATRON_LM")
    if given:
        return Path(given)
    folder = Path(tempfile.gettempdir()) / f"megatron_lm_training_{os.getuid()}_{ARCHIVE.stat().st_size}"
    if not (folder / "pretrain_gpt.py").exists():
        partial = Path(tempfile.mkdtemp(dir=folder.parent))
        with tarfile.open(ARCHIVE) as archive:
            archive.extractall(partial, filter="data")
        try:
            partial.rename(folder)
        except OSError:  # another process was faster
            pass
    return folder


@cache
def adapted(entry: str) -> Path:
    """The entry script as a user of the adaptor starts it: one line more, the first."""
    source = ENTRIES / entry if (ENTRIES / entry).exists() else checkout() / entry
    text = "import mindspeed_fx.megatron_adaptor\n" + source.read_text()
    script = checkout() / f"adapted_{zlib.crc32(text.encode()):08x}_{entry}"
    if not script.exists():
        partial = script.with_suffix(f".{os.getpid()}")
        partial.write_text(text)
        partial.rename(script)
    return script


def prepare() -> None:
    """Import in this process what every rank needs, so that forks have it."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if str(checkout()) not in sys.path:
        sys.path.insert(0, str(checkout()))
    import torch

    torch.set_num_threads(1)
    import torch._dynamo.utils  # noqa: F401

    import mindspeed_fx.backend  # noqa: F401
    import mindspeed_fx.megatron_adaptor

    forks.search_less()
    mindspeed_fx.megatron_adaptor.apply()
    import gpt_builders  # noqa: F401
    import megatron.core.tokenizers.text  # noqa: F401
    import megatron.training.training  # noqa: F401
    import model_provider  # noqa: F401


def run(
    args: list[str],
    world: int,
    *,
    entry: str = "pretrain_gpt.py",
    environ: dict[str, str] | None = None,
    setup: str = "",
    seconds: float = 240,
) -> Run:
    """``torchrun --nproc-per-node=world entry args``, with the adaptor imported first.

    Args:
        args: command line of the script.
        world: processes.
        entry: a file of Megatron-LM's checkout.
        environ: further environment variables.
        setup: "module:function", called in every rank with its number before the script.
        seconds: after which all ranks are killed and the run is an error.
    """
    folder = Path(tempfile.mkdtemp(prefix="launch_"))
    request = Request(str(folder), world, forks.free_port(), entry, list(args), environ or {}, setup, seconds)
    codes, late = _server().ask(asdict(request))
    try:
        return _read(folder, codes, late)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Request:
    """What the server is asked: the arguments of :func:`run`, with a folder for what the ranks write."""

    folder: str
    world: int
    port: int
    entry: str
    args: list[str]
    environ: dict[str, str]
    setup: str
    seconds: float


@cache
def _server() -> forks.Server:
    return forks.Server("from tests.megatron.launch import runner; runner.serve()")


def serve() -> None:
    """Answer requests until standard input ends."""
    forks.answer(_run, prepare)


def _run(values: dict[str, Any]) -> tuple[list[int], bool]:
    """(exit statuses, whether time ran out)."""
    request = Request(**values)
    pids = [_fork(rank, request) for rank in range(request.world)]
    return forks.wait(pids, request.seconds, grace=3)


def _fork(rank: int, request: Request) -> int:
    folder = Path(request.folder)

    def run() -> int:
        forks.take_place(rank, request.world, request.port)
        os.environ.update(request.environ)
        forks.share_write_results()
        return _run_rank(rank, folder, request)

    return forks.start(run, folder / f"{rank}.txt")


def _run_rank(rank: int, folder: Path, request: Request) -> int:
    """0 where the script ended well."""
    record: dict[str, Any] = {"losses": {}, "grad_norms": {}, "chunks": 0, "breaks": []}
    _record_logs(record)
    if request.setup:
        module, _, function = request.setup.partition(":")
        getattr(importlib.import_module(module), function)(rank)
    sys.argv = [str(adapted(request.entry)), *request.args]
    code = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        code = 1
        traceback.print_exc()
    from torch._dynamo.utils import counters

    record["graphs"] = counters["stats"]["unique_graphs"]
    record["breaks"] = list(counters["graph_break"])
    record["code"] = code
    (folder / f"{rank}.json").write_text(json.dumps(record))
    return code


def _record_logs(record: dict[str, Any]) -> None:
    """Keep what ``training_log`` is told, and count the chunks that are compiled."""
    import inspect

    from megatron.training import training

    from mindspeed_fx.megatron.training import compile_chunks

    log, compile_chunk = training.training_log, compile_chunks.compile_chunk
    signature = inspect.signature(log)

    def keep(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        iteration = int(given["iteration"])
        if given["loss_dict"]:
            record["losses"][iteration] = {k: float(v) for k, v in given["loss_dict"].items()}
        if given["grad_norm"] is not None:
            record["grad_norms"][iteration] = float(given["grad_norm"])
        return log(*args, **kwargs)

    def count(*args: Any, **kwargs: Any) -> Any:
        record["chunks"] += 1
        return compile_chunk(*args, **kwargs)

    training.training_log, compile_chunks.compile_chunk = keep, count


def _read(folder: Path, codes: list[int], late: bool) -> Run:
    result = Run()
    failures = []
    for rank, code in enumerate(codes):
        output = (folder / f"{rank}.txt").read_text(errors="replace")
        result.output.append(output)
        file = folder / f"{rank}.json"
        if not file.exists():
            # Before what the others say of a lost peer, unless it was killed for them.
            order = 1 if code == -signal.SIGKILL else -1
            failures.append((order, f"rank {rank} ended {_ending(code)}without a record\n{_tail(output)}"))
            continue
        record = json.loads(file.read_text())
        result.losses |= {int(k): v for k, v in record["losses"].items()}
        result.grad_norms |= {int(k): v for k, v in record["grad_norms"].items()}
        result.graphs.append(record["graphs"])
        result.chunks.append(record["chunks"])
        result.breaks += record["breaks"]
        if record["code"]:
            failures.append((0, f"rank {rank}\n{_tail(output)}"))
    if failures:
        result.error = sorted(failures)[0][1]
    elif late:
        result.error = "out of time"
    return result


def _ending(code: int) -> str:
    return f"by {signal.Signals(-code).name} " if code < 0 else ""


def _tail(output: str, lines: int = 25) -> str:
    return "\n".join(output.splitlines()[-lines:])
