"""Times of kernels and fusions at a model's size, beside the unfused form and the cost model."""

from __future__ import annotations

import functools
from typing import Any, Callable, Iterator

import torch
from torch.utils import _pytree as pytree

from mindspeed_fx.compat import dynamo
from mindspeed_fx.cost.hardware import hardware
from mindspeed_fx.cost.operators import spec
from mindspeed_fx.kernels.base import Lowering, Operator
from mindspeed_fx.planning.calibrate.timing import clock, repeat
from mindspeed_fx.planning.verify_device import fusions, operators
from mindspeed_fx.planning.verify_device.checks import Check, Outcome, compiled, step
from mindspeed_fx.planning.verify_device.fusions import Fusion
from mindspeed_fx.planning.verify_device.place import Place
from mindspeed_fx.report import recorder
from mindspeed_fx.report.modelled import estimated

SECONDS = 0.3
"""Of timing, for each form, of each check."""
OF_A_MODEL = {"cpu": (1, 128, 8, 4, 64, 512), "device": (2, 1024, 16, 4, 128, 2048)}
"""Batch, sequence, heads, heads of keys, width, hidden size."""


def checks(target: str, dtype: torch.dtype, is_small: bool) -> Iterator[Check]:
    """Fusions first: a family of operators is made on the device when its turn comes."""
    where = "cpu" if target == "cpu" else "device"
    size = fusions.SMALL if is_small else fusions.OF_A_MODEL[where]
    text = str(dtype).removeprefix("torch.")
    for fusion in fusions.FUSIONS:
        if target in fusion.targets and (not fusion.dtypes or dtype in fusion.dtypes):
            yield Check("time", fusion.name, text, functools.partial(_time_fusion, fusion, size, dtype))
    sizes = (1, 16, 2, 1, 8, 16) if is_small else OF_A_MODEL[where]
    for family in operators.FAMILIES:
        if family not in operators.OF_CPU or target == "cpu":
            yield Check("time", f"kernels of {family}", text, functools.partial(_time_family, family, sizes, dtype))


def _time_fusion(fusion: Fusion, size: fusions.Size, dtype: torch.dtype, place: Place) -> Outcome:
    inputs = place.send(fusion.inputs(size, dtype))
    with dynamo.recompiling(), recorder.collecting() as graphs:
        function = compiled(fusion, place)
        step(function, inputs)
    fused = seconds(lambda: step(function, inputs), place)
    unfused = seconds(lambda: step(fusion.function, inputs), place)
    model = None
    if place.hardware is not None:
        stages = [(g, s) for g in graphs for s in ("forward", "backward") if s in g.calls]
        model = sum(float(estimated(g, s, place.hardware).seconds) for g, s in stages)
    return Outcome(detail={"rows": [_row(fusion.name, "compiled step", fused, unfused, model)]})


def _time_family(family: str, sizes: tuple[int, int, int, int, int, int], dtype: torch.dtype, place: Place) -> Outcome:
    """The first call of each operator of a family; each kernel of the target beside the reference in ATen."""
    with torch.device(place.device):
        made = operators.calls_of(family, sizes, dtype)
    first: dict[str, tuple[Operator, list[Any]]] = {}
    for operator, args in made:
        first.setdefault(operator.name, (operator, args))
    rows = []
    for operator, args in first.values():
        unfused = seconds(lambda: operator.reference(*args), place)
        model = model_seconds(operator, args, place)
        taken = [k for k in operator.lowerings.get(place.target, ()) if k.supports(*args) is None]
        rows += [_row(operator.name, k.kernel, _kernel_seconds(k, args, place), unfused, model) for k in taken]
        if not taken:
            rows.append(_row(operator.name, "the operator itself", unfused, unfused, model))
    return Outcome(detail={"rows": rows})


def _kernel_seconds(kernel: Lowering, args: list[Any], place: Place) -> float:
    return seconds(lambda: kernel.build(*args), place)


def model_seconds(operator: Operator, args: list[Any], place: Place) -> float | None:
    """What the cost model says of a call; None without a table of the device."""
    if place.hardware is None or operator.cost is None:
        return None
    results = operator.overload(*args)
    costed = pytree.tree_map(lambda x: spec(x) if isinstance(x, torch.Tensor) else x, (results, *args))
    return float(operator.cost(*costed).seconds(hardware(place.hardware)))


def seconds(run: Callable[[], Any], place: Place) -> float:
    """The median of a call's times; the first warms up."""

    def sample() -> tuple[float]:
        start = clock(place.device)
        run()
        return (clock(place.device) - start,)

    return repeat(sample, SECONDS)[0].seconds


def _row(name: str, kernel: str, fused: float, unfused: float, model: float | None) -> dict[str, Any]:
    return {
        "name": name.removeprefix("mindspeed."),
        "kernel": kernel,
        "seconds": fused,
        "unfused_seconds": unfused,
        "model_seconds": model,
    }
