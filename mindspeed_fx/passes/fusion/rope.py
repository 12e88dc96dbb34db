"""Rotary position embedding: ``x * cos + rotate(x) * sin`` becomes ``mindspeed::rope``.

Both layouts of the pairs: half (``cat(-x2, x1)`` of the two halves, by chunk, split or slices) and interleaved
(``stack(-x[1::2], x[::2])`` flattened). Then the forms whose cos and sin have one angle per pair and are doubled: the two
parts of the pairs apart, ``x1 cos - x2 sin`` and ``x2 cos + x1 sin``, joined by ``cat`` or ``stack`` (DeepSeek takes
every other element and joins halves, which rotates the reordered tensor), and complex products. cos and sin may be
cached or made in the graph. Partial rotary models apply this to a slice, which matches as it is.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from mindspeed_fx.passes.base import Context, PassReport, calls, register, site, skip
from mindspeed_fx.passes.fusion import match
from mindspeed_fx.passes.fusion.match import aten

NAME, OPERATOR = "fusion.rope", "mindspeed::rope"


@register(NAME, stage="captured", level=1, after=("plain functions",))
def rope(gm: fx.GraphModule, context: Context) -> PassReport:
    """x * cos + rotate(x) * sin becomes one operator, half and interleaved."""
    report = PassReport(NAME)
    for node in calls(gm, aten.add.Tensor, aten.cat.default, *match.VIEWS):
        find = {aten.add.Tensor: _rotated, aten.cat.default: _joined}.get(node.target, _flattened)
        found = find(gm, node)
        if found is not None:
            reason = _rewrite(gm, node, *found)
            (report.skipped.append(skip(OPERATOR, node, reason)) if reason else report.rewrites.append(site(OPERATOR, node, found[4])))
    match.finish(gm)
    return report


def _rotated(gm: fx.GraphModule, node: fx.Node):
    """(x, cos, sin, interleaved, region) when ``node`` is x * cos + rotate(x) * sin."""
    for plain, turned in match.operands(node, aten.add.Tensor):
        for rotation, sin in match.operands(turned, aten.mul.Tensor):
            quarter = _quarter_turn(match.uncast(rotation))
            if quarter is None:
                continue
            source, interleaved, backwards = quarter
            for x, cos in match.operands(plain, aten.mul.Tensor):
                if match.same(match.uncast(x), match.uncast(source)) and match.is_float(cos) and match.is_float(sin):
                    region = [node, plain, turned, rotation]
                    if backwards and not match.unsafe(region, [x, cos, sin]):
                        sin = match.insert(gm, node, aten.neg.default, (sin,))
                    return x, cos, sin, interleaved, region
    return None


def _quarter_turn(n: fx.Node) -> tuple[fx.Node, bool, bool] | None:
    """(x, interleaved, backwards) when ``n`` is a quarter turn of x's pairs; cat(x2, -x1) turns halves backwards."""
    if match.is_call(n, aten.cat.default) and len(n.args[0]) == 2 and _is_last(n, match.argument(n, "dim", 0)):
        for backwards, (minus, plus) in enumerate((n.args[0], n.args[0][::-1])):
            turned, kept = match.part(minus.args[0]) if match.is_call(minus, aten.neg.default) else None, match.part(plus)
            first, second = (turned, kept) if backwards else (kept, turned)
            if first and second and _are_halves(first, second):
                return first.source, False, bool(backwards)
    if match.is_call(n, *match.VIEWS) and match.is_call(n.args[0], aten.stack.default):
        stacked, shape = n.args[0], match.value(n).shape
        parts = stacked.args[0]
        last = match.argument(stacked, "dim", 0) in (-1, match.value(stacked).dim() - 1)
        if len(parts) == 2 and last and match.is_call(parts[0], aten.neg.default):
            odd, even = match.part(parts[0].args[0]), match.part(parts[1])
            if odd and even and match.same(odd.source, even.source) and (odd.start, even.start, odd.step, even.step) == (1, 0, 2, 2):
                if odd.dim == even.dim == match.value(odd.source).dim() - 1 and shape == match.value(odd.source).shape:
                    return odd.source, True, False
    return None


def _is_last(n: fx.Node, dim: int) -> bool:
    return dim % match.value(n).dim() == match.value(n).dim() - 1


def _are_halves(first: match.Pieces, second: match.Pieces) -> bool:
    size = match.value(first.source).shape[-1]
    last = match.value(first.source).dim() - 1
    ranges = (first.start, first.stop, second.start, second.stop) == (0, size // 2, size // 2, size)
    return match.same(first.source, second.source) and first.dim == second.dim == last and ranges and first.step == second.step == 1


def _joined(gm: fx.GraphModule, node: fx.Node):
    """:func:`_rotated` for cat(x1 cos - x2 sin, x2 cos + x1 sin), of halves or of every other element."""
    if len(node.args[0]) != 2 or not _is_last(node, match.argument(node, "dim", 0)):
        return None
    found = _pair(*node.args[0])
    if found is None:
        return None
    x1, x2, first, second, cos, sin, region = found
    if match.unsafe([node, *region], [first.source, cos, sin]):
        return None
    if _are_halves(first, second):
        x = first.source
    elif _alternate(first, second):
        x = match.insert(gm, node, aten.cat.default, ([match.uncast(x1), match.uncast(x2)], -1))
    else:
        return None
    return x, *(match.insert(gm, node, aten.cat.default, ([c, c], -1)) for c in (cos, sin)), False, [node, *region]


def _flattened(gm: fx.GraphModule, node: fx.Node):
    """:func:`_rotated` for pairs that are stacked and flattened, or the real view of a complex product."""
    source = match.uncast(node.args[0])
    if not match.is_call(source, aten.view_as_real.default, aten.stack.default) or match.value(source).dim() != match.value(node).dim() + 1:
        return None
    if match.value(source).shape[-1] != 2:
        return None
    if match.is_call(source, aten.view_as_real.default):
        return _complex(gm, node, source)
    if match.argument(source, "dim", 0) % match.value(source).dim() != match.value(source).dim() - 1:
        return None
    found = _pair(*source.args[0]) if len(source.args[0]) == 2 else None
    if found is None:
        return None
    _, _, first, second, cos, sin, region = found
    if not _alternate(first, second) or match.unsafe([node, source, *region], [first.source, cos, sin]):
        return None
    if match.value(first.source).shape != match.value(node).shape:
        return None
    return first.source, *(_twice(gm, node, c) for c in (cos, sin)), True, [node, source, *region]


def _complex(gm: fx.GraphModule, node: fx.Node, real: fx.Node):
    """:func:`_rotated` for view_as_real(view_as_complex(pairs of x) * (cos + i sin)), flattened."""
    for turned, angles in match.operands(real.args[0], aten.mul.Tensor):
        if not match.is_call(turned, aten.view_as_complex.default) or not isinstance(angles, fx.Node):
            continue
        pairs = match.uncast(turned.args[0])
        x = match.uncast(pairs.args[0]) if match.is_call(pairs, *match.VIEWS) else None
        if x is None or match.value(x).shape != match.value(node).shape or not match.value(angles).is_complex():
            continue
        region = [node, real, real.args[0], turned, pairs]
        if angles.meta["needs_grad"] or match.unsafe(region, [x, angles]):
            return None
        both = match.insert(gm, node, aten.view_as_real.default, (angles,))
        cos, sin = (_twice(gm, node, match.insert(gm, node, aten.select.int, (both, -1, i))) for i in (0, 1))
        return x, cos, sin, True, region
    return None


def _pair(left: fx.Node, right: fx.Node):
    """(x1, x2, their pieces, cos, sin, nodes) when ``left`` is x1 cos - x2 sin and ``right`` is x2 cos + x1 sin."""
    if not match.is_call(left, aten.sub.Tensor) or left.kwargs or not match.operands(right, aten.add.Tensor):
        return None
    for x1, cos in match.operands(left.args[0], aten.mul.Tensor):
        for x2, sin in match.operands(left.args[1], aten.mul.Tensor):
            for a, b in match.operands(right, aten.add.Tensor):
                by_cos = any(match.same(u, x2) and match.same(c, cos) for u, c in match.operands(a, aten.mul.Tensor))
                by_sin = any(match.same(u, x1) and match.same(s, sin) for u, s in match.operands(b, aten.mul.Tensor))
                if not (by_cos and by_sin and all(match.is_float(n) for n in (x1, x2, cos, sin))):
                    continue
                first, second = match.part(match.uncast(x1)), match.part(match.uncast(x2))
                if first and second and first.start == 0:
                    return x1, x2, first, second, cos, sin, [left, right]
    return None


def _alternate(first: match.Pieces, second: match.Pieces) -> bool:
    """True for x[..., 0::2] and x[..., 1::2]."""
    last = match.value(first.source).dim() - 1
    steps = (first.start, first.step, second.start, second.step) == (0, 2, 1, 2)
    return match.same(first.source, second.source) and first.dim == second.dim == last and steps and match.value(first.source).shape[-1] % 2 == 0


def _twice(gm: fx.GraphModule, before: fx.Node, angle: fx.Node) -> fx.Node:
    """[..., d] as [..., 2 d], every element twice in a row."""
    stacked = match.insert(gm, before, aten.stack.default, ([angle, angle], -1))
    return match.insert(gm, before, aten.flatten.using_ints, (stacked, -2, -1))


def _rewrite(gm, root, x, cos, sin, interleaved, region) -> str | None:
    reason = match.unsafe(region, [x, cos, sin])
    if reason:
        return reason
    size = match.value(x).shape[-1]
    if match.value(cos).shape[-1] != size or match.value(sin).shape[-1] != size:
        return f"cos and sin have last dimension {match.value(cos).shape[-1]}, the rotated tensor {size}"
    if match.value(cos).dtype != match.value(sin).dtype:
        return f"cos is {match.value(cos).dtype} and sin {match.value(sin).dtype}"
    new = match.insert(gm, root, torch.ops.mindspeed.rope.default, (x, cos, sin, interleaved))
    return match.substitute(gm, root, new)
