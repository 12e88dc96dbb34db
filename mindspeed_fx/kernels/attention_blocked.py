"""Backward of causal self-attention on CPU as a few large matrix products per block of rows.

ATen's flash backward multiplies tiles of 64 rows one at a time; between about 320 and 1023 rows per sequence those are too
small for the BLAS underneath. Here one batched product serves a block of rows of every head, the keys above the
diagonal are left out as flash does, and work buffers are reused, so the extra memory is a few blocks of scores.
Source: Dao 2023, "FlashAttention-2", algorithm 2; measured by benchmarks/attention_cpu.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_fx.kernels.base import operator

ROWS = 64
"""Rows of queries per block: small enough that the scores above the diagonal that are computed in vain stay few."""

SCORES = 2**20
"""Elements of one work buffer to aim at: two of them stay in a last-level cache."""

SEQUENCE = range(320, 1024)
"""Where flash is slower; below and above it is not."""


def _fake(grad, q, k, v, lse, scale):
    return tuple(torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2) for x in (q, k, v))


@operator("causal_attention_backward_blocked(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor lse, float scale) -> (Tensor, Tensor, Tensor)", _fake, opaque=True)
def causal_attention_backward_blocked(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of softmax(scale q k^T + causal mask) v.

    Args:
        grad: [batch, heads, seq, v_dim].
        q: [batch, heads, seq, dim], float32 or float64.
        k: [batch, kv_heads, seq, dim]; kv_heads divides heads.
        v: [batch, kv_heads, seq, v_dim].
        lse: log-sum-exp of each row of the scores, [batch, heads, seq].
        scale: factor on q k^T.

    Returns:
        dq, dk, dv, each shaped as its input and stored as [batch, seq, heads, dim].
    """
    grads = _fake(grad, q, k, v, lse, scale)
    batch, heads, seq, _ = q.shape
    batches = max(1, min(batch, SCORES // (heads * ROWS * seq)))
    for b in range(0, batch, batches):
        _some_batches(*(x[b : b + batches] for x in (grad, q, k, v, lse, *grads)), scale)
    return grads


def _some_batches(grad, q, k, v, lse, dq, dk, dv, scale):
    (batch, heads, seq, dim), kv_heads, v_dim = q.shape, k.shape[1], v.shape[-1]
    groups, n = heads // kv_heads, batch * kv_heads
    split = (kv_heads, groups)
    q, grad, lse, dq = (x.unflatten(1, split) for x in (q, grad, lse, dq))
    keys, values = k.reshape(n, seq, dim), v.reshape(n, seq, v_dim)
    diagonal = q.new_full((ROWS, ROWS), float("-inf")).triu_(1)
    block = n * groups * ROWS
    buffers = [q.new_empty(size) for size in (block * seq, block * seq, block * dim, block * v_dim, n * seq * max(dim, v_dim))]

    def work(i: int, *shape: int) -> Tensor:
        size = 1
        for d in shape:
            size *= d
        return buffers[i][:size].view(shape)

    def add(into: Tensor, left: Tensor, right: Tensor, stop: int) -> None:
        product = work(4, n, stop, right.shape[-1])
        torch.bmm(left.transpose(1, 2), right, out=product)
        product = product.view(batch, kv_heads, stop, -1)
        into.copy_(product) if stop == seq else into[:, :, :stop].add_(product)

    # The last rows see every key: starting with them, the first product fills dk and dv and the others are added.
    for start in reversed(range(0, seq, ROWS)):
        stop = min(seq, start + ROWS)
        rows, span = stop - start, groups * (stop - start)
        at = (slice(None), slice(None), slice(None), slice(start, stop))
        qs, gs = work(2, n, span, dim), work(3, n, span, v_dim)
        torch.mul(q[at], scale, out=qs.view(batch, kv_heads, groups, rows, dim))
        gs.view(batch, kv_heads, groups, rows, v_dim).copy_(grad[at])
        p, ds = work(0, n, span, stop), work(1, n, span, stop)
        torch.baddbmm(lse[at].neg().reshape(n, span, 1), qs, keys[:, :stop].transpose(1, 2), out=p)
        p.view(n, groups, rows, stop)[..., start:].add_(diagonal[:rows, :rows])
        p.exp_()
        add(dv, p, gs, stop)
        torch.bmm(gs, values[:, :stop].transpose(1, 2), out=ds)
        # dS = P (dP - rowsum(P dP)): the softmax's own backward, in one pass.
        torch.ops.aten._softmax_backward_data.out(ds, p, -1, p.dtype, grad_input=ds)
        add(dk, ds, qs, stop)
        torch.bmm(ds, keys[:, :stop], out=qs)
        torch.mul(qs.view(batch, kv_heads, groups, rows, dim), scale, out=dq[at])
