"""Attention with dropout on NPU: ``npu_fusion_attention_v3`` with ``keep_prob``, its seed and offset handed to its
backward.

Masks, layouts and limits are those of :mod:`mindspeed_fx.kernels.npu.attention`. Version 1 would bake its seed into the
graph.
"""

from __future__ import annotations

import functools

import torch

from mindspeed_fx.kernels.attention_seeded import attention_seeded, attention_seeded_backward
from mindspeed_fx.kernels.npu import attention as plain
from mindspeed_fx.kernels.npu import check_types, lowering

npu = torch.ops.npu


def _supports(q, k, v, mask, causal, scale, window, p):
    return plain._supports(q, k, v, mask, causal, scale, window)


def _supports_backward(grad, q, k, v, out, lse, seed, offset, mask, causal, scale, window, p):
    return plain._supports(q, k, v, mask, causal, scale, window, op="npu_fusion_attention_grad_v3") or check_types(
        (q.dtype,), grad=grad, out=out
    )


@lowering(attention_seeded, "npu_fusion_attention_v3 with keep_prob", _supports, ("npu_fusion_attention_v3",))
def _attention(q, k, v, mask, causal, scale, window, p):
    layout = plain._layout((q, k, v), 1)
    arg = plain._mask(q, k, plain._four(mask, q, k), causal, scale, window)
    qkv = (plain._to_layout(x, layout) for x in (q, k, v))
    out, top, total, _, seed, offset = npu.npu_fusion_attention_v3(
        *qkv, q.shape[1], layout, scale=scale, keep_prob=1 - p, **arg
    )
    out, lse = plain._back(out, layout, q.shape[1]), plain._log_sum_exp(top, total, mask)
    return *plain._without_hidden(out, lse, plain._hidden(q, k, mask, causal, window)), seed, offset


@lowering(
    attention_seeded_backward,
    "npu_fusion_attention_grad_v3 with keep_prob",
    _supports_backward,
    ("npu_fusion_attention_grad_v3",),
)
def _attention_backward(grad, q, k, v, out, lse, seed, offset, mask, causal, scale, window, p):
    layout = plain._layout((q, k, v, grad, out), 3)
    arg = plain._mask(q, k, plain._four(mask, q, k), causal, scale, window)
    laid = functools.partial(plain._to_layout, layout=layout)
    dq, dk, dv, *_ = npu.npu_fusion_attention_grad_v3(
        laid(q),
        laid(k),
        laid(v),
        laid(grad),
        q.shape[1],
        layout,
        attention_in=laid(out),
        scale_value=scale,
        keep_prob=1 - p,
        seed=seed,
        offset=offset,
        **plain._statistics(q, k, lse, mask, causal, window),
        **arg,
    )
    return tuple(plain._back(g, layout, like.shape[1]) for g, like in ((dq, q), (dk, k), (dv, v)))
