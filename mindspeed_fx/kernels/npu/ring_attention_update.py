"""Merging two attentions on NPU: ``npu_ring_attention_update``, whose pair of largest score and sum of exponentials is
(log-sum-exp, 1).

It takes [seq, batch, heads * dim]; leading dimensions that lie next to one another in memory are folded into one
sequence, so that no layout of attention's results is copied. The result's log-sum-exp is the largest score plus the
logarithm of the sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_fx.kernels.npu import check_types, dense_order, first, lowering, within
from mindspeed_fx.kernels.ring_attention_update import ring_attention_update

npu = torch.ops.npu
COPIES = 8
"""How often the operator wants each number of a row's statistics."""
LOWEST = -3e38
"""For rows that see no key: what -inf gives inside the operator is not documented, and its exponential is zero as
well.
"""


def _supports(out, lse, block, block_lse):
    op = "npu_ring_attention_update"
    return first(
        check_types(out=out, block=block),
        check_types((torch.float32,), lse=lse, block_lse=block_lse),
        within(f"{op}: dimensions of out", out.dim(), 4, 4),
        f"{op}: the last dimension of out is not contiguous in memory" if out.stride(-1) != 1 else None,
    )


def _fold(x: Tensor, order: list[int], heads: bool) -> Tensor:
    """x [batch, heads, seq, ...] as [seq, batch, heads, ...] of the operator, the dimensions of ``order`` outermost
    first.
    """
    x = x.permute(*order, *range(3, x.dim()))
    if order == [2, 0, 1]:
        return x
    return x.flatten(0, 1).unsqueeze(1) if heads else x.flatten(0, 2)[:, None, None]


def _statistics(lse: Tensor, order: list[int], heads: bool) -> Tensor:
    """[batch, heads, seq, 8] of the operator."""
    return _fold(lse, order, heads).permute(1, 2, 0).unsqueeze(-1).expand(-1, -1, -1, COPIES).contiguous()


def _unfold(x: Tensor, order: list[int], like: Tensor) -> Tensor:
    """Back from [seq, batch, heads, ...] to the shape and layout of ``like``."""
    x = x.reshape(*(like.shape[i] for i in order), *like.shape[3:]).to(like.dtype)
    x = x.permute(*(order.index(i) for i in range(3)), *range(3, like.dim()))
    laid_out = dense_order(like.stride())
    x = x.permute(laid_out).clone(memory_format=torch.contiguous_format)
    return x.permute([laid_out.index(i) for i in range(like.dim())])


@lowering(ring_attention_update, "npu_ring_attention_update", _supports, ("npu_ring_attention_update",))
def _ring_attention_update(out, lse, block, block_lse):
    order = dense_order(out.stride()[:3])
    heads = order[2] == 1
    laid = [_fold(x.to(out.dtype), order, heads).flatten(2).contiguous() for x in (out, block)]
    old, new = (_statistics(x.clamp(min=LOWEST), order, heads) for x in (lse, block_lse))
    ones = torch.ones_like(old)
    both, top, total = npu.npu_ring_attention_update(laid[0], old, ones, laid[1], new, ones, input_layout="SBH")
    merged = (top[..., 0] + total[..., 0].log()).permute(2, 0, 1)
    return _unfold(both.unflatten(2, (top.shape[1], -1)), order, out), _unfold(merged, order, lse)
