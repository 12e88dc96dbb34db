"""Chosen iterations of chosen ranks in a trace: torch.profiler on cpu and cuda, torch_npu.profiler on npu.

    with mindspeed_fx.Profile("traces", start=10, end=12) as profile:
        for batch in loader:
            train(batch)
            profile.step()

Iterations count from 1. Fused operators bear their names: as calls (``mindspeed::rms_norm``) where no code is
generated; in the name of the kernel (``cpp_fused_rms_norm_0``, ``triton_red_fused_rms_norm_0``) where Inductor
generates it, on a CPU for graphs that are compiled inside the ``with``.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any, Iterable, Sequence

import torch
import torch.distributed as dist

from mindspeed_fx import arguments

LEVELS = ("level_none", "level0", "level1", "level2")
EXPORTS = ("text", "db")


class Profile:
    """Records iterations ``start`` to ``end - 1``; the trace of rank N is ``path/rankN.*``.

    Args:
        path: folder of the traces.
        start, end: the first iteration that is recorded, and the one before which recording ends; from 1.
        first: number of the first iteration that is run; of a run that goes on from a checkpoint another than 1.
            Iterations before it are not recorded.
        ranks: ranks that record, of ``torch.distributed`` or of the environment; None: all.
        device: "cpu", "cuda" or "npu"; None: the accelerator at hand, else cpu.
        level: how much torch_npu records: "level_none", "level0", "level1", "level2". Of no meaning elsewhere.
        with_cpu: calls on the host beside the accelerator's kernels; on cpu there is nothing else.
        with_stack: of each call, where in the source; with host calls alone.
        with_memory: allocations.
        record_shapes: of the calls' inputs; with host calls alone.
        simplify: torch_npu removes raw data.
        export: "text" (JSON) or, on npu, "db".

    Raises:
        ValueError: ``end`` is not after ``start``, ``start`` is below 1, or a word is none of those above.
    """

    def __init__(
        self,
        path: str = "./profile_dir",
        *,
        start: int = 10,
        end: int = 12,
        first: int = 1,
        ranks: Sequence[int] | None = (0,),
        device: str | None = None,
        level: str = "level0",
        with_cpu: bool = True,
        with_stack: bool = False,
        with_memory: bool = False,
        record_shapes: bool = False,
        simplify: bool = False,
        export: str = "text",
    ) -> None:
        self.device = device or find_device()
        check_steps(start, end)
        _check_word("device", self.device, ("cpu", "cuda", "npu"))
        _check_word("level", level, LEVELS)
        _check_word("export", export, EXPORTS if self.device == "npu" else EXPORTS[:1])
        arguments.check_folder("Profile", "path", path)
        arguments.check_whole("Profile", "first", first)
        if ranks is not None and (isinstance(ranks, str) or not _are_ranks(ranks)):
            arguments.refuse("Profile", "ranks", ranks, "a list of ranks from 0 on is expected, as in [0], or None")
        switches = {"with_cpu": with_cpu, "with_stack": with_stack, "with_memory": with_memory}
        for name, value in {**switches, "record_shapes": record_shapes, "simplify": simplify}.items():
            arguments.check_bool("Profile", name, value)
        self.path, self.iteration = str(path), first
        self.start, self.end = max(start, first), end
        self.rank = find_rank()
        self.is_recording_rank = (ranks is None or self.rank in ranks) and self.start < end
        self._words: dict[str, Any] = {"level": level, "export": export, "simplify": simplify, "with_cpu": with_cpu}
        self._settings = {"record_shapes": record_shapes, "profile_memory": with_memory, "with_stack": with_stack}
        self._profiler: Any = None
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Profile:
        if self.is_recording_rank:
            if self.device == "cpu":
                from mindspeed_fx.compat import inductor  # which a table of flags has no use for

                self._open.enter_context(inductor.kernels_in_traces())
            self._profiler = self._build()
            self._profiler.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def step(self) -> None:
        """An iteration has ended."""
        self.iteration += 1
        if self._profiler is not None:
            self._profiler.step()

    def close(self) -> None:
        """Ends recording, and writes what is not written yet; nothing where all is done."""
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            profiler.stop()
        self._open.close()

    def _build(self) -> Any:
        before = self.start - self.iteration
        warmup = min(before, 1)
        schedule = {
            "wait": 0,
            "warmup": warmup,
            "active": self.end - self.start,
            "repeat": 1,
            "skip_first": before - warmup,
        }
        worker = f"rank{self.rank}"
        if self.device == "npu":
            from mindspeed_fx.compat import npu

            words = {**self._words, **self._settings}
            return npu.profiler(schedule=schedule, path=self.path, worker=worker, **words)
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("Profile: device is 'cuda', and no CUDA device is here; valid: cpu, or None to find one")
        kinds = torch.profiler.ProfilerActivity
        host = [kinds.CPU] if self.device == "cpu" or self._words["with_cpu"] else []
        return torch.profiler.profile(
            activities=[*host, *([kinds.CUDA] if self.device == "cuda" else [])],
            schedule=torch.profiler.schedule(**schedule),
            on_trace_ready=torch.profiler.tensorboard_trace_handler(self.path, worker_name=worker),
            **self._settings,
        )


def _are_ranks(values: Any) -> bool:
    return isinstance(values, Iterable) and all(isinstance(r, int) and r >= 0 for r in values)


def check_steps(start: int, end: int) -> None:
    """Says whether an iteration lies between.

    Raises:
        ValueError: none does.
    """
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in (start, end))
    if not whole or start < 1 or end <= start:
        raise ValueError(
            f"start {start!r}, end {end!r}: iterations from start to the one before end are recorded; they count from 1"
        )


def _check_word(name: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise ValueError(f"{name} is {value!r}; valid: {', '.join(valid)}")


def find_device() -> str:
    """ "npu" before "cuda", which torch_npu's transfer_to_npu calls an NPU too; "cpu" where there is neither."""
    if hasattr(torch, "npu") and torch.npu.is_available():
        return "npu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def find_rank() -> int:
    """This process's rank, in its group or by its environment; 0 where neither says."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))
