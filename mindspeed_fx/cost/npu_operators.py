"""Cost of the fused operators of torch_npu, and of products that communicate, torch's symmetric memory's too."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Callable, Sequence

from mindspeed_fx.cost.operators import SOFTMAX, SPECIAL, Cost, Spec, attention, once, tensors, visible_scores

ROWS = {
    "npu_rms_norm": 5,
    "npu_rms_norm_backward": 10,
    "npu_add_rms_norm": 6,
    "npu_swiglu": SPECIAL + 3,
    "npu_swiglu_backward": SPECIAL + 8,
    "npu_geglu": SPECIAL + 3,
    "npu_rotary_mul": 3,
    "npu_rotary_mul_backward": 3,
    "npu_scaled_masked_softmax": SOFTMAX,
    "npu_scaled_masked_softmax_backward": 4,
    "npu_cross_entropy_loss": SOFTMAX,
    "npu_cross_entropy_loss_backward": SPECIAL + 3,
    "npu_add_layer_norm": 9,
    "npu_geglu_grad": SPECIAL + 10,
    "npu_fast_gelu": SPECIAL + 3,
    "npu_fast_gelu_backward": SPECIAL + 8,
    "npu_ring_attention_update": 3,
    "npu_moe_gating_top_k": SOFTMAX + 8,
    "npu_moe_gating_top_k_softmax_v2": SOFTMAX + 4,
    "npu_moe_gating_top_k_backward": 6,
    **dict.fromkeys(
        (
            "npu_moe_token_permute",
            "npu_moe_token_permute_with_routing_map",
            "npu_moe_token_unpermute",
            "_npu_moe_token_unpermute",
        ),
        1,
    ),
    **dict.fromkeys(
        (
            "npu_moe_token_permute_grad_v2",
            "npu_moe_token_permute_with_routing_map_grad",
            "npu_moe_token_unpermute_grad_v2",
        ),
        2,
    ),
}
"""Vector FLOP per element of the largest tensor, as ``aten.ROWS``."""

_LAYOUTS = {"BNSD": (0, 1, 2, 3), "BSND": (0, 2, 1, 3)}


def _heads(t: Spec, heads: int, layout: str, batch: Any = 1) -> Spec:
    """``t`` as [batch, heads, seq, dim]; TND counts as one sequence, an upper bound."""
    if layout in _LAYOUTS:
        shape = tuple(t.shape[i] for i in _LAYOUTS[layout])
    elif layout == "TND":
        shape = (1, t.shape[1], t.shape[0], t.shape[2])
    else:
        b, s = (t.shape[1], t.shape[0]) if layout == "SBH" else t.shape[:2]
        shape = (b, heads, s, t.shape[2] // heads)
    return Spec(shape, t.dtype, t.itemsize)


def _npu_attention(out: Any, q: Spec, k: Spec, v: Spec, heads: int, layout: str, *more: Any, **kw: Any) -> Cost:
    """sparse_mode 2 and 3 are causal; mode 0 with a mask computes every score."""
    kv = k.shape[-1] * heads // q.shape[-1] if layout in ("BSH", "SBH") else heads
    causal = kw.get("sparse_mode", 0) in (2, 3)
    return attention(
        tensors(out)[:3],
        _heads(q, heads, layout),
        _heads(k, kv, layout),
        _heads(v, kv, layout),
        causal,
        *more,
        *kw.values(),
    )


def _npu_attention_grad(
    out: Any, q: Spec, k: Spec, v: Spec, grad: Spec, heads: int, layout: str, *more: Any, **kw: Any
) -> Cost:
    kv = k.shape[-1] * heads // q.shape[-1] if layout in ("BSH", "SBH") else heads
    return attention(
        tensors(out)[:3],
        _heads(q, heads, layout),
        _heads(k, kv, layout),
        _heads(v, kv, layout),
        kw.get("sparse_mode", 0) in (2, 3),
        grad,
        *more,
        *kw.values(),
        backward=True,
    )


def _product_and_collective(out: Any, a: Spec, b: Spec, *more: Any, **kw: Any) -> Cost:
    """The product: of all ranks' rows where the left operand is gathered. The collective counts 0 here."""
    result = tensors(out)
    return once(
        out,
        a,
        b,
        flops=2 * (result[0].numel * a.shape[-1] if len(result) > 1 else a.numel * b.shape[-1]),
        dtype=a.dtype,
    )


def _gather_and_products(out: Any, a: Spec, weights: Any, *more: Any, **kw: Any) -> Cost:
    """Products of all ranks' rows, which are gathered. The collective counts 0 here."""
    result = tensors(out)[-len(tensors(weights)) :]
    return once(out, a, weights, flops=2 * sum(m.numel for m in result) * a.shape[-1], dtype=a.dtype)


def _experts_and_collective(out: Any, x: Spec, weight: Spec, *more: Any, **kw: Any) -> Cost:
    """The experts' product; the collective counts 0 here."""
    result = tensors(out)[0]
    return once(out, x, weight, flops=2 * result.shape[0] * weight.shape[1] * weight.shape[2], dtype=x.dtype)


def _linear_max_sum(out: Any, x: Spec, weight: Spec, target: Spec, *more: Any, **kw: Any) -> Cost:
    """Logits that are never written, and their largest and the sum of their exponentials."""
    logits = x.shape[0] * weight.shape[0]
    return once(
        tensors(out)[:5], x, weight, target, flops=2 * logits * x.shape[1], vector=SOFTMAX * logits, dtype=x.dtype
    )


