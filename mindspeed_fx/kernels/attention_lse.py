"""Log-sum-exp of attention's scores from the two statistics that fusion attention returns: what a graph keeps for the
backward, a sixteenth of their memory, by one launch in the place of a logarithm, a sum and a transposition.

Source: ``npu_fusion_attention_v3`` of torch_npu, whose softmax_max and softmax_sum repeat each number eight times.
"""

from __future__ import annotations

from torch import Tensor

from mindspeed_fx.compat.fake import hint
from mindspeed_fx.cost.operators import once
from mindspeed_fx.kernels import triton
from mindspeed_fx.kernels.attention import stored_bsnd
from mindspeed_fx.kernels.base import operator

REPEATED = 8
"""Times that each number stands in the statistics."""
OFFSETS = 2**31


def _fake(top, total):
    batch, heads, seq, _ = top.shape
    return top.new_empty((batch, seq, heads)).transpose(1, 2)


@operator("attention_lse(Tensor top, Tensor total) -> Tensor", _fake)
def attention_lse(top: Tensor, total: Tensor) -> Tensor:
    """log(sum of exp(score)) of each row of attention.

    Args:
        top: [batch, heads, seq, 8] float32, the largest score of each row, eight times.
        total: the same of the sum of exp(score - top).

    Returns:
        [batch, heads, seq] float32, stored as [batch, seq, heads].
    """
    return stored_bsnd(top[..., 0] + total[..., 0].log())


@attention_lse.costs
def _cost(out, top, total):
    return once(out, top, total, vector=2 * out.numel)


@attention_lse.shard
def _shard(top, total):
    return [([d], [d, d]) for d in (0, 1, 2)]


def _supports(top, total):
    heads = top.shape[1]
    if not isinstance(heads, int) or heads > 256:
        return f"{heads} heads, the kernel takes up to 256"
    if hint(top.numel()) >= OFFSETS:
        return "statistics of more elements than offsets of 32 bits reach"
    if not (top.is_contiguous() and total.is_contiguous()):
        return "the statistics are not contiguous"
    return triton.refuse_types(REPEATED, top=top, total=total)


triton.kernel(attention_lse, _fake, "attention_lse.forward", "rows of all heads of some tokens", _supports)
triton.on_npu(attention_lse)
