"""A step measured, whole and with each family of rewrites off, and by kernel: what each rewrite really bought, and
where the cost model and the measurement part.

    rounds      all forms of the step take turns, so that what else the machine does meets all of them alike
    kernels     torch.profiler's events of the compiled step, mapped to nodes of the graphs
"""

from __future__ import annotations

import functools
import gc
import statistics
from collections import Counter
from dataclasses import dataclass
from typing import Any, Callable, Mapping

import torch
from torch.utils import _pytree as pytree

from mindspeed_fx import torch_compile
from mindspeed_fx.arguments import ArgumentError
from mindspeed_fx.backend import mindspeed
from mindspeed_fx.compat import distributed, dynamo, fake
from mindspeed_fx.cost.hardware import detect
from mindspeed_fx.options import Options
from mindspeed_fx.planning.calibrate.timing import clock, summarize
from mindspeed_fx.planning.measure.kernels import kernel_times, profile_step
from mindspeed_fx.planning.measure.rounds import interleave
from mindspeed_fx.report import progress, recorder
from mindspeed_fx.report.families import active_families
from mindspeed_fx.report.measured import FamilyGain, Measured, StepTime
from mindspeed_fx.report.modelled import Modelled
from mindspeed_fx.report.records import GraphRecord

SECONDS = 10.0
"""Of timing in all, compilations apart."""
RANK_ROUNDS = 10
"""Rounds where this process is one of several: by the clock, ranks would not agree."""
QUIET = {"strict": False, "dump": None, "check": "off"}
"""Options of a form of the step that is only timed."""


def check_measurable(tensors: Any, options: Options) -> None:
    """Says whether a step on these tensors can be timed.

    Args:
        tensors: any nesting of the step's inputs, parameters and buffers.

    Raises:
        ArgumentError: it cannot: nothing would run, another device's kernels would not, or every step changes the
            parameters.
    """
    for tensor in pytree.tree_leaves(tensors):
        if isinstance(tensor, torch.Tensor) and (tensor.device.type == "meta" or fake.is_fake(tensor)):
            kind = "on the meta device" if tensor.device.type == "meta" else "fake"
            raise ArgumentError(
                f"explain: measure is True, and a tensor of shape {tuple(tensor.shape)} is {kind}, where nothing runs; "
                "give parameters and inputs of a device that is here, or measure=False"
            )
    target, here = options.target, device_of(tensors)
    if target not in ("auto", here):
        raise ArgumentError(
            f'explain: measure is True, and option "target" is "{target}", while the step runs on {here}; valid: '
            f'"auto", "{here}", or measure=False'
        )
    if options.optimizer:
        raise ArgumentError(
            f'explain: measure is True, and option "optimizer" is "{options.optimizer}", so that every step measured '
            "would change the parameters; valid: None, or measure=False"
        )


def device_of(tensors: Any) -> str:
    """ "cpu", "cuda" or "npu": where the step runs."""
    types = {t.device.type for t in pytree.tree_leaves(tensors) if isinstance(t, torch.Tensor)} - {"cpu"}
    name = min(types, default="cpu")
    return "npu" if name == "privateuseone" else name


@dataclass(frozen=True)
class Form:
    """The step compiled with some options."""

    run: Callable[[], Any]
    modelled_seconds: float | None


