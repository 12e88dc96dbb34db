"""The checks: every operator, every kernel of the target, every fusion, each against its reference in float64."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Callable, Iterator

import torch
from torch.utils import _pytree as pytree

from mindspeed_fx import torch_compile
from mindspeed_fx.compat import dynamo
from mindspeed_fx.kernels.base import Lowering, Operator, find
from mindspeed_fx.kernels.npu.emulation import registry
from mindspeed_fx.planning.verify_device import calls, fusions, operators
from mindspeed_fx.planning.verify_device.calls.optimizers import ON_THE_HOST
from mindspeed_fx.planning.verify_device.compare import Comparison, compare, exact, flat
from mindspeed_fx.planning.verify_device.fusions import Fusion
from mindspeed_fx.planning.verify_device.place import Place
from mindspeed_fx.report import recorder

SIZES = (2, 9, 4, 2, 16, 24)
"""batch, sequence, heads, heads of keys, width, hidden size of the operators' calls."""


@dataclass(frozen=True)
class Check:
    """Something to run."""

    kind: str
    """"operator", "kernel", "fusion", "collective", or "time"."""
    name: str
    """What runs, and of several calls of it which."""
    dtype: str
    run: Callable[[Place], "Outcome"]

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.name}/{self.dtype}"


@dataclass(frozen=True)
class Outcome:
    """What came of it."""

    error: float | None = None
    """See :class:`Comparison`."""
    tolerance: float | None = None
    problem: str | None = None
    """Why it failed; None: it did not."""
    reason: str = ""
    """Why it was not run; "": it was."""
    detail: dict[str, Any] | None = None
    """Times and what else is told of it."""


def outcome_of(comparison: Comparison, **detail: Any) -> Outcome:
    """A comparison's."""
    return Outcome(comparison.error, comparison.tolerance, comparison.problem, detail=detail or None)


def checks(target: str, dtypes: tuple[torch.dtype, ...]) -> Iterator[Check]:
    """All of one device but collectives and times, operators first, then kernels, then fusions."""
    if target == "npu":
        registry.define()  # where torch_npu is imported nothing
    tables = {dtype: list(_calls(target, dtype)) for dtype in dtypes}
    for dtype, table in tables.items():
        for name, operator, args in table:
            yield Check("operator", name, _text(dtype), functools.partial(_run_operator, operator, args, dtype))
    for dtype, table in tables.items():
        for name, operator, args in table:
            kernels = operator.lowerings.get(target, [])
            for i, lowering in enumerate(kernels):
                same = sum(k.kernel == lowering.kernel for k in kernels[:i])  # one kernel for several kinds of calls
                run = functools.partial(_run_kernel, operator, lowering, args, dtype)
                yield Check("kernel", f"{name}: {lowering.kernel}{f' ({same + 1})' * bool(same)}", _text(dtype), run)
    for dtype in dtypes:
        for fusion in fusions.FUSIONS:
            if target in fusion.targets and (not fusion.dtypes or dtype in fusion.dtypes):
                yield Check("fusion", fusion.name, _text(dtype), functools.partial(_run_fusion, fusion, dtype))


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _calls(target: str, dtype: torch.dtype) -> Iterator[tuple[str, Operator, tuple[Any, ...]]]:
    """Name, operator and arguments, on the processor, of every call."""
    counts: dict[str, int] = {}
    for family in operators.FAMILIES:
        if family in operators.OF_CPU and target != "cpu":
            continue
        with torch.random.fork_rng():
            torch.manual_seed(0)
            new_calls = operators.calls_of(family, SIZES, dtype)
        for operator, args in new_calls:
            own = operator.name.removeprefix("mindspeed.")
            counts[own] = counts.get(own, 0) + 1
            yield f"{own} {counts[own]}", operator, tuple(args)
    for family in calls.FAMILIES:
        for name, packet, args, _ in calls.cases(family, dtype):  # a name may be that of several types of a weight
            counts[name] = counts.get(name, 0) + 1
            yield name if counts[name] == 1 else f"{name} {counts[name]}", find(packet.default), args


