"""Truth values go over the network as bytes.

Inductor (torch 2.13) takes the type of a collective's input from what it was computed of: a comparison of integers that
is gathered becomes a buffer of int64 in its code, where the graph, and whoever reads the result, says bool. Sent as
uint8 it is what the graph says, in as many bytes. Without generated code nothing is wrong, and nothing is rewritten.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from mindspeed_fx.graph.collectives import is_start, waits_of
from mindspeed_fx.graph.recompile import recompile
from mindspeed_fx.passes.base import Context, PassReport, register, site

NAME = "lowering.bool_collectives"
convert = torch.ops.prims.convert_element_type.default


@register(NAME)
def bool_collectives(gm: fx.GraphModule, context: Context) -> PassReport:
    """Sends truth values as uint8, since Inductor's code for collectives mistakes their type."""
    report = PassReport(NAME)
    if context.options.codegen != "inductor":
        return report.note_reason("only generated code mistakes the type of truth values that are sent")
    for node in list(gm.graph.nodes):
        if not is_start(node) or not _is_bool(node) or not isinstance(node.args[0], fx.Node):
            continue
        source, waits = node.args[0], waits_of(node)
        with gm.graph.inserting_before(node):
            sent = _make_collective(gm, source, torch.uint8)
        node.replace_input_with(source, sent)
        for n in (node, *waits):
            n.meta["val"] = n.meta["val"].to(torch.uint8)
        for wait in waits:
            with gm.graph.inserting_after(wait):
                back = gm.graph.call_function(convert, (wait, torch.bool))
            back.meta = {**wait.meta, "val": wait.meta["val"].to(torch.bool)}
            wait.replace_all_uses_with(back, delete_user_cb=lambda user, back=back: user is not back)
        report.rewrites.append(site("uint8 for bool", node))
    if report.rewrites:
        recompile(gm)
    return report


def _make_collective(gm: fx.GraphModule, source: fx.Node, dtype: torch.dtype) -> fx.Node:
    new = gm.graph.call_function(convert, (source, dtype))
    new.meta = {**source.meta, "val": source.meta["val"].to(dtype)}
    return new


def _is_bool(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool
