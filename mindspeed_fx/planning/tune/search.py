"""Settings of a launch that fit into a device, the fastest first, and reasons for what changed."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator, Sequence

from mindspeed_fx.cost.device import Hardware
from mindspeed_fx.cost.hardware import hardware as device
from mindspeed_fx.cost.training import TrainingConstants, training_constants
from mindspeed_fx.errors import OptionError
from mindspeed_fx.planning.predict.architecture import Architecture
from mindspeed_fx.planning.predict.best import CLOSE, complexity, open_sizes
from mindspeed_fx.planning.predict.memory import peak_memory
from mindspeed_fx.planning.predict.prediction import Prediction, predict
from mindspeed_fx.planning.predict.settings import Settings
from mindspeed_fx.planning.predict.step_work import step_work
from mindspeed_fx.planning.predict.timing import time_step
from mindspeed_fx.planning.search.branch_and_bound import memory_of
from mindspeed_fx.planning.tune.launch import SEARCHED, Launch, read_launch
from mindspeed_fx.planning.tune.words import changed_flags
from mindspeed_fx.report import progress

OVERLAPS = ((True, True), (True, False), (False, False))
"""Gradients' reductions and parameters' gathers behind kernels; the second needs the first."""
EXPLAINED = 60
"""Settings whose flags are looked up before the search gives up: those that a flag of the launch refuses come in
families, so that more are rarely needed."""


@dataclass
class Tuned:
    """A launch, what is suggested, and why."""

    launch: Launch
    words: list[str]
    """Arguments that are suggested, all of them."""
    as_it_is: Prediction
    best: Prediction
    memory: float
    """Bytes of a device that may be used."""
    tried: int
    too_large: int
    reasons: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """Flags that refused faster settings."""

    @property
    def is_changed(self) -> bool:
        return self.words != self.launch.words

    @property
    def changes(self) -> tuple[list[list[str]], list[str]]:
        """(flags with new values, flags that are gone)."""
        return changed_flags(self.launch.words, self.words)

    @property
    def fits(self) -> bool:
        """Whether the launch fits as it is."""
        return self.as_it_is.memory.peak <= self.memory


class _Model:
    """Seconds and bytes of settings of one model on one device."""

    def __init__(self, shape: Architecture, hw: Hardware, limit: float):
        self.shape, self.hw, self.limit = shape, hw, limit
        self.constants: TrainingConstants = training_constants(hw)

    def fits(self, run: Settings) -> bool:
        return peak_memory(self.shape, run, self.hw.target).peak <= self.limit

    def seconds(self, run: Settings) -> float:
        return time_step(self.shape, run, step_work(self.shape, run), self.hw, self.constants).seconds


def tune(
    words: Sequence[str],
    devices: int,
    hardware: "str | Hardware" = "ascend910b2",
    memory: "str | int | None" = None,
    fixed: Sequence[str] = (),
) -> Tuned:
    """The fastest settings of a launch by the model, as words that Megatron's and MindSpeed's flags take.

    Args:
        words: arguments of the entry script.
        devices: how many run it.
        hardware: a device of the cost model.
        memory: of one device, "60GiB" or bytes; None: nine tenths of what it has.
        fixed: names of ``SEARCHED`` that stay.

    Raises:
        OptionError: the launch cannot be read, or nothing fits.
    """
    launch, hw = read_launch(words, devices, fixed), device(hardware)
    if hw.target != "npu":  # torch's compiler fuses it
        launch = dataclasses.replace(launch, settings=dataclasses.replace(launch.settings, gelu_chain=False))
    model = _Model(launch.model, hw, memory_of(memory, hw))
    with progress.task("tune", ("settings",)):
        times, too_large = _timed(launch, model)
    own = predict(launch.model, launch.settings, hw)
    if not times:
        raise OptionError(
            f"none of {too_large} settings fits in {model.limit / 2**30:.1f} GiB of {hw.name}; as it is the launch "
            f"needs {own.memory.peak / 2**30:.1f} GiB"
        )
    run, new, refused = _accepted(launch, _ordered(launch, model, times))
    if new == launch.words and own.memory.peak > model.limit:
        raise OptionError(
            f"the launch needs {own.memory.peak / 2**30:.1f} GiB, {model.limit / 2**30:.1f} fit, and settings that fit "
            f"are refused by {', '.join(sorted(refused))}"
        )
    result = Tuned(launch, new, own, predict(launch.model, run, hw), model.limit, len(times), too_large)
    result.refused = sorted(refused)
    result.reasons = [_reason(name, launch, run, model) for name in SEARCHED if _part(name, run, launch) is not None]
    return result


def _accept(launch: Launch, run: Settings) -> bool:
    """Whether Megatron takes the sizes of ``run``: what it asks beyond what Settings ask."""
    old, shape = launch.settings, launch.model
    heads, groups = shape.heads, shape.groups
    if run.tp != old.tp and (heads % run.tp or groups % run.tp):
        return False
    if run.cp > 1 and (run.cp, run.tp, run.cp_kind) != (old.cp, old.tp, old.cp_kind):
        if run.sequence % (2 * run.cp * run.tp) or (run.cp_kind == "ulysses" and heads % (run.cp * run.tp)):
            return False
    if run.sequence % run.tp:
        return False
    if (run.pp, run.vpp) != (old.pp, old.vpp):
        if launch.layers % (run.pp * run.vpp) or (run.vpp > 1 and run.microbatches % run.pp):
            return False
        if run.vpp > 1 and run.pp == 2 and "--no-overlap-p2p-communication" in launch.texts:
            return False
    return not shape.experts or not (run.tp * run.cp * run.dp) % (run.ep * run.expert_tp)


def _fixed(launch: Launch) -> dict[str, Any]:
    """Fields that the search leaves as they are."""
    old, held = launch.settings, launch.held
    names = {"microbatch", "tp", "pp", "vpp", "cp", "ep"} & set(held)
    run = {f.name: getattr(old, f.name) for f in dataclasses.fields(old)}
    for name in {"microbatch", "tp", "pp", "vpp", "cp", "ep", "etp"} - names:
        del run[name]
    if "ep" in names or launch.texts.get("--moe-token-dispatcher-type") != "alltoall":
        run["etp"] = old.etp
    if old.tp == 1:
        run["sequence_parallel"] = True
    if "zero" not in held:
        run["zero"] = max(old.zero, 1)
    if "overlap" not in held and run["zero"]:
        run |= {"overlap_gradients": True, "overlap_parameters": True}
    return run


def _candidates(launch: Launch, model: _Model) -> Iterator[Settings]:
    fixed = _fixed(launch)
    kinds = [launch.settings.cp_kind] if "cp" in launch.held else ["ring", "ulysses"]
    seen: set[Settings] = set()
    for sizes in open_sizes(launch.model, fixed, model.hw.node):
        for kind in kinds if sizes["cp"] > 1 else [launch.settings.cp_kind]:
            try:
                run = Settings(**{**fixed, **sizes, "cp_kind": kind})
            except OptionError:
                continue
            if run not in seen and _accept(launch, run):
                seen.add(run)
                yield run


def _timed(launch: Launch, model: _Model) -> tuple[list[tuple[float, Settings]], int]:
    """(seconds and settings of all that fit, how many do not)."""
    times, too_large = [], 0
    progress.enter("settings")
    runs = list(_candidates(launch, model))
    for number, run in enumerate(runs):
        progress.note("of the model", number, len(runs))
        savers = _with_savers(launch, run, model)
        too_large += not savers
        if savers:
            times.append(min(savers, key=lambda pair: pair[0]))
    return times, too_large


def _with_savers(launch: Launch, run: Settings, model: _Model) -> list[tuple[float, Settings]]:
    """``run`` with each kind of swap and as few layers recomputed as fit, and seconds; without swap alone where nothing
    needs be recomputed.
    """
    results = []
    for kind in launch.swaps:
        one = dataclasses.replace(run, offload=kind)
        least = one if "recompute" in launch.held else _least_recompute(launch, one, model)
        if least is None or not model.fits(least):
            continue
        results.append((model.seconds(least), least))
        if kind == "none" and least.recompute == "none":
            break
    return results


def _least_recompute(launch: Launch, run: Settings, model: _Model) -> Settings | None:
    """``run`` with as few layers recomputed as fit, None where none do."""

    def with_layers(count: int) -> Settings:
        mode = "full" if count else "none"
        return dataclasses.replace(run, recompute=mode, recompute_layers=count)

    low, high = 0, max(1, launch.layers // (run.pp * run.vpp))
    if model.fits(with_layers(low)):
        return with_layers(low)
    if not model.fits(with_layers(high)):
        return None
    while high - low > 1:  # low does not fit, high does: more layers never need more memory
        middle = (low + high) // 2
        low, high = (low, middle) if model.fits(with_layers(middle)) else (middle, high)
    return with_layers(high)


def _ordered(launch: Launch, model: _Model, times: list[tuple[float, Settings]]) -> Iterator[Settings]:
    """The best first: of those that the model takes for equal what changes least."""
    old = launch.settings
    if model.fits(old):
        times = [*times, (model.seconds(old), old)]
    fastest = min(seconds for seconds, _ in times)
    close = [pair for pair in times if pair[0] <= CLOSE * fastest]
    close.sort(key=lambda pair: (pair[1] != old, _distance(pair[1], old), complexity(pair[1]), pair[0]))
    rest = sorted((pair for pair in times if pair[0] > CLOSE * fastest), key=lambda pair: pair[0])
    for _, run in itertools.islice((*close, *rest), EXPLAINED):
        yield from _overlaps(launch, run, model)


def _distance(run: Settings, old: Settings) -> int:
    return sum(getattr(run, f.name) != getattr(old, f.name) for f in dataclasses.fields(run))


def _overlaps(launch: Launch, run: Settings, model: _Model) -> Iterator[Settings]:
    """``run`` with the ZeRO stage and the overlap switches that are fastest, then with the others."""
    old = launch.settings
    if run == old or "overlap" in launch.held:
        yield run
        return
    stages = [old.zero] if "zero" in launch.held else sorted({old.zero, max(old.zero, 1)})
    variants = [
        dataclasses.replace(run, zero=zero, overlap_gradients=gradients, overlap_parameters=parameters)
        for zero, (gradients, parameters) in itertools.product(stages, OVERLAPS)
        if zero or not parameters
    ]
    pairs = [(model.seconds(v), v) for v in variants if model.fits(v)]
    fastest = min((seconds for seconds, _ in pairs), default=0.0)
    pairs.sort(key=lambda pair: (pair[0] > 1.001 * fastest, _distance(pair[1], old), pair[0]))
    yield from (v for _, v in pairs)


def _accepted(launch: Launch, runs: Iterator[Settings]) -> tuple[Settings, list[str], set[str]]:
    """The first settings whose flags refuse nothing that the launch has not refused, their words, and what refused
    others.

    Where none are, the launch as it is.
    """
    explain = _refusals()
    before = explain(launch.words)
    refused: set[str] = set()
    for run in runs:
        words = launch.words_of(run)
        if words == launch.words:
            return launch.settings, words, refused
        new = explain(words) - before
        if not new:
            return run, words, refused
        refused |= new
    return launch.settings, launch.words, refused


def _refusals() -> Callable[[Sequence[str]], set[str]]:
    from mindspeed_fx.megatron.flags import explain

    return lambda words: {a.flag for a in explain(list(words)) if a.is_refused}


def _part(name: str, run: Settings, launch: Launch) -> dict[str, Any] | None:
    """Fields of ``run`` that belong to a name of ``SEARCHED``, as the launch has them; None where they are equal."""
    fields = {
        "recompute": ("recompute", "recompute_layers"),
        "swap": ("offload",),
        "overlap": ("overlap_gradients", "overlap_parameters"),
        "cp": ("cp", "cp_kind") if run.cp > 1 else ("cp",),
    }.get(name, (name,))
    old = {f: getattr(launch.settings, f) for f in fields}
    return old if any(getattr(run, f) != v for f, v in old.items()) else None


def _reason(name: str, launch: Launch, run: Settings, model: _Model) -> str:
    """What the suggestion would be with one part of it as it was."""
    old = _part(name, run, launch)
    assert old is not None
    values = ", ".join(f"{f} {v} -> {getattr(run, f)}" for f, v in old.items() if getattr(run, f) != v)
    try:
        other = dataclasses.replace(run, **old)
    except OptionError:
        return f"{values}: with the old value the sizes do not divide"
    if not _accept(launch, other):
        return f"{values}: with the old value Megatron refuses the sizes"
    needed = peak_memory(launch.model, other, model.hw.target).peak
    if needed > model.limit:
        return f"{values}: with the old value {needed / 2**30:.1f} GiB are needed, {model.limit / 2**30:.1f} fit"
    seconds, best = model.seconds(other), model.seconds(run)
    note = f"{seconds / best:.3f} of the time"
    saved = (needed - peak_memory(launch.model, run, model.hw.target).peak) / 2**30
    return f"{values}: with the old value {note}" + (f" and {saved:.1f} GiB more" if saved > 0.1 else "")
