"""Attention with dropout on NPU: ``npu_fusion_attention_v3`` with ``keep_prob``, its seed and offset handed to its
backward.

Masks, layouts and limits are those of :mod:`mindspeed_fx.kernels.npu.attention`. Version 1 would bake its seed into the
graph.
"""

from __future__ import annotations

from mindspeed_fx.kernels.attention_seeded import attention_seeded, attention_seeded_backward
from mindspeed_fx.kernels.npu import attention as plain
from mindspeed_fx.kernels.npu import lowering


def _supports(q, k, v, mask, causal, scale, window, p):
    return plain._supports(q, k, v, mask, causal, scale, window)


def _supports_backward(grad, q, k, v, out, lse, seed, offset, mask, causal, scale, window, p):
    return plain._supports_backward(grad, q, k, v, out, lse, mask, causal, scale, window)


@lowering(attention_seeded, "npu_fusion_attention_v3 with keep_prob", _supports, ("npu_fusion_attention_v3",))
def _attention(q, k, v, mask, causal, scale, window, p):
    return plain.forward(q, k, v, mask, causal, scale, window, keep_prob=1 - p)


@lowering(
    attention_seeded_backward,
    "npu_fusion_attention_grad_v3 with keep_prob",
    _supports_backward,
    ("npu_fusion_attention_grad_v3",),
)
def _attention_backward(grad, q, k, v, out, lse, seed, offset, mask, causal, scale, window, p):
    dropout = {"keep_prob": 1 - p, "seed": seed, "offset": offset}
    return plain.backward(grad, q, k, v, out, lse, mask, causal, scale, window, **dropout)