def _linear_loss_backward(out: Any, grad: Spec, x: Spec, weight: Spec, *more: Any, **kw: Any) -> Cost:
    """The logits again, and from them both gradients."""
    logits = x.shape[0] * weight.shape[0]
    flops, vector = 2 * logits * x.shape[1], (SPECIAL + 3) * logits
    return once(out, grad, x, weight, *more, flops=3 * flops, vector=vector, dtype=x.dtype, again=flops)


def _npu_grouped(out: Any, x: Sequence[Spec], weight: Sequence[Spec], **kw: Any) -> Cost:
    """Products of lists, each of groups of rows, of groups of the summed dimension, or of a pair: every element of x
    meets a row of the result.
    """
    result = tensors(out)
    width = [result[0].shape[-1]] * len(x) if len(result) == 1 else [m.shape[-1] for m in result]
    return once(
        out, *x, *weight, kw.get("group_list"), flops=sum(2 * a.numel * n for a, n in zip(x, width)), dtype=x[0].dtype
    )


def _npu_grouped_add(out: Any, into: Spec, x: Spec, weight: Spec, *more: Any, **kw: Any) -> Cost:
    """``into`` is read and written; the products are those of 16 bits."""
    return once(into, into, x, weight, *more, flops=2 * x.numel * weight.shape[-1], dtype=x.dtype)


def _npu_ffn(out: Any, x: Spec, weight1: Spec, weight2: Spec, *more: Any, **kw: Any) -> Cost:
    """Every row passes two matrices, whichever expert's they are."""
    inner, result = weight1.shape[-1], tensors(out)[0]
    flops = 2 * (x.numel * inner + result.numel * weight2.shape[-2])
    vector = SPECIAL * math.prod(x.shape[:-1]) * inner
    return once(out, x, weight1, weight2, *kw.values(), flops=flops, vector=vector, dtype=x.dtype)


def _npu_indexer(out: Any, q: Spec, k: Spec, weights: Spec, *more: Any, **kw: Any) -> Cost:
    """Scores of the earlier tokens."""
    batch, length, heads, width = q.shape
    seen = batch * heads * visible_scores(length, k.shape[1], True)
    flops = 2 * batch * heads * length * k.shape[1] * (width + 1)
    return once(out, q, k, weights, flops=flops, matrix=2 * (width + 1) * seen, vector=3 * seen, dtype=q.dtype)


def _npu_indexer_grad(
    out: Any, q: Spec, k: Spec, dy: Spec, indices: Spec, weights: Spec, *more: Any, **kw: Any
) -> Cost:
    work = indices.numel * q.shape[2]
    flops = 2 * work * (3 * q.shape[3] + 1)
    return once(out, q, k, dy, indices, weights, flops=flops, vector=4 * work, dtype=q.dtype)


def _npu_sparse(out: Any, q: Spec, k: Spec, v: Spec, indices: Spec, *more: Any, **kw: Any) -> Cost:
    """Products with the chosen keys, some channels of which are rotated."""
    backward = len(tensors(out)) == 5
    rotated = tensors(out)[3].shape[-1] if backward else kw["query_rope"].shape[-1]
    work, width = indices.numel * q.shape[2], v.shape[-1]
    products = 3 * (width + rotated) + 2 * width if backward else 2 * width + rotated
    gathered = indices.numel * (width + rotated) * k.itemsize
    cost = once(
        out,
        q,
        indices,
        *(m for m in more if isinstance(m, Spec)),
        flops=2 * work * products,
        vector=SOFTMAX * work,
        dtype=q.dtype,
    )
    return dataclasses.replace(cost, read=cost.read + gathered, once=False)


FORMULAS: dict[str, Callable[..., Cost]] = {
    "npu_fusion_attention": _npu_attention,
    "npu_fusion_attention_v3": _npu_attention,
    "npu_fusion_attention_grad": _npu_attention_grad,
    "npu_fusion_attention_grad_v3": _npu_attention_grad,
    **dict.fromkeys(
        (
            "npu_all_gather_base_mm",
            "npu_mm_reduce_scatter_base",
            "npu_mm_all_reduce_base",
            "fused_matmul_reduce_scatter",
        ),
        _product_and_collective,
    ),
    "fused_all_gather_matmul": _gather_and_products,
    **dict.fromkeys(("npu_alltoallv_gmm", "npu_gmm_alltoallv"), _experts_and_collective),
    "npu_fused_linear_online_max_sum": _linear_max_sum,
    "npu_fused_linear_cross_entropy_loss_with_max_sum_backward": _linear_loss_backward,
    "npu_fused_cross_entropy_loss_with_max_sum": lambda out, top, total, picked, **kw: once(
        out, top, total, picked, vector=(SPECIAL + 2) * top.numel
    ),
    "npu_lightning_indexer": _npu_indexer,
    "npu_lightning_indexer_grad": _npu_indexer_grad,
    "npu_sparse_flash_attention": _npu_sparse,
    "npu_sparse_flash_attention_grad": _npu_sparse,
    "npu_ffn": _npu_ffn,
    "npu_grouped_matmul": _npu_grouped,
    "npu_grouped_matmul_add": _npu_grouped_add,
}
