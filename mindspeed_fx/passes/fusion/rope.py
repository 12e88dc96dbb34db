"""Rotary position embedding: ``x * cos + rotate(x) * sin`` becomes ``mindspeed::rope``.

A rotation adds, to every element times one angle, its partner times another. Which element is whose partner, and with
which sign, is read off the sums that the elements are made of
(:mod:`mindspeed_fx.passes.fusion.analysis.element_exprs`), so that the
spelling does not matter: halves or neighbours turned by ``cat``, ``stack``, ``roll``, ``flip`` or views, the minus as a
negation, a subtraction, a vector of signs or inside the sine's table, both parts of the pairs apart (DeepSeek reads
neighbours and joins halves, which rotates the reordered tensor), angles given once or twice, products of complex
numbers (of neighbours in Llama, of halves in Gemma's own code). cos and sin may be cached or made in the graph.
Elements beside the rotated ones pass (partial rotary). Exact algebra: any two sums over the same pairs are what the
operator computes, with the signs moved into its tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from mindspeed_fx.compat import symbols
from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.match import aten
from mindspeed_fx.graph.new_call import NewCall
from mindspeed_fx.passes.base import Context, Miss, Outcome, PassReport, calls, register, rewrite_each, site, skip
from mindspeed_fx.passes.fusion.analysis.element_exprs import SPLITS, SUMS, ElementExprs, Sum, TooWide
from mindspeed_fx.passes.fusion.emit.element_exprs import build

NAME, OPERATOR = "fusion.rope", "mindspeed::rope"
OPAQUE = (aten.index.Tensor, aten.index_select.default, aten.gather.default, aten.matmul.default, aten.einsum.default)
"""What may move elements by a table or a matrix, which cannot be read."""
KINDS = {
    "sum": SUMS,
    "product": (*match.MUL, aten.addcmul.default),
    "move": (
        aten.cat.default,
        aten.stack.default,
        aten.flip.default,
        aten.roll.default,
        aten.slice.Tensor,
        aten.select.int,
        aten.narrow.default,
        match.operator.getitem,
        *OPAQUE,
    ),
}
BETWEEN = (
    aten.to.dtype,
    aten.neg.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.unsqueeze.default,
    aten.transpose.int,
    aten.split_with_sizes.default,
    *match.RESHAPES,
)


@dataclass
class Rotation:
    """Lanes ``low`` to ``high`` of the root rotate the lanes ``x``; the others pass."""

    low: int
    high: int
    tensor: int
    """Number of the tensor that is rotated."""
    x: list[Sum]
    cos: list[Sum]
    sin: list[Sum]
    interleaved: bool


@register(NAME)
def rope(gm: fx.GraphModule, context: Context) -> PassReport:
    """x * cos + rotate(x) * sin becomes one operator, half and interleaved."""
    report = PassReport(NAME)
    apart: dict[fx.Node, fx.Node] = {}

    def fuse(node: fx.Node) -> Outcome:
        region = _rewrite_rotation(gm, node, apart)
        for half in set(apart).intersection(region or ()):
            del apart[half]
        return site(OPERATOR, node, region) if region else None

    rewrite_each(report, OPERATOR, calls(gm, *SUMS, aten.cat.default, *match.RESHAPES), fuse)
    for half, x in apart.items():
        partner = next((h for h, y in apart.items() if h is not half and match.same(x, y)), None)
        if partner is not None and half.name < partner.name and not half._erased:
            report.skipped.append(
                skip(
                    OPERATOR, half, f"the two parts of the pairs, {half.name} and {partner.name}, are not joined again"
                )
            )
    rewrite.finish(gm)
    return report


def _rewrite_rotation(gm: fx.GraphModule, node: fx.Node, apart: dict[fx.Node, fx.Node]) -> list[fx.Node] | None:
    """Rewrites ``node`` where it is a rotation and returns what it replaces; None where it is none."""
    if not match.is_float(node):
        return None
    if not _may_rotate(node):
        return None
    for split in SPLITS:
        try:
            exprs = ElementExprs(node, split)
        except TooWide:
            continue
        rotation = _rotation(exprs, apart)
        if rotation is not None:
            return _rewrite_lanes(gm, exprs, rotation)
    return None


def _may_rotate(node: fx.Node, depth: int = 8) -> bool:
    """A cheap look: below ``node`` are sums of products, and elements are moved."""
    seen: set[str] = set()

    def look(n: Any, depth: int) -> None:
        if not depth or not isinstance(n, fx.Node) or n.op != "call_function":
            return
        if n.target is aten.view_as_real.default:
            seen.update(KINDS)
            return
        kinds = [kind for kind, targets in KINDS.items() if n.target in targets]
        seen.update(kinds)
        if (kinds or n.target in BETWEEN) and n.target not in OPAQUE:
            for a in n.all_input_nodes:
                look(a, depth - 1)

    look(node, depth)
    return len(seen) == len(KINDS)


# --------------------------------------------------------------------------- which rotation it is


def _rotation(exprs: ElementExprs, apart: dict[fx.Node, fx.Node]) -> Rotation | None:
    sums = exprs.exprs()
    turned = [i for i, s in enumerate(sums) if len(s) == 2]
    if not turned:
        return None
    low, high = turned[0], turned[-1] + 1
    if len(turned) != high - low or not all(s for s in sums):
        return None
    sums = sums[low:high]
    tensors = [t for t in range(len(exprs.tensors)) if all(_degree(term, t) == 1 for s in sums for term in s)]

    def order(t: int) -> tuple:
        """A product is symmetric in what turns and what is turned: the one with more elements is turned."""
        n, _ = exprs.tensors[t]
        return isinstance(n, NewCall), -match.value(n).dim(), not n.meta["needs_grad"], t

    tensors.sort(key=order)
    for tensor in tensors:
        pairs = [tuple(_lane(term, tensor) for term in s) for s in sums]
        known = sorted({lane for pair in pairs for lane in pair})
        if any(a == b for a, b in pairs):
            continue
        if len(known) == 2 * len(sums):
            # Half of a rotation: x1 cos - x2 sin by itself.
            apart[exprs.root] = exprs.tensors[tensor][0]
            continue
        if len(known) != len(sums) or len(known) % 2:
            continue
        result = _rotation_order(exprs, tensor, sums, pairs, known)
        if result is not None:
            x, angles, interleaved = result
            return Rotation(
                low, high, tensor, [((1.0, ((tensor, lane),)),) for lane in x], angles[0], angles[1], interleaved
            )
        partner = {}
        for a, b in pairs:
            partner.setdefault(a, set()).add(b)
            partner.setdefault(b, set()).add(a)
        if all(len(others) == 1 for others in partner.values()):
            a, b = pairs[0]
            raise Miss(
                f"element {min(a, b)} of each head turns with element {max(a, b)}: pairs are halves or neighbours, in "
                "the order that they have or the other's"
            )
    if exprs.split == SPLITS[-1]:  # the last try
        _complain(exprs, sums)
    return None


def _rotation_order(exprs: ElementExprs, tensor: int, sums: list[Sum], pairs: list[tuple[int, int]], known: list[int]):
    """(lanes of x in the order in which they turn, (cos, sin), interleaved), or None."""
    half = len(known) // 2
    orders = [known, known[::2] + known[1::2], [known[i // 2 + i % 2 * half] for i in range(2 * half)]]
    for order in orders:
        for interleaved in (False, True):
            other = [i ^ 1 if interleaved else (i + half) % (2 * half) for i in range(2 * half)]
            if all({order[i], order[other[i]]} == set(pair) for i, pair in enumerate(pairs)):
                cos, sin = [], []
                for i, s in enumerate(sums):
                    own, turned = s if _lane(s[0], tensor) == order[i] else s[::-1]
                    minus = i % 2 == 0 if interleaved else i < half
                    cos.append(_angle(own, tensor, 1.0))
                    sin.append(_angle(turned, tensor, -1.0 if minus else 1.0))
                return order, (cos, sin), interleaved
    return None


def _degree(term, tensor: int) -> int:
    return sum(t == tensor for t, _ in term[1])


def _lane(term, tensor: int) -> int:
    return next(lane for t, lane in term[1] if t == tensor)


def _angle(term, tensor: int, sign: float) -> Sum:
    return ((term[0] * sign, tuple(f for f in term[1] if f[0] != tensor)),)


def _complain(exprs: ElementExprs, sums: list[Sum]) -> None:
    """A near miss where x is added to what moved its elements, each with a factor of its own, and the move was not
    read.
    """
    for t, (moved, _) in enumerate(exprs.tensors):
        for x, (n, _) in enumerate(exprs.tensors):
            if x == t or not all(
                len(s) == 2
                and {_degree(s[0], x), _degree(s[1], x)} == {0, 1} == {_degree(s[0], t), _degree(s[1], t)}
                and all(len(f) > 1 for _, f in s)
                for s in sums
            ):
                continue
            if (
                match.is_call(moved, *OPAQUE)
                and match.is_float(moved.args[0])
                and match.same(match.uncast(moved.args[0]), match.uncast(n))
                and match.value(n).shape == match.value(moved).shape
            ):
                raise Miss(f"the elements are moved by {moved.target}, whose table or matrix is not read")
            if not exprs.is_leaf(moved) and _exprs_of(exprs, moved) == _exprs_of(exprs, n):
                raise Miss(
                    f"{moved.name} has the elements of {n.name}, and is multiplied by angles over more dimensions than "
                    "those are read along"
                )


def _exprs_of(exprs: ElementExprs, n: fx.Node) -> list[Sum]:
    """The sums of ``n``'s lanes without their signs and order."""
    return sorted(tuple((abs(w), f) for w, f in s) for s in exprs.exprs(n))


