"""Gradients of slices that make up a whole are joined, instead of each filled up with zeros and added.

The gradient of ``x[..., ::2]`` is a tensor of the size of x, mostly zeros; where x was taken apart (the pairs of a
rotation, the parts of latent attention's queries) autograd adds one for each part. Their sum is their concatenation:
one kernel and one write, where there were one for each part and each addition. A contiguous copy of the joined in
another order of dimensions is the parts in that order, joined. Safe because x + 0 = x. On npu alone, where each
operator is a launch; generated code never writes the zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.fx as fx

from mindspeed_fx.graph import rewrite
from mindspeed_fx.graph.edit import drop_dead
from mindspeed_fx.graph.match import aten
from mindspeed_fx.graph.op_sets import order_of
from mindspeed_fx.graph.recompile import recompile
from mindspeed_fx.passes.base import Context, Outcome, PassReport, calls, register, rewrite_each, site

NAME, OPERATOR = "lowering.joined_slices", "parts joined"
ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
FILLS = (aten.full.default, aten.full_like.default)


class Part(NamedTuple):
    """``value`` at ``start``, ``start + step`` ... of dimension ``dim``; zeros elsewhere."""

    value: fx.Node
    dim: int
    start: int
    step: int

    def places(self) -> range:
        return range(self.start, self.start + self.step * self.value.meta["val"].shape[self.dim], self.step)


@register(NAME)
def joined_slices(gm: fx.GraphModule, context: Context) -> PassReport:
    """Joins gradients of slices on npu, and copies of what is joined."""
    report = PassReport(NAME)
    if context.options.target != "npu" or context.options.codegen == "inductor":
        return report.note_reason("on npu alone, and where no code is generated")
    rewrite_each(report, OPERATOR, reversed(list(calls(gm, aten.add.Tensor))), lambda node: _join(gm, node))
    drop_dead(gm)
    rewrite_each(report, "copy of parts joined", calls(gm, aten.clone.default), lambda node: _reorder(gm, node))
    if report.rewrites:
        drop_dead(gm)
        gm.graph.lint()
        recompile(gm)
    return report


# --------------------------------------------------------------------------- sums of parts


def _join(gm: fx.GraphModule, node: fx.Node) -> Outcome:
    if node._erased or not node.users:  # inside a sum that was joined
        return None
    parts = _parts(node, node)
    if parts is None or len(parts) < 2 or not _cover(parts, node.meta["val"].shape):
        return None
    dim = parts[0].dim
    groups = _groups(sorted(parts, key=lambda p: p.start))
    if any(len({len(p.places()) for p in group}) > 1 for group in groups):
        return "parts that alternate have different lengths"
    pieces = [_woven(gm, node, group, dim) for group in groups]
    joined = rewrite.insert(gm, node, aten.cat.default, (pieces, dim)) if len(pieces) > 1 else pieces[0]
    if joined.meta["val"].stride() != node.meta["val"].stride():
        return "the sum lies in memory in another order"
    report = site(OPERATOR, node, [p.value for p in parts])
    node.replace_all_uses_with(joined)
    return report


def _parts(node: fx.Node, root: fx.Node) -> list[Part] | None:
    """What ``node`` is the sum of, a part of ``root`` each; None when something is not."""
    value = node.meta.get("val")
    if node is not root and len(node.users) != 1 or not isinstance(value, torch.Tensor):
        return None
    if value.dtype != root.meta["val"].dtype or value.shape != root.meta["val"].shape:
        return None
    if node.target is aten.add.Tensor and not node.kwargs and all(isinstance(a, fx.Node) for a in node.args):
        sides = [_parts(a, root) for a in node.args]
        return None if None in sides else [p for side in sides for p in side]
    if node.target is aten.slice_backward.default:
        x, sizes, dim, start, end, step = node.args
        dim %= len(sizes)
        whole = all(isinstance(n, int) for n in (start, *sizes, *x.meta["val"].shape))
        return [Part(x, dim, start + sizes[dim] * (start < 0), step)] if whole else None
    return _padded(node) if node.target is aten.cat.default else None


def _padded(node: fx.Node) -> list[Part] | None:
    dim = (node.args[1] if len(node.args) > 1 else 0) % node.meta["val"].dim()
    start, results = 0, []
    for piece in node.args[0]:
        size = piece.meta["val"].shape[dim]
        if not isinstance(size, int):
            return None
        results += [] if _is_zero(piece) else [Part(piece, dim, start, 1)]
        start += size
    return results


def _is_zero(node: fx.Node) -> bool:
    return node.target in ZEROS or node.target in FILLS and node.args[1] == 0


def _cover(parts: list[Part], shape: torch.Size) -> bool:
    """Whether every place of one dimension is in one part."""
    dims = {p.dim for p in parts}
    return len(dims) == 1 and sorted(i for p in parts for i in p.places()) == list(range(shape[parts[0].dim]))


def _groups(parts: list[Part]) -> list[list[Part]]:
    """Parts in turn, those that alternate together: of step k, k neighbours."""
    results: list[list[Part]] = []
    for part in parts:
        group = results[-1] if results else []
        if group and 0 < part.start - group[0].start < group[0].step == part.step:
            group.append(part)
        else:
            results.append([part])
    return results


def _woven(gm: fx.GraphModule, node: fx.Node, group: list[Part], dim: int) -> fx.Node:
    if len(group) == 1:
        return group[0].value
    apart = [rewrite.insert(gm, node, aten.unsqueeze.default, (p.value, dim + 1)) for p in group]
    both = rewrite.insert(gm, node, aten.cat.default, (apart, dim + 1))
    shape = list(both.meta["val"].shape)
    shape[dim : dim + 2] = [shape[dim] * shape[dim + 1]]
    return rewrite.insert(gm, node, aten.view.default, (both, shape))


# --------------------------------------------------------------------------- copies of what is joined


def _reorder(gm: fx.GraphModule, node: fx.Node) -> Outcome:
    """``cat(xs).permute(order).contiguous()`` is ``cat`` of the permuted."""
    moved = node.args[0]
    order = order_of(moved)
    if order is None or node.kwargs.get("memory_format") is not torch.contiguous_format or len(moved.users) > 1:
        return None
    joined = moved.args[0]
    if joined.target is not aten.cat.default or len(joined.users) > 1:
        return None
    dim = (joined.args[1] if len(joined.args) > 1 else 0) % len(order)
    pieces = [rewrite.insert(gm, node, aten.permute.default, (x, order)) for x in joined.args[0]]
    new = rewrite.insert(gm, node, aten.cat.default, (pieces, order.index(dim)))
    if new.meta["val"].stride() != node.meta["val"].stride():
        return "the parts would not be joined contiguously"
    node.replace_all_uses_with(new)
    return site("copy of parts joined", node)
