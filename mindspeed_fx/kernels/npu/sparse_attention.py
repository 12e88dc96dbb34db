"""Attention to chosen keys on NPU: ``npu_sparse_flash_attention`` and its gradient.

They take the absorbed form of latent attention alone: one head of keys, 512 channels of a latent that are the values
too, and 64 that are rotated; a power of two of heads up to 128, in 16 bits. The pair of largest score and sum of
exponentials that the gradient reads is (log-sum-exp, 1). Statistics are not returned to captured graphs.
"""

from __future__ import annotations

import torch

from mindspeed_fx.compat.fake import hint
from mindspeed_fx.kernels.npu import check_types, first, in_acl_graph, lowering, within
from mindspeed_fx.kernels.npu.lightning_indexer import CAUSAL, HALVES
from mindspeed_fx.kernels.sparse_attention import sparse_attention, sparse_attention_backward

npu = torch.ops.npu
LATENT, ROTATED = 512, 64
ABSORBED = 2
"""attention_mode."""


def _limits(op, q, k, v, v_width):
    heads = hint(q.shape[2])
    return first(
        f"{op}: values of their own; the first channels of the keys are expected" if v is not None else None,
        check_types(HALVES, q=q),
        check_types((q.dtype,), k=k),
        within(f"{op}: heads of keys", k.shape[2], 1, 1),
        f"{op}: heads is {heads}; valid: 1, 2, 4 to 128" if heads > 128 or heads & (heads - 1) else None,
        within(f"{op}: channels of a value", v_width, LATENT, LATENT),
        within(f"{op}: channels of a key", q.shape[3], LATENT + ROTATED, LATENT + ROTATED),
        f"{op}: statistics in a captured graph" if in_acl_graph() else None,
    )


def _supports(q, k, v, indices, scale, v_width):
    return _limits("npu_sparse_flash_attention", q, k, v, v_width)


def _parts(x):
    return tuple(part.contiguous() for part in x.split([LATENT, ROTATED], -1))


@lowering(sparse_attention, "npu_sparse_flash_attention", _supports, ("npu_sparse_flash_attention",))
def _sparse_attention(q, k, v, indices, scale, v_width):
    (q, q_rotated), (k, k_rotated) = _parts(q), _parts(k)
    out, top, total = npu.npu_sparse_flash_attention(
        q, k, k, indices.to(torch.int32).unsqueeze(2), scale, query_rope=q_rotated, key_rope=k_rotated,
        sparse_block_size=1, sparse_mode=CAUSAL, attention_mode=ABSORBED, return_softmax_lse=True,
    )  # fmt: skip
    return out, (top + total.log()).squeeze(1)


def _supports_backward(grad, q, k, v, indices, out, lse, scale, v_width):
    return _limits("npu_sparse_flash_attention_grad", q, k, v, v_width)


@lowering(
    sparse_attention_backward,
    "npu_sparse_flash_attention_grad",
    _supports_backward,
    ("npu_sparse_flash_attention_grad",),
)
def _sparse_attention_backward(grad, q, k, v, indices, out, lse, scale, v_width):
    (q, q_rotated), (k, k_rotated), top = _parts(q), _parts(k), lse.unsqueeze(1).contiguous()
    dq, dk, dv, dq_rotated, dk_rotated = npu.npu_sparse_flash_attention_grad(
        q, k, k, indices.to(torch.int32).unsqueeze(2), grad.contiguous(), out, top, torch.ones_like(top), scale, 1,
        query_rope=q_rotated, key_rope=k_rotated, layout="BSND", sparse_mode=CAUSAL, attention_mode=ABSORBED,
    )  # fmt: skip
    return torch.cat([dq, dq_rotated], -1), torch.cat([dk + dv, dk_rotated], -1), k.new_empty(0)
