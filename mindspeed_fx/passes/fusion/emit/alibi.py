"""ALiBi slopes as a bias per key."""

from __future__ import annotations

import torch
import torch.fx as fx

from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.fusion.analysis.alibi import _slopes


def by_keys(gm: fx.GraphModule, before: fx.Node, n: fx.Node, causal: bool) -> fx.Node | None:
    """The bias ``n`` by key alone; None where it is none of slopes, where it looks both ways, and for 16-bit types, in
    which far keys would have biases too large to tell neighbours apart."""
    plain, kept = n, []
    while (
        match.is_call(plain, aten.unsqueeze.default, aten.to.dtype, aten.expand.default, *match.RESHAPES)
        and match.value(plain).shape[-2:] == match.value(plain.args[0]).shape[-2:]
    ):
        kept.append(plain)
        plain = plain.args[0]
    result = _slopes(plain)
    if (
        result is None
        or match.value(n).dtype not in (torch.float32, torch.float64)
        or (result[1].absolute and not causal)
    ):
        return None
    if any(
        match.value(k).shape[:-2] != match.value(plain).shape[:-2] and k.target is not aten.unsqueeze.default
        for k in kept
    ):
        return None
    slopes, distance = result
    keys, device = match.value(n).shape[-1], match.value(n).device
    places = rewrite.insert(gm, before, aten.arange.default, (keys,), {"device": device})
    places = rewrite.insert(gm, before, aten.to.dtype, (places, match.value(n).dtype))
    places = rewrite.insert(
        gm, before, aten.mul.Tensor, (places, -distance.factor if distance.absolute else distance.factor)
    )
    bias = rewrite.insert(gm, before, aten.mul.Tensor, (slopes, places))
    for k in reversed(kept):
        if match.is_call(k, aten.unsqueeze.default):
            dims = match.value(k).dim()
            bias = rewrite.insert(gm, before, aten.unsqueeze.default, (bias, k.args[1] % dims - dims))
    return (
        bias
        if match.value(bias).dtype == match.value(n).dtype
        else rewrite.insert(gm, before, aten.to.dtype, (bias, match.value(n).dtype))
    )
