"""``--op-cal-tflops``: FLOP of the iterations since the last line, per second and as shares of the device's peak."""

from __future__ import annotations

import time
from argparse import Namespace
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_fx.cost.hardware import detect, hardware
from mindspeed_fx.megatron.flags import tools
from mindspeed_fx.megatron.groups import current_device
from mindspeed_fx.training.flop_count import FlopCount
from mindspeed_fx.training.profile import find_device

PEAK_FLAG = tools.PEAK_FLAG


class Meter:
    """Counts while iterations run inside ``with meter.count``.

    Args:
        args: Megatron's.
        eager: chunks are not compiled.
    """

    def __init__(self, args: Namespace, eager: bool) -> None:
        self.args, self.eager, self.count = args, eager, FlopCount(eager)
        self.peak, self.why = find_peak(args, find_device())
        self._start = time.perf_counter()
        self._last = args.iteration

    def after(self, iteration: int) -> None:
        """Before Megatron logs ``iteration`` the last rank prints, and counting begins anew. Every rank takes part."""
        if iteration % self.args.log_interval:
            return
        if find_device() != "cpu":
            torch.accelerator.synchronize()
        seconds, iterations = time.perf_counter() - self._start, max(iteration - self._last, 1)
        own = [self.count.model // iterations, self.count.hardware // iterations]
        total = self._sum(own)
        if self.args.rank == self.args.world_size - 1:
            text = describe(own, total, self.args.world_size, seconds / iterations, self.peak, self.why)
            print(f"mindspeed_fx: iteration {iteration} | {text}{self._unknown()}", flush=True)
        self.count.model = self.count.hardware = 0
        self._start, self._last = time.perf_counter(), iteration

    def _unknown(self) -> str:
        """What the numbers lack."""
        text = f" | not counted: {', '.join(self.count.uncounted)}" if self.count.uncounted else ""
        if self.eager and "mla_up_proj" in (getattr(self.args, "recompute_modules", None) or []):
            text += (
                " | the products that mla_up_proj computes again are counted as the model's: chunks are not compiled"
            )
        return text

    def _sum(self, own: list[int]) -> list[int]:
        """Over all ranks, whose work differs: stages, experts, parts of a sequence."""
        if not dist.is_initialized() or self.args.world_size == 1:
            return own
        values = torch.tensor(own, dtype=torch.int64, device=current_device())
        dist.all_reduce(values)
        return values.tolist()


def describe(own: list[int], total: list[int], ranks: int, seconds: float, peak: float | None, why: str) -> str:
    """The line of one iteration.

    Args:
        own, total: FLOP of this rank and of all, of the model and of the hardware.
        seconds: of the iteration.
        peak: FLOP/s of one device; None: not known.
        why: where the peak comes from, or why there is none.
    """
    model, hardware_rate = (n / seconds / ranks for n in total)
    share = f"no MFU: {why}"
    if peak is not None:
        share = f"MFU {model / peak:.2%}, HFU {hardware_rate / peak:.2%} of {peak / 1e12:g} TFLOP/s ({why})"
    return (
        f"model FLOP: {own[0]} this rank, {total[0]} all {ranks} | "
        f"hardware FLOP, with what is computed again: {own[1]} this rank, {total[1]} all {ranks} | "
        f"TFLOP/s per device: model {model / 1e12:.6g}, hardware {hardware_rate / 1e12:.6g} | {share}"
    )


def find_peak(args: Any, device: str) -> tuple[float | None, str]:
    """FLOP/s of one device in the type of the run's products and where that comes from, or None and why."""
    peak = getattr(args, "mindspeed_peak_tflops", None)
    if peak:
        return peak * 1e12, PEAK_FLAG
    if device == "cpu":
        return None, f"the table of a cpu is no peak of this one; {PEAK_FLAG} gives it"
    name, why = detect(device)
    if name is None:
        return None, f"{why.partition(';')[0]}; {PEAK_FLAG} gives its peak"
    dtype = str(args.params_dtype).removeprefix("torch.")
    table = hardware(name).matrix
    if dtype not in table:
        return None, f"{name} has no peak for {dtype}; {PEAK_FLAG} gives it"
    return float(table[dtype]), f"{name}, {dtype}"
