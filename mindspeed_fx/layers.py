"""When layers that are alike may be left out of what is traced."""

from __future__ import annotations

from typing import Any, Sequence

import torch.fx as fx

from mindspeed_fx.partition.shorten import Shortened, shorten
from mindspeed_fx.partition.stretch import LayersDiffer
from mindspeed_fx.passes.lowering import repeated_layers
from mindspeed_fx.report import recorder


def leave_out(compilation: Any, gm: fx.GraphModule, inputs: Sequence[Any]) -> tuple[Sequence[Any], Shortened | None]:
    """Leave layers that are like others out of a copy of Dynamo's graph, in place.

    Returns:
        The inputs that it then has, and what puts the layers back once a side is finished; ``inputs`` and None where
        each layer may matter for itself.
    """
    effective = compilation.record.effective
    try:
        if why := compilation.whole or why_each(compilation):
            raise LayersDiffer(why)
        short = shorten(gm, inputs)
    except LayersDiffer as why:
        effective["layers"] = f"each: {why}"
        return inputs, None
    effective["layers"] = f"{short.left_out} are copies of others"
    return [inputs[i] for i in short.kept], short


def why_each(compilation: Any) -> str:
    """Why a :class:`mindspeed_fx.backend.Compilation` captures and differentiates each layer for itself; empty where
    layers that are like others may be left out (:mod:`mindspeed_fx.partition.shorten`)."""
    c, share = compilation, repeated_layers.NAME
    for_itself = {
        "the model is parallelized": c.sharding is not None,
        "what is captured, and each pass, is recorded": c.readable is not None or recorder.is_modelling(),
        "passes are checked": c.options.check != "off",
        "under a memory budget each layer is decided for itself": c.options.memory_budget is not None,
        'option "recompute" names single layers': _names_layers(c.options.recompute),
        "floating-point operations are counted": c.options.count_flops,
        "gradients are averaged, or weights updated, gathered or freed, one by one": bool(c.marks),
        f'pass "{share}" is off': all(p.name != share for p in c.pipeline.passes),
    }
    return next((why for why, holds in for_itself.items() if holds), "")


def _names_layers(recompute: Any) -> bool:
    """Whether option "recompute" says something else of one layer than of another: "block:N", or globs."""
    return ":" in recompute if isinstance(recompute, str) else recompute is not None
