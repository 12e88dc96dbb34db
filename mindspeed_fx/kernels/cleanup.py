"""What lowering leaves behind: calls that nobody reads or that are made twice, permutations, casts and copies that undo
each other.

A graph that runs call by call pays for each of them. Values stay bitwise equal.
"""

from __future__ import annotations

import operator

import torch
import torch.fx as fx

from mindspeed_fx.compat.fake import layout
from mindspeed_fx.graph.op_sets import REORDERINGS, TO_SHAPE, order_of

aten = torch.ops.aten

_LOSSLESS = (
    (torch.float16, torch.bfloat16, torch.float32, torch.float64),
    (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)
"""Types among which widening keeps every value."""

EITHER = {"npu.npu_moe_token_permute.default": 1}
"""Operator -> the argument that it takes as int32 and as int64 alike."""


def cleanup(gm: fx.GraphModule, added: list[fx.Node]) -> None:
    """Clean up after ``added``, the calls that lowering put into ``gm``."""
    _drop_unread(gm, added)
    _share_equal(gm, added)
    near, results = set(added), set(gm.graph.output_node().all_input_nodes)
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or node._erased:
            continue
        close = node in near or any(n in near for n in node.all_input_nodes)
        if close or node.target is aten._to_copy.default:
            source = (_undone(node) if close else None) or _match_restore(gm, node)
            # A result must stay a tensor of its own: neither an input of the graph nor another result.
            taken = source is not None and node in results and (source.op == "placeholder" or source in results)
            if source is not None and not taken and layout(source.meta["val"]) == layout(node.meta["val"]):
                node.replace_all_uses_with(source)
        elif str(node.target) in EITHER:
            _read_narrow(gm, node, EITHER[str(node.target)])
    for node in list(gm.graph.nodes):
        if node.target is aten.clone.default and node not in results:
            _share_copy(gm, node, near)
    _drop_unread(
        gm,
        [
            n
            for n in gm.graph.nodes
            if n in near or n.target in (*REORDERINGS, *TO_SHAPE, aten._to_copy.default, aten.clone.default)
        ],
    )


def _pure(node: fx.Node) -> bool:
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and not node.target._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in node.target.tags
    )


def _drop_unread(gm: fx.GraphModule, nodes: list[fx.Node]) -> None:
    for node in reversed(nodes):
        if not node._erased and not node.users and (_pure(node) or node.target is operator.getitem):
            gm.graph.erase_node(node)


def _share_equal(gm: fx.GraphModule, added: list[fx.Node]) -> None:
    """What is made twice from the same, such as the mask of causal attention in every layer, is made once."""
    results: dict[tuple, fx.Node] = {}
    for node in added:
        if node._erased or not _pure(node) or any(u.op == "output" for u in node.users):
            continue
        other = results.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
        if other is not node:
            node.replace_all_uses_with(other)
            gm.graph.erase_node(node)


# --------------------------------------------------------------------------- what undoes what


def _undone(node: fx.Node) -> fx.Node | None:
    """The value that a chain of reorderings ends up as again."""
    if (order := order_of(node)) is None:
        return None
    source = node.args[0]
    while (inner := order_of(source)) is not None:
        order, source = [inner[i] for i in order], source.args[0]
        if order == sorted(order):
            return source
    return None


def _share_copy(gm: fx.GraphModule, node: fx.Node, near: set[fx.Node]) -> None:
    """A contiguous copy of what, copied and reordered, lies in memory as the copy would is that value itself."""
    order, source = list(range(node.meta["val"].dim())), node.args[0]
    while (inner := order_of(source)) is not None or (
        source.target is aten.clone.default and source.args[0] not in gm.graph.output_node().all_input_nodes
    ):
        order = order if inner is None else [inner[i] for i in order]
        source = source.args[0]
    produced = source in near or (source.target is operator.getitem and source.args[0] in near)
    if not produced or layout(source.meta["val"].permute(order)) != layout(node.meta["val"]):
        return
    if order != sorted(order):
        with gm.graph.inserting_before(node):
            source = gm.graph.call_function(aten.permute.default, (source, order))
        source.meta = dict(node.meta)
    node.replace_all_uses_with(source)


def _read_narrow(gm: fx.GraphModule, node: fx.Node, at: int) -> None:
    """Let ``node`` read integers as they were before they were widened."""
    wide, shapes = node.args[at], []
    while wide.target in TO_SHAPE:
        shapes.append(wide)
        wide = wide.args[0]
    if wide.target is aten._to_copy.default and wide.args[0].meta["val"].dtype == torch.int32:
        node.update_arg(at, _shaped(gm, node, wide.args[0], shapes))


def _shaped(gm: fx.GraphModule, node: fx.Node, source: fx.Node, shapes: list[fx.Node]) -> fx.Node:
    """``source`` in the last of ``shapes``, innermost last, made before ``node``."""
    dtype = source.meta["val"].dtype
    for shape in reversed(shapes):
        with gm.graph.inserting_before(node):
            source = gm.graph.call_function(shape.target, (source, *shape.args[1:]), shape.kwargs)
        source.meta = {**shape.meta, "val": shape.meta["val"].to(dtype)}
    return source


def _match_restore(gm: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """The value that was widened, maybe given another shape, and comes back to its type."""
    if node.target is not aten._to_copy.default or set(node.kwargs) != {"dtype"}:
        return None
    wide, shapes = node.args[0], []
    while wide.target in TO_SHAPE:
        shapes.append(wide)
        wide = wide.args[0]
    if wide.target is not aten._to_copy.default or set(wide.kwargs) != {"dtype"}:
        return None
    source = wide.args[0]
    dtype = source.meta["val"].dtype
    if node.kwargs["dtype"] != dtype or not _holds(wide.kwargs["dtype"], dtype):
        return None
    return _shaped(gm, node, source, shapes)


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether every value of ``narrow`` is one of ``wide``, which comes back unchanged."""
    kind = next((types for types in _LOSSLESS if narrow in types), ())
    return wide in kind and torch.promote_types(narrow, wide) == wide
