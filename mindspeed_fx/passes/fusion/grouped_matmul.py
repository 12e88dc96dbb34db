"""Grouped matrix products: ``aten._grouped_mm``, its stand-in of Hugging Face, loops over slices ->
``mindspeed::grouped_matmul``.

A loop is ``cat([x[0:a] @ w[0], x[a:b] @ w[1], ...])`` with sizes known before the run and weights that are parts of one
tensor. Safe because each form is the same product per group of rows; rows after the last group are zero, where
``aten._grouped_mm`` leaves them undefined.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.base import Context, Outcome, PassReport, calls, register, rewrite_each, site

NAME, OPERATOR = "fusion.grouped_matmul", "mindspeed::grouped_matmul"
HUGGING_FACE = "transformers.grouped_mm_fallback.default"
"""What Hugging Face traces for types other than bfloat16; the operator exists once its library is imported."""


@register(NAME)
def grouped_matmul(gm: fx.GraphModule, context: Context) -> PassReport:
    """Products of groups of rows with a matrix each become one operator."""
    report = PassReport(NAME)
    single = {n.target for n in gm.graph.nodes if n.target is aten._grouped_mm.default or str(n.target) == HUGGING_FACE}

    def fuse(node: fx.Node) -> Outcome:
        result = _one_call(node, context.options.target) if node.target in single else _loop(gm, node, context)
        if not isinstance(result, tuple):
            return result
        region, arguments = result
        reason = match.unsafe(region, [a for a in arguments if isinstance(a, fx.Node)])
        return reason or _rewrite(gm, node, region, arguments)

    rewrite_each(report, OPERATOR, calls(gm, aten.cat.default, *single), fuse)
    rewrite.finish(gm)
    return report


def _rewrite(gm: fx.GraphModule, node: fx.Node, region: list[fx.Node], arguments: tuple) -> Outcome:
    x, weight, offsets = arguments
    if isinstance(offsets, list):
        ends = [
            rewrite.insert(
                gm, node, aten.scalar_tensor.default, (end,), {"dtype": torch.int32, "device": match.value(x).device}
            )
            for end in offsets
        ]
        offsets = rewrite.insert(gm, node, aten.stack.default, (ends,))
    # No row is left by slices that cover the rows, and what aten._grouped_mm leaves is undefined.
    tail = str(node.target) == HUGGING_FACE
    arguments = (x, weight, offsets) if tail else (x, weight, offsets, False)
    new = rewrite.insert(gm, node, torch.ops.mindspeed.grouped_matmul.default, arguments)
    return rewrite.substitute(gm, node, new) or site(OPERATOR, node, region)


def _one_call(node: fx.Node, target: str) -> tuple[list[fx.Node], tuple] | str:
    """([node], (x, weight, offsets)) of a grouped product that is one call; why it stays."""
    names = ("self", "mat2", "offs") if node.target is aten._grouped_mm.default else ("input", "weight", "offs")
    x, weight, offsets = (match.argument(node, name) for name in names)
    shapes = [tuple(match.value(n).shape) for n in (x, weight)]
    if [len(s) for s in shapes] != [2, 3] or offsets is None:
        return (
            f"operands {shapes[0]} and {shapes[1]} are not groups of rows [tokens, k] with a matrix each [groups, k, n]"
        )
    if match.value(x).dtype != match.value(weight).dtype:
        return f"rows are {match.value(x).dtype}, matrices {match.value(weight).dtype}"
    if node.target is aten._grouped_mm.default:
        if match.argument(node, "bias") is not None:
            return "it has a bias; add bias[group of each row] after the product instead"
        if match.argument(node, "out_dtype") not in (None, match.value(x).dtype):
            return f"it returns {match.argument(node, 'out_dtype')} for {match.value(x).dtype} operands"
        if target == "cuda":
            return "aten._grouped_mm is itself the kernel on cuda"
    return [node], (x, weight, offsets)


# --------------------------------------------------------------------------- loops over slices


def _loop(gm: fx.GraphModule, node: fx.Node, context: Context) -> tuple[list[fx.Node], tuple] | str | None:
    """(nodes, (x, weight, ends)) of a joined list of products of slices; why it stays; None for another ``cat``."""
    products = [_product(p) for p in node.args[0]]
    if (
        len(products) < 2
        or None in products
        or match.argument(node, "dim", 0) % match.value(node).dim()
        or match.value(node).dim() != 2
    ):
        return None
    parts = [match.part(x) for x, _, _ in products]
    if None in parts or any(p.dim or p.step != 1 or not match.same(p.source, parts[0].source) for p in parts):
        return None
    ends = [p.stop for p in parts]
    if [p.start for p in parts] != [0, *ends[:-1]] or ends[-1] != match.value(parts[0].source).shape[0]:
        return "the slices do not cover the rows one after another"
    sources = [_matrix(w) for _, w, _ in products]
    if (
        None in sources
        or len({s for s, _ in sources}) > 1
        or [i for _, i in sources] != list(range(match.value(sources[0][0]).shape[0]))
    ):
        return (
            "the weights are not the parts of one tensor [groups, ...] in order; stacking them would copy them at "
            "every step"
        )
    if len({transposed for _, _, transposed in products}) > 1:
        return "some weights are transposed and some are not"
    if context.options.target != "npu" and NAME not in context.options.enable:
        return (
            f"the sizes of the groups are known, and one product each is as fast on {context.options.target}; name "
            f"{NAME} in enable to fuse it all the same"
        )
    weight = sources[0][0]
    if products[0][2]:
        weight = rewrite.insert(gm, node, aten.transpose.int, (weight, 1, 2))
    return [node, *node.args[0]], (parts[0].source, weight, ends)


def _product(n: Any) -> tuple[fx.Node, fx.Node, bool] | None:
    """(x, w, transposed) when ``n`` is x @ w or, transposed, x @ w^T, without bias."""
    if match.is_call(n, aten.linear.default) and match.argument(n, "bias") is None:
        return n.args[0], n.args[1], True
    if match.is_call(n, aten.mm.default, aten.matmul.default):
        w = n.args[1]
        turned = match.is_call(w, aten.t.default) or (
            match.is_call(w, aten.transpose.int) and match.value(w).dim() == 2 and w.args[1] % 2 != w.args[2] % 2
        )
        return n.args[0], w.args[0] if turned else w, turned
    return None


def _matrix(n: fx.Node) -> tuple[fx.Node, int] | None:
    """(weight, index) when ``n`` is ``weight[index]``."""
    if (
        match.is_call(n, aten.select.int)
        and n.args[1] == 0
        and isinstance(n.args[2], int)
        and match.value(n.args[0]).dim() == 3
    ):
        return n.args[0], n.args[2] % match.value(n.args[0]).shape[0]
    if (
        match.is_call(n, match.operator.getitem)
        and match.is_call(n.args[0], aten.unbind.int)
        and match.argument(n.args[0], "dim", 0) == 0
    ):
        return n.args[0].args[0], n.args[1]
    return None
