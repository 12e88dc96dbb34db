"""User code that calls torch_npu's fusion attention of version 1 gets version 3.

Version 1 returns the seed of its dropout mask as Python integers, which a graph bakes in: the backward then draws
another mask than the forward, without an error. It is for eager mode only, says the documentation; version 3 computes
the same and returns
tensors. Source: torch_npu 2.13, whose own pass of this kind runs with its Triton code generation alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from mindspeed_fx.compat import fake, fx_graph
from mindspeed_fx.graph import rewrite
from mindspeed_fx.passes.base import Context, PassReport, calls, register, rewrite_each, site

NAME, OPERATOR = "canonicalize.npu_attention", "npu::npu_fusion_attention_v3"
ONLY_V1 = ("dropout_mask", "seed", "offset")
"""Arguments that version 3 does not have; their defaults are None and 0."""
LENGTHS = ("actual_seq_qlen", "actual_seq_kvlen")
"""Lists of integers in version 1, tensors in version 3."""


@register(NAME)
def npu_attention(gm: fx.GraphModule, context: Context) -> PassReport:
    """Calls of npu_fusion_attention become npu_fusion_attention_v3, which graphs can hold."""
    report = PassReport(NAME)
    if not hasattr(torch.ops.npu, "npu_fusion_attention_v3"):
        return report
    old = torch.ops.npu.npu_fusion_attention.default
    rewrite_each(report, OPERATOR, calls(gm, old), lambda node: _rewrite(gm, node) or site(OPERATOR, node))
    rewrite.finish(gm)
    return report


def _rewrite(gm: fx.GraphModule, node: fx.Node) -> str | None:
    arg = _bind_arguments(node)
    for name in ONLY_V1:
        if arg.pop(name, None) not in (None, 0):
            return f"{name} is given, which version 3 does not take"
    for name in LENGTHS:
        lengths = arg.get(name)
        if lengths is not None and not all(isinstance(n, int) for n in lengths):
            return f"{name} has symbolic lengths"
    if any(u.args[1] > 3 and u.users for u in node.users):
        return "its seed, offset or number of random values is used, integers that version 3 does not return"
    for name in LENGTHS:
        if arg.get(name) is not None:
            arg[name] = _constant(gm, node, torch.tensor(list(arg[name]), dtype=torch.int64))
    new = torch.ops.npu.npu_fusion_attention_v3.default
    args = tuple(arg.pop(a.name) for a in new._schema.arguments[:5])
    new_node = rewrite.insert(gm, node, new, args, {n: v for n, v in arg.items() if v is not None})
    node.replace_all_uses_with(new_node)
    gm.graph.erase_node(node)
    return None


def _constant(gm: fx.GraphModule, before: fx.Node, value: torch.Tensor) -> fx.Node:
    """``value``, on cpu where the kernel wants its lengths, as an attribute of the graph."""
    name = fx_graph.unused_attribute(gm, "lengths")
    setattr(gm, name, value)
    with gm.graph.inserting_before(before):
        result = gm.graph.get_attr(name)
    with fake.fake_like(before.meta.get("val")) as mode:
        result.meta = {"val": mode.from_tensor(value), "mutated": False, "needs_grad": False}
    return rewrite.insert(
        gm, before, torch.ops.aten.lift_fresh_copy.default, (result,)
    )  # what tracing makes of a constant


def _bind_arguments(node: fx.Node) -> dict[str, Any]:
    names = [a.name for a in node.target._schema.arguments]
    return {**dict(zip(names, node.args)), **node.kwargs}