# --------------------------------------------------------------------------- the operator


def _rewrite_lanes(gm: fx.GraphModule, exprs: ElementExprs, rotation: Rotation) -> list[fx.Node]:
    root, dims = exprs.root, exprs.of(exprs.root).dim()
    shape = list(match.value(root).shape)
    region = [
        n
        for n in exprs.read
        if any(
            f[0] == rotation.tensor
            for i in exprs.read[n].flatten().unique().tolist()
            for _, fs in exprs.sums[i]
            for f in fs
        )
    ]
    turned, _ = exprs.tensors[rotation.tensor]
    region = [n for n in region if n is not turned and not exprs.is_leaf(n)]
    inputs = [a for n, _ in exprs.tensors for a in (n.all_input_nodes if isinstance(n, NewCall) else [n])]
    if reason := match.unsafe(region, inputs):
        raise Miss(reason)
    x = build(exprs, gm, root, rotation.x)
    lead = shape[: len(shape) - dims]
    if x is None or list(match.value(x).shape[:-1]) != lead:
        raise Miss(f"what is turned has shape {tuple(match.value(turned).shape)} and the result {tuple(shape)}")
    cos, sin = (build(exprs, gm, root, angles) for angles in (rotation.cos, rotation.sin))
    if cos is None or sin is None:
        raise Miss("cos and sin are not made of a few parts of tensors")
    if any(symbols.guard_or_false(match.value(a).numel() > match.value(x).numel()) for a in (cos, sin)):
        raise Miss("cos and sin are larger than what they turn")
    new = _operator(gm, root, x, cos, sin, rotation.interleaved)
    total = exprs.of(root).numel()
    if rotation.high - rotation.low < total:
        sums = exprs.exprs()
        dtype = match.value(new).dtype
        other = [
            build(exprs, gm, root, part) if part else None for part in (sums[: rotation.low], sums[rotation.high :])
        ]
        if any(result is None for result, part in zip(other, (sums[: rotation.low], sums[rotation.high :])) if part):
            raise Miss("what passes beside the rotated elements is not made of a few parts of tensors")
        before, after = (
            b if b is None or match.value(b).dtype == dtype else rewrite.insert(gm, root, aten.to.dtype, (b, dtype))
            for b in other
        )
        new = rewrite.insert(gm, root, aten.cat.default, ([n for n in (before, new, after) if n is not None], -1))
    if dims != 1:
        new = rewrite.insert(gm, root, aten.reshape.default, (new, shape))
    if reason := rewrite.substitute(gm, root, new):
        raise Miss(reason)
    return region


def _operator(gm: fx.GraphModule, root: fx.Node, x: fx.Node, cos: fx.Node, sin: fx.Node, interleaved: bool) -> fx.Node:
    size = match.value(x).shape[-1]
    if match.value(cos).shape[-1] != size or match.value(sin).shape[-1] != size:
        raise Miss(f"cos and sin have last dimension {match.value(cos).shape[-1]}, the rotated tensor {size}")
    wide = torch.promote_types(match.value(cos).dtype, match.value(sin).dtype)
    cos, sin = (
        a if match.value(a).dtype == wide else rewrite.insert(gm, root, aten.to.dtype, (a, wide)) for a in (cos, sin)
    )
    return rewrite.insert(gm, root, torch.ops.mindspeed.rope.default, (x, cos, sin, interleaved))
