"""Clipped SwiGLU: ``g * sigmoid(alpha g) * (u + offset)`` of a clamped gate and up becomes
``mindspeed::clipped_swiglu``.

Gate and up may be two tensors, the halves of one, or its alternating columns (gpt-oss); silu, or any alpha; any offset
or none. Where only one of the two is clamped, or by different limits, the site is skipped. Safe because the operator
evaluates the same formula, gradients at the limits included, in at least the same precision.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.fx as fx

from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.base import Context, Outcome, PassReport, calls, register, rewrite_each, site
from mindspeed_fx.passes.fusion.analysis import activations, algebra, norms
from mindspeed_fx.passes.fusion.analysis import gated as gates

NAME, OPERATOR = "fusion.clipped_swiglu", "mindspeed::clipped_swiglu"


@register(NAME)
def clipped_swiglu(gm: fx.GraphModule, context: Context) -> PassReport:
    """silu of a clamped gate times a clamped up becomes one operator."""
    report = PassReport(NAME)
    rewrite_each(report, OPERATOR, calls(gm, aten.mul.Tensor, *match.DIV), functools.partial(_fuse, gm))
    rewrite.finish(gm)
    return report


def _fuse(gm: fx.GraphModule, node: fx.Node) -> Outcome:
    gated = _match_gate(node) if match.is_float(node) else None
    bounds = _bounds(gated.x) if gated else None
    if bounds is None or bounds[0] is not None or bounds[1] is None:
        return None
    other = gated.over[0]
    plus = match.plus_number(match.uncast(other))
    up, offset = plus or (other, 0.0)
    return _rewrite(gm, node, gated, bounds[1], match.uncast(up), float(offset), other)


def _match_gate(node: fx.Node) -> activations.SelfGated | None:
    """``node`` as x * sigmoid(slope * x) times one more factor."""
    result = next((f for f in activations.readings(node) if _bounds(match.uncast(f.x)) is not None), None)
    if result is None:
        flat = algebra.product(node)
        at = next((i for i, n in enumerate(flat.over) if match.is_call(n, aten.silu.default)), None)
        if at is None:
            return None
        silu = flat.over[at]
        result = activations.SelfGated(
            match.uncast(silu.args[0]),
            "swish",
            1.0,
            flat.number,
            [*flat.over[:at], *flat.over[at + 1 :]],
            flat.under,
            [*flat.nodes, silu],
        )
    alone = len(result.over) == 1 and not result.under and math.isclose(result.number, 1.0, rel_tol=1e-6)
    return result._replace(x=match.uncast(result.x)) if alone and result.kind == "swish" else None


def _bounds(n: fx.Node) -> tuple[float | None, float | None] | None:
    """(min, max) when ``n`` is clamped by numbers."""
    if match.is_call(n, aten.clamp_max.default, aten.clamp_min.default):
        low, high = (None, n.args[1]) if n.target is aten.clamp_max.default else (n.args[1], None)
    elif match.is_call(n, aten.clamp.default):
        low, high = match.argument(n, "min"), match.argument(n, "max")
    else:
        return None
    numbers = [None if v is None else match.number(v) for v in (low, high)]
    return None if any(v is not None and m is None for v, m in zip((low, high), numbers)) else (numbers[0], numbers[1])


def _rewrite(gm, root, gated, limit, up, offset, other) -> Outcome:
    clamped, alpha = gated.x, gated.slope
    bounds = _bounds(up) if match.is_float(up) else None
    if bounds is None:
        return "the gate is clamped and up is not"
    if bounds != (-limit, limit):
        return f"the gate is clamped to {limit}, up to {bounds}"
    gate, v = (norms.strip_widening(n.args[0]) for n in (clamped, up))
    if match.value(gate).shape != match.value(v).shape or match.value(gate).shape != match.value(root).shape:
        return f"gate and up have different shapes, {tuple(match.value(gate).shape)} and {tuple(match.value(v).shape)}"
    if not match.value(gate).dtype == match.value(v).dtype == match.value(root).dtype:
        return (
            f"gate and up are {match.value(gate).dtype} and {match.value(v).dtype}, the model goes on in "
            f"{match.value(root).dtype}"
        )
    region = [root, other, *gated.nodes, clamped, up]
    reason = match.unsafe(region, [gate, v])
    if reason:
        return reason
    source, columns = gates.packed_source(gate, v), _columns(gate, v)
    x, second = (source or columns, None) if source or columns else (gate, v)
    new = rewrite.insert(
        gm,
        root,
        torch.ops.mindspeed.clipped_swiglu.default,
        (x, second, alpha, float(limit), offset, columns is not None and source is None),
    )
    where = site(OPERATOR, root, region)
    return rewrite.replace(gm, root, new) or where


def _columns(gate: fx.Node, up: fx.Node) -> fx.Node | None:
    """The tensor whose columns alternate gate, up."""
    a, b = match.part(gate), match.part(up)
    if (
        a
        and b
        and match.same(a.source, b.source)
        and a.step == b.step == 2
        and a.dim == b.dim == match.value(a.source).dim() - 1
    ):
        width = match.value(a.source).shape[-1]
        if (a.start, b.start) == (0, 1) and a.stop == b.stop == width and width % 2 == 0:
            return a.source
    return None