def _results(run: Callable[..., Any], operator: Operator, args: tuple[Any, ...]) -> list[Any]:
    """What a run returns; of an operator that returns nothing what it wrote."""
    schema = operator.overload._schema
    if schema.returns:
        return flat(run(*args))
    written = [i for i, argument in enumerate(schema.arguments[: len(args)]) if argument.is_write]
    own = [pytree.tree_map(torch.clone, arg) if i in written else arg for i, arg in enumerate(args)]
    run(*own)
    return flat([own[i] for i in written])


def _send(place: Place, operator: Operator, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments on the device, but for those that lie on the processor everywhere."""
    stay = ON_THE_HOST.get(operator.name, ())
    names = [a.name for a in operator.overload._schema.arguments]
    return tuple(arg if name in stay else place.send(arg) for name, arg in zip(names, args))


def _truth(operator: Operator, args: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
    """Results of the reference on the processor: in the types of the arguments, and in float64 (the same where it
    takes no float64, as kernels for a processor do)."""
    want = _results(operator.reference, operator, args)
    try:
        truth = _results(operator.reference, operator, exact(args))
    except RuntimeError:
        truth = want
    return want, truth


def _run_operator(operator: Operator, args: tuple[Any, ...], dtype: torch.dtype, place: Place) -> Outcome:
    """The operator as a graph calls it, on the device."""
    want, truth = _truth(operator, args)
    have = _results(operator.overload, operator, _send(place, operator, args))
    place.wait()
    return outcome_of(compare(have, want, truth, dtype))


def _run_kernel(
    operator: Operator, lowering: Lowering, args: tuple[Any, ...], dtype: torch.dtype, place: Place
) -> Outcome:
    sent = place.send(args)
    reason = lowering.supports(*sent)
    if reason is not None:
        return Outcome(reason=reason)
    want, truth = _truth(operator, args)
    have = _results(lowering.build, operator, sent)
    place.wait()
    return outcome_of(compare(have, want, truth, dtype))


def step(function: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> tuple[list[Any], list[Any]]:
    """Results of a function, and the gradients of a weighted sum of them by the leaves."""
    results = flat(function(*inputs))
    with_gradient = [r for r in results if r.requires_grad]
    leaves = [i for i in inputs if i.requires_grad]
    weights = [torch.linspace(0.5, 1.5, r.numel(), dtype=r.dtype, device=r.device).view_as(r) for r in with_gradient]
    grads = torch.autograd.grad(with_gradient, leaves, weights) if leaves else ()
    return [r.detach() for r in results], list(grads)


def compiled(fusion: Fusion, place: Place) -> Callable[..., Any]:
    """The fusion's function as models are compiled on the target."""
    # Named, a pass fuses also where generated code was measured as fast: here it is to be seen, not to pay.
    options: dict[str, Any] = {"target": place.target, "codegen": place.codegen, "enable": [fusion.name]}
    options |= fusion.options
    if place.hardware is not None:
        options["hardware"] = place.hardware
    return torch_compile.compile_with_backend(
        dynamo.fresh_callable(fusion.function), backend="mindspeed", fullgraph=True, dynamic=False, options=options
    )


def _run_fusion(fusion: Fusion, dtype: torch.dtype, place: Place) -> Outcome:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        inputs = fusion.inputs(fusions.SMALL, dtype)
    sent = place.send(inputs)
    with dynamo.recompiling(), recorder.collecting() as graphs:
        have, grads = step(compiled(fusion, place), sent)
    place.wait()
    count = sum(g.counts.get(fusion.name, 0) for g in graphs)
    if not count:
        reasons = [
            s.reason for g in graphs for r in g.runs if r.report.name == fusion.name for s in r.report.skipped
        ] + [n for g in graphs for r in g.runs if r.report.name == fusion.name for n in r.report.notes]
        return Outcome(problem=f"the pass did nothing: {'; '.join(reasons) or 'no reason is told'}")
    if fusion.is_random:
        x, bias, residual = (t.detach() for t in sent)
        grad = grads[0] / torch.linspace(0.5, 1.5, have[0].numel(), dtype=dtype, device=place.device).view_as(grads[0])
        return Outcome(problem=fusions.kept_alike(have[0], grad, x + bias, residual), detail={"sites": count})
    want = step(fusion.function, inputs)
    truth = step(fusion.reference or fusion.function, exact(inputs))
    return outcome_of(compare([*have, *grads], [*want[0], *want[1]], [*truth[0], *truth[1]], dtype), sites=count)
