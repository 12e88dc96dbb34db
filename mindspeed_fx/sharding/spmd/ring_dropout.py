"""One block of ring attention with dropout on its weights.

Dropout multiplies weights after the softmax, so that a ring drops numerators and leaves denominators: with the block's
own log-sum-exp its result is ``dropout(softmax(block)) v``, and merged by log-sum-exp as without dropout. Which weights
are kept is drawn before the ring for a rank's own rows and all keys, a byte each, and saved. The weights of a block
are made in full, forward and backward.

Source: Dao 2023, "FlashAttention-2", whose dropout is the same; MindSpeed's ring has it inside its kernel.
"""

from __future__ import annotations

from typing import Sequence

import torch
from torch import Tensor

from mindspeed_fx.kernels import attention as plain
from mindspeed_fx.kernels.base import accumulation_dtype
from mindspeed_fx.sharding.spmd.ring_messages import take_half


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, keep: Tensor, causal: bool, scale: float, p: float
) -> tuple[Tensor, Tensor]:
    """(keep * softmax(scores) / (1 - p)) v and the log-sum-exp of scores; as ``mindspeed::attention`` else.

    Args:
        keep: bool [batch, heads, q_seq, kv_seq], False where a weight is dropped.
        p: the probability with which it was drawn to be False, in [0, 1).
    """
    wide = accumulation_dtype(q.dtype)
    scores = plain.masked_scores(q.to(wide), k.to(wide), mask, causal, scale, 0, 0.0)[0]
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp() * keep
    return ((weights @ plain.repeat_kv_heads(q, v).to(wide)) / (1 - p)).to(q.dtype), lse


def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    keep: Tensor,
    causal: bool,
    scale: float,
    p: float,
) -> tuple[Tensor, ...]:
    """Gradients of q, k and v: those of ``mindspeed::attention`` with P M / (1 - p) for P in dV and dP = (dO V^T)
    M / (1 - p), for M = ``keep``; ``out`` and ``lse`` are of all keys."""
    wide = accumulation_dtype(q.dtype)
    g, qw, kw, vw = grad.to(wide) / (1 - p), q.to(wide), k.to(wide), v.to(wide)
    scores = plain.masked_scores(qw, kw, mask, causal, scale, 0, 0.0)[0]
    weights = (scores - lse.unsqueeze(-1)).exp()
    dp = (g @ plain.repeat_kv_heads(q, vw).transpose(-1, -2)) * keep
    ds = weights * (dp - (grad.to(wide) * out.to(wide)).sum(-1, keepdim=True))
    return plain.gradients(q, k, v, qw, kw, g, weights * keep, ds, scale)


def take_blocks(keep: Tensor | None, rows: Sequence[int], columns: Sequence[int]) -> Tensor | None:
    """Of [batch, heads, rows, keys] the two blocks of a chunk of rows by a chunk of keys, one behind the other along
    the batch; the first by another operator than the second, as :mod:`ring` takes chunks."""
    if keep is None:
        return None
    first = keep.chunk(2, 2)[rows[0]].chunk(2, 3)[columns[0]]
    return torch.cat([first, take_half(take_half(keep, rows[1], 2), columns[1], 3)])
