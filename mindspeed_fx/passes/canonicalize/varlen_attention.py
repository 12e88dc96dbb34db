"""``torch.nn.attention.varlen.varlen_attn`` becomes ``mindspeed::varlen_attention``.

torch has kernels of it for CUDA alone. q, k and v lie packed, [tokens, heads, dim]; the cumulative lengths say which
document a token is of. Documents of queries and keys must be the same; windows that look ahead, paged keys and the
log-sum-exp as a result stay with torch.
"""

from __future__ import annotations

import torch.fx as fx

from mindspeed_fx.compat import dispatcher
from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.match import aten
from mindspeed_fx.kernels.varlen_attention import varlen_attention as operator
from mindspeed_fx.passes.base import Context, PassReport, calls, register, rewrite_each, site

NAME, OPERATOR = "canonicalize.varlen_attention", "mindspeed::varlen_attention"


@register(NAME)
def varlen_attention(gm: fx.GraphModule, context: Context) -> PassReport:
    """Calls of torch's varlen_attn become one operator that every target runs."""
    report = PassReport(NAME)
    overload, target = dispatcher.varlen_attention_of_torch(), context.options.target
    nodes = calls(gm, overload) if overload else ()
    rewrite_each(report, OPERATOR, nodes, lambda node: _rewrite(gm, node, target) or site(OPERATOR, node))
    rewrite.finish(gm)
    return report


def _rewrite(gm: fx.GraphModule, node: fx.Node, target: str) -> str | None:
    if target == "cuda":
        return "torch's own kernel runs on cuda"
    q, k, v, limits, keys, causal, scale = (
        match.argument(node, n) for n in ("query", "key", "value", "cu_seq_q", "cu_seq_k", "is_causal", "scale")
    )
    left, right = match.argument(node, "window_size") or (-1, -1)
    for name in ("seqused_k", "block_table"):
        if match.argument(node, name) is not None:
            return f"{name}: keys in pages, for inference"
    if keys is None or not match.same(limits, keys):
        return "queries and keys have cumulative lengths of their own"
    if right not in (-1, 0) or (left != -1 and right != 0):
        return f"a window of {left} tokens before and {right} after; valid: none, causal, or so many before and 0 after"
    if any(user.args[1] and user.users for user in node.users):
        return "its log-sum-exp is used"
    if reason := match.unsafe([node], [q, k, v, limits]):
        return reason
    causal = bool(causal) or right == 0
    tokens, dim = match.value(q).shape[0], match.value(q).shape[2]
    places = rewrite.insert(gm, node, aten.arange.default, (tokens,), {"device": match.value(q).device})
    numbers = rewrite.insert(gm, node, aten.searchsorted.Tensor, (limits, places), {"right": True})
    numbers = rewrite.insert(gm, node, aten.unsqueeze.default, (numbers, 0))
    ends = rewrite.insert(gm, node, aten.slice.Tensor, (limits, 0, 1, match.END)) if target == "npu" else None
    qkv = [
        rewrite.insert(gm, node, aten.unsqueeze.default, (rewrite.insert(gm, node, aten.transpose.int, (x, 0, 1)), 0))
        for x in (q, k, v)
    ]
    arguments = (
        *qkv,
        numbers,
        ends,
        causal,
        float(dim**-0.5 if scale is None else scale),
        left + 1 if left != -1 else 0,
    )
    if target == "npu":
        kernel, reasons = operator.choose("npu", fx.map_arg(arguments, match.value), {})
        if kernel is None:
            return "; ".join(reasons)
    both = rewrite.insert(gm, node, operator.overload, arguments)
    out = rewrite.insert(gm, node, match.operator.getitem, (both, 0))
    out = rewrite.insert(gm, node, aten.transpose.int, (rewrite.insert(gm, node, aten.squeeze.dim, (out, 0)), 0, 1))
    first = next((u for u in node.users if u.args[1] == 0), None)
    return rewrite.substitute(gm, first, out) if first is not None else "its result is not used"