def measure_step(
    model: Callable,
    step: Callable[[Callable], bool],
    prepare: Callable[[], None],
    compiled: Callable,
    graphs: list[GraphRecord],
    options: Mapping[str, Any] | None,
    device: str,
    now: Callable[[], float] | None = None,
) -> Measured:
    """Times a step as it is, compiled, without rewrites, and without each family of rewrites that did something.

    Args:
        model: module or function.
        step: runs one step of what it is given in the model's place; whether that had a backward.
        prepare: brings gradients back to none, before each step.
        compiled: the model compiled with ``options`` within :func:`mindspeed_fx.compat.inductor.kernels_by_node`, which
            has run.
        graphs: records of that compilation.
        device: where the step runs, see :func:`device_of`.
        now: a clock in seconds that waits for the device; None: the host's.
    """
    now = now or functools.partial(clock, torch.device("privateuseone" if device == "npu" else device))
    counts = _total_counts(graphs)
    families = active_families(counts)
    variants = _variants(Options.parse(options), families)
    eager = dynamo.uncompiled(model)
    with progress.task("measure", (*variants, "rounds", "kernels")):
        forms, errors = _compile_forms(eager, step, prepare, variants, options or {})
        runs: dict[str, Callable[[], Any]] = {"eager": lambda: step(eager), **{n: f.run for n, f in forms.items()}}
        rounds = RANK_ROUNDS if distributed.world_is_parallel() else None
        progress.enter("rounds")
        samples = interleave(runs, SECONDS, prepare=prepare, now=now, rounds=rounds)
        progress.enter("kernels")
        profile = profile_step(lambda: step(compiled), device, prepare)
        has_backward = step(compiled)
    hardware = str(graphs[0].effective["hardware"]) if graphs else "none: nothing was compiled"
    result = Measured(
        device=device,
        hardware=None if hardware.startswith("none: ") else hardware,
        is_here=hardware == detect(device)[0],
        has_backward=has_backward,
        rounds=len(samples["compiled"]),
        steps=[_step_time(n, samples[n], forms.get(n)) for n in ("eager", "level 0", "compiled") if n in samples],
        families=[_gain(f, passes, counts, samples, forms, errors) for f, passes in families.items()],
        notes=[f"{name} was not measured: {why}" for name, why in errors.items() if name not in families],
    )
    kernel_times(result, profile, graphs)
    return result


def _total_counts(graphs: list[GraphRecord]) -> Counter[str]:
    """Pass name -> rewrites, over all graphs."""
    return sum((Counter(graph.counts) for graph in graphs), Counter())


def _variants(options: Options, families: Mapping[str, tuple[str, ...]]) -> dict[str, dict[str, Any]]:
    """Form of the step -> what differs from the options."""
    variants: dict[str, dict[str, Any]] = {"compiled": {}}
    if options.level > 0 or options.enable:
        variants["level 0"] = {"level": 0, "enable": ()}
    return variants | {family: {"disable": (*options.disable, *passes)} for family, passes in families.items()}


def _compile_forms(
    eager: Callable,
    step: Callable[[Callable], bool],
    prepare: Callable[[], None],
    variants: Mapping[str, Mapping[str, Any]],
    options: Mapping[str, Any],
) -> tuple[dict[str, Form], dict[str, str]]:
    """Every form of the step that compiles and runs, and the error of every other."""
    forms: dict[str, Form] = {}
    errors: dict[str, str] = {}
    for name, changes in variants.items():
        progress.enter(name)
        try:
            forms[name] = _form(eager, step, prepare, {**options, **QUIET, **changes})
        except Exception as error:  # out of memory without the family, or a defect of torch that the family goes round
            if name == "compiled":
                raise
            errors[name] = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    gc.collect()
    return forms, errors


def _form(eager: Callable, step: Callable, prepare: Callable[[], None], options: dict[str, Any]) -> Form:
    """The step compiled and run once with ``options``."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return eager(*args, **kwargs)

    # What Dynamo compiles hangs on the code object of ``call``, so that it goes when this form of the step does.
    backend = lambda gm, inputs: mindspeed(gm, inputs, options=options)  # noqa: E731
    compiled = torch_compile.compile_with_backend(dynamo.fresh_callable(call), backend=backend)
    prepare()
    with recorder.collecting() as graphs:
        step(compiled)
        modelled = Modelled(list(graphs))
        seconds = modelled.total("seconds") if modelled.rows() else None
    return Form(lambda: step(compiled), seconds)


def _step_time(name: str, samples: list[float], form: Form | None) -> StepTime:
    timing = summarize(samples)
    modelled = form.modelled_seconds if form else None
    return StepTime(name, timing.seconds, timing.spread * timing.seconds, modelled)


def _gain(
    family: str,
    passes: tuple[str, ...],
    counts: Mapping[str, int],
    samples: Mapping[str, list[float]],
    forms: Mapping[str, Form],
    errors: Mapping[str, str],
) -> FamilyGain:
    sites = sum(counts.get(name, 0) for name in passes)
    if family in errors:
        return FamilyGain(family, passes, sites, error=errors[family])
    differences = [off - on for off, on in zip(samples[family], samples["compiled"])]
    low, gain, high = statistics.quantiles(differences, n=4)
    off, on = forms[family].modelled_seconds, forms["compiled"].modelled_seconds
    modelled = off - on if off is not None and on is not None else None
    return FamilyGain(family, passes, sites, statistics.median(samples[family]), gain, high - low, modelled)
