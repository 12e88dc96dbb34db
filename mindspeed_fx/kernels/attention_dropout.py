"""Attention with dropout on its weights: ``dropout(softmax(...)) v``, the mask of what is kept drawn outside.

The model's own dropout draws one number per weight; drawn before the operator, from the same generator and in the same
order, the mask (a byte per weight) is what the unfused model has, and the weights themselves need not exist. Everything
else is as in :mod:`mindspeed_fx.kernels.attention`. Source: Dao 2023, "FlashAttention-2"; ``dropout_mask`` of
``npu_fusion_attention``.
"""

from __future__ import annotations

from typing import Any, Iterator

import torch
from torch import Tensor

from mindspeed_fx.cost import operators as cost
from mindspeed_fx.kernels import attention as plain
from mindspeed_fx.kernels.base import LIBRARY, accumulation_dtype, operator

SETTINGS = "Tensor? mask, bool causal, float scale, int window, float softcap, float p"


def _fake(q, k, v, keep, mask, causal, scale, window, softcap, p):
    return plain.fake(q, k, v, mask, causal, scale)


@operator(f"attention_dropout(Tensor q, Tensor k, Tensor v, Tensor keep, {SETTINGS}) -> (Tensor, Tensor)", _fake)
def attention_dropout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    window: int,
    softcap: float,
    p: float,
) -> tuple[Tensor, Tensor]:
    """(keep * softmax(scores + mask) / (1 - p)) v.

    Args:
        q: [batch, heads, q_seq, dim], float.
        k: [batch, kv_heads, kv_seq, dim]; kv_heads divides heads.
        v: [batch, kv_heads, kv_seq, v_dim].
        keep: bool or uint8 [batch, heads, q_seq, kv_seq], False or 0 where a weight is dropped, otherwise 1.
        mask: None, boolean (True: attend) or additive, broadcast to [batch, heads, q_seq, kv_seq]; has no gradient.
        causal: query i sees keys 0..i.
        scale: factor on q k^T.
        window: with ``causal``, query i sees the last ``window`` keys up to its own; 0 for all.
        softcap: bound on the scores; 0 for none.
        p: the probability with which ``keep`` was drawn to be False, in [0, 1).

    Returns:
        out and the log-sum-exp of each row before dropout, stored as those of ``mindspeed::attention``.
    """
    wide = accumulation_dtype(q.dtype)
    scores = plain.masked_scores(q.to(wide), k.to(wide), mask, causal, scale, window, softcap)[0]
    lse = scores.logsumexp(-1)
    weights = plain.weights_of(scores, lse, mask) * keep
    out = (weights @ plain.repeat_kv_heads(q, v).to(wide)) / (1 - p)
    return plain.stored_bsnd(out.to(q.dtype)), plain.stored_bsnd(lse)


def _fake_backward(grad, q, k, v, out, lse, keep, mask, causal, scale, window, softcap, p):
    return plain.fake_backward(grad, q, k, v, out, lse, mask, causal, scale)


@operator(
    "attention_dropout_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor keep, "
    f"{SETTINGS}) -> (Tensor, Tensor, Tensor)",
    _fake_backward,
)
def attention_dropout_backward(grad, q, k, v, out, lse, keep, mask, causal, scale, window, softcap, p):
    """Gradients (dq, dk, dv) of :func:`attention_dropout`: those of attention with P M / (1 - p) for P in dV, and
    dP = (dO V^T) M / (1 - p), for the mask M; rowsum(dO * O) stays rowsum(P * dP)."""
    wide = accumulation_dtype(q.dtype)
    g, qw, kw, vw = grad.to(wide) / (1 - p), q.to(wide), k.to(wide), v.to(wide)
    scores, tanh = plain.masked_scores(qw, kw, mask, causal, scale, window, softcap)
    weights = plain.weights_of(scores, lse, mask)
    dp = (g @ plain.repeat_kv_heads(q, vw).transpose(-1, -2)) * keep
    ds = weights * (dp - (grad.to(wide) * out.to(wide)).sum(-1, keepdim=True))
    if tanh is not None:
        ds = ds * (1 - tanh * tanh)
    return plain.gradients(q, k, v, qw, kw, g, weights * keep, ds, scale)


def _setup(ctx, inputs, output):
    q, k, v, keep, mask, *ctx.settings = inputs
    if ctx.needs_input_grad[4]:
        raise NotImplementedError(
            "mindspeed::attention_dropout has no gradient for its additive mask; use mindspeed::attention, without "
            "dropout"
        )
    ctx.save_for_backward(q, k, v, *output, keep, mask)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, _grad_lse):
    if grad is None:
        return (None,) * 10
    grads = torch.ops.mindspeed.attention_dropout_backward(grad, *ctx.saved_tensors, *ctx.settings)
    return *(g if need else None for g, need in zip(grads, ctx.needs_input_grad)), *(None,) * 7


torch.library.register_autograd("mindspeed::attention_dropout", _backward, setup_context=_setup, lib=LIBRARY)


def dropout_strategies(q: Any, k: Any, keep: Any, mask: Any, causal: bool) -> Iterator[tuple[tuple, Any]]:
    """Rows of :func:`attention.attention_strategies`, with ``mask``, and where each has ``keep``."""
    for row, kept in zip(*(plain.attention_strategies(q, k, m, causal) for m in (mask, keep)), strict=True):
        yield row, kept[5]


@attention_dropout.shard
def _sharding_rule(q, k, v, keep, mask, causal, *settings):
    return [
        ([out, lse], [dq, dk, dv, kept, m])
        for (out, lse, dq, dk, dv, m, *_), kept in dropout_strategies(q, k, keep, mask, causal)
    ]


@attention_dropout_backward.shard
def _sharding_rule_backward(grad, q, k, v, out, lse, keep, mask, causal, *settings):
    return [
        (grads, [o, dq, dk, dv, o, s, kept, m])
        for (o, s, dq, dk, dv, m, _, grads), kept in dropout_strategies(q, k, keep, mask, causal)
    ]


@attention_dropout.costs
def _cost(out, q, k, v, keep, mask, causal, scale, window, softcap, p):
    return cost.attention(out, q, k, v, causal, keep, mask, window=window)


@attention_dropout_backward.costs
def _backward_cost(out, grad, q, k, v, result, lse, keep, mask, causal, scale, window, softcap, p):
    return cost.attention(out, q, k, v, causal, grad, result, lse, keep, mask, window=window, backward=True)
