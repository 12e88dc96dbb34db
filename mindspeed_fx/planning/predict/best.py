"""What a run left open, searched: every mesh, microbatch, virtual stage, ZeRO stage and recompute that the sizes allow.

Exhaustive over what is listed, since a prediction takes a millisecond. Memory is asked before time, and what fits is
not recomputed.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, Iterator, Mapping

from mindspeed_fx import arguments
from mindspeed_fx.cost.device import Hardware
from mindspeed_fx.cost.hardware import hardware as device
from mindspeed_fx.cost.training import training_constants
from mindspeed_fx.errors import OptionError
from mindspeed_fx.planning.predict.architecture import Architecture
from mindspeed_fx.planning.predict.architectures import architecture
from mindspeed_fx.planning.predict.memory import peak_memory
from mindspeed_fx.planning.predict.prediction import Prediction, predict
from mindspeed_fx.planning.predict.settings import COUNTS, Settings, settings
from mindspeed_fx.planning.predict.step_work import step_work
from mindspeed_fx.planning.predict.timing import time_step
from mindspeed_fx.planning.search.layouts import divisors

CLOSE = 1.02
"""Steps nearer than this are taken for equal, and the simpler settings preferred: below it the order of two runs of one
model is right no more often than not (docs/cost.md)."""
MESH_OF_ONE = {**dict.fromkeys(("devices", "tp", "pp", "cp", "ep"), 1), "batch": 0, "shards": 0}
MICROBATCHES = (1, 2, 4, 8)
"""Sequences of a microbatch that are tried, where the run leaves them open."""


@dataclass
class Searched:
    """The best settings first."""

    predictions: list[Prediction]
    tried: int
    """Settings whose time was modelled."""
    too_large: int
    """Settings that do not fit."""

    @property
    def best(self) -> Prediction:
        return self.predictions[0]

    @property
    def equals(self) -> list[Prediction]:
        """Those that the model cannot tell from the best: their intervals overlap."""
        low, high = self.best.interval
        return [p for p in self.predictions[1:] if low <= p.seconds <= high]

    def __str__(self) -> str:
        lines = [str(self.best), f"{self.tried} settings timed, {self.too_large} do not fit; next:"]
        for p in self.predictions[1:]:
            assert p.settings is not None
            note = ", within the interval of the first" if p in self.equals else ""
            lines.append(f"   {p.seconds:9.4g} s {p.memory.peak / 2**30:6.1f} GiB  {describe(p.settings)}{note}")
        return "\n".join(lines)


def describe(run: Settings) -> str:
    """Settings in a line."""
    sizes = " ".join(f"{n}={getattr(run, n)}" for n in ("tp", "pp", "vpp", "cp", "ep", "dp") if getattr(run, n) > 1)
    recompute = f", {run.recompute} recompute" if run.recompute != "none" else ""
    layers = f" of {run.recompute_layers} layers" if run.recompute_layers else ""
    swap = f", {run.offload} on the host" if run.offload != "none" else ""
    return f"{sizes or 'one device'}, {run.microbatches} x {run.microbatch}, ZeRO {run.zero}{recompute}{layers}{swap}"


def complexity(run: Settings) -> tuple[int, ...]:
    """Settings in the order of how much has to work together."""
    dimensions = sum(n > 1 for n in (run.tp, run.pp, run.cp, run.ep, run.vpp))
    return dimensions, run.recompute != "none", run.vpp, run.pp, run.tp


def open_sizes(model: Architecture, fixed: dict[str, Any], node: int) -> Iterator[dict[str, Any]]:
    """Values of the open settings; what does not divide is left to :class:`Settings` to refuse."""
    devices = fixed["devices"]

    def choices(name: str, values: list) -> list:
        return [fixed[name]] if name in fixed else values

    heads = math.gcd(model.heads, max(model.groups, 1)) if model.groups > 1 else model.heads
    near = [d for d in divisors(math.gcd(devices, node)) if heads % d == 0 or model.heads % d == 0]
    long = fixed["sequence"] > 8192
    experts = [e for e in divisors(model.experts) if e <= devices] if model.experts else [1]
    stages = [p for p in divisors(devices) if p <= model.layers]
    for tp, cp, pp, ep in itertools.product(
        choices("tp", near),
        choices("cp", divisors(devices)[:6] if long else [1]),
        choices("pp", stages),
        choices("ep", experts),
    ):
        if devices % (tp * cp * pp):
            continue
        most = -(-model.layers // pp)
        virtual = [v for v in divisors(most) if v <= 8] if pp > 1 and model.layers % pp == 0 else [1]
        for vpp, microbatch in itertools.product(choices("vpp", virtual), choices("microbatch", list(MICROBATCHES))):
            sizes = {"tp": tp, "cp": cp, "pp": pp, "ep": ep, "vpp": vpp, "microbatch": microbatch}
            for etp in choices("etp", [1, tp] if model.experts and tp > 1 else [1 if model.experts else 0]):
                yield {**sizes, "etp": etp}


def best_settings(
    model: Any, run: dict[str, Any], hardware: "str | Hardware" = "ascend910b2", memory: float = 0.0, keep: int = 5
) -> Searched:
    """The fastest settings that fit, with what ``run`` says fixed.

    Args:
        model: as :func:`predict`.
        run: fields of :class:`Settings`; ``devices``, ``sequence`` and ``batch`` have to be there.
        memory: bytes of a device; 0: nine tenths of what it has.
        keep: how many are returned.

    Raises:
        OptionError: a size is missing, or nothing fits.
    """
    needed = {**dict.fromkeys(("devices", "sequence"), 1), **run} if isinstance(run, Mapping) else run
    arguments.check_names("best_settings: the run", needed, Settings)
    if missing := [n for n in ("devices", "sequence", "batch") if n not in run]:
        raise OptionError(f"best_settings: the run has no {', '.join(missing)}")
    arguments.check_whole("best_settings", "keep", keep)
    if isinstance(memory, bool) or not isinstance(memory, (int, float)) or not 0 <= memory < math.inf:
        arguments.refuse("best_settings", "memory", memory, "bytes are expected, or 0 for nine tenths of the device")
    for name in (n for n in (*COUNTS, "batch", "shards") if n in run):
        arguments.check_whole("settings", name, run[name], least=1 if name in COUNTS else 0)
    settings({**run, **MESH_OF_ONE})  # a value that is wrong by itself would look like one that fits nowhere
    shape, hw = architecture(model), device(hardware)
    limit, constants = memory or 0.9 * hw.memory, training_constants(hw)
    times: list[tuple[float, tuple, Settings]] = []
    tried = too_large = 0
    seen: set[Settings] = set()
    for sizes in open_sizes(shape, run, hw.node):
        for zero, recompute in itertools.product(
            [run["zero"]] if "zero" in run else ([1, 3] if sizes["pp"] == 1 else [1]),
            [run["recompute"]] if "recompute" in run else ["none", "full"],
        ):
            try:
                one = settings({**sizes, **run, "zero": zero, "recompute": recompute})
            except OptionError:
                continue
            if one in seen or (one.vpp > 1 and one.microbatches % one.pp):
                continue
            seen.add(one)
            if peak_memory(shape, one, hw.target).peak > limit:
                too_large += 1
                continue
            tried += 1
            seconds = time_step(shape, one, step_work(shape, one), hw, constants).seconds
            times.append((seconds, complexity(one), one))
            if recompute == "none":
                break  # recomputing what fits only costs time
    if not times:
        raise OptionError(f"best_settings: none of {too_large} settings fits in {limit / 2**30:.1f} GiB of {hw.name}")
    times.sort(key=lambda t: t[:2])
    fastest = times[0][0]
    close = sorted((t for t in times if t[0] <= CLOSE * fastest), key=lambda t: (t[1], t[0]))
    ordered = [close[0], *(t for t in times if t is not close[0])][:keep]
    return Searched([predict(shape, t[2], hw) for t in ordered], tried, too_large)
