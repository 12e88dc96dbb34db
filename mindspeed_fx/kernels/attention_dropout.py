"""Attention with dropout on its weights: ``dropout(softmax(...)) v``, the mask of what is kept drawn outside.

The model's own dropout draws one number per weight; drawn before the operator, from the same generator and in the same
order, the mask (a byte per weight) is what the unfused model has, and the weights themselves need not exist. Everything
else is as in :mod:`mindspeed_fx.kernels.attention`. Source: Dao 2023, "FlashAttention-2"; ``dropout_mask`` of
``npu_fusion_attention``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_fx.cost import operators as cost
from mindspeed_fx.kernels import attention as plain
from mindspeed_fx.kernels.base import LIBRARY, accumulation_dtype, operator
from mindspeed_fx.kernels.cpu.attention_blocked import attention_blocked, attention_blocked_backward

SETTINGS = "float scale, int window, float softcap, float p"


def _fake(q, k, v, keep, scale, window, softcap, p):
    return plain.fake(q, k, v, None, True, scale)


@operator(f"attention_dropout(Tensor q, Tensor k, Tensor v, Tensor keep, {SETTINGS}) -> (Tensor, Tensor)", _fake)
def attention_dropout(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor, scale: float, window: int, softcap: float, p: float
) -> tuple[Tensor, Tensor]:
    """(keep * softmax(scores) / (1 - p)) v, causal.

    Args:
        q: [batch, heads, seq, dim], float.
        k: [batch, kv_heads, seq, dim]; kv_heads divides heads.
        v: [batch, kv_heads, seq, v_dim].
        keep: bool [batch, heads, seq, seq], False where a weight is dropped.
        scale: factor on q k^T.
        window: query i sees the last ``window`` keys up to its own; 0 for all.
        softcap: bound on the scores; 0 for none.
        p: the probability with which ``keep`` was drawn to be False, in [0, 1).

    Returns:
        out and the log-sum-exp of each row before dropout, stored as those of ``mindspeed::attention``.
    """
    wide = accumulation_dtype(q.dtype)
    scores = plain.masked_scores(q.to(wide), k.to(wide), None, True, scale, window, softcap)[0]
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp() * keep
    out = (weights @ plain.repeat_kv_heads(q, v).to(wide)) / (1 - p)
    return plain.stored_bsnd(out.to(q.dtype)), plain.stored_bsnd(lse)


def _fake_backward(grad, q, k, v, out, lse, keep, scale, window, softcap, p):
    return plain.fake_backward(grad, q, k, v, out, lse, None, True, scale)


@operator(
    "attention_dropout_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor keep, "
    f"{SETTINGS}) -> (Tensor, Tensor, Tensor)",
    _fake_backward,
)
def attention_dropout_backward(grad, q, k, v, out, lse, keep, scale, window, softcap, p):
    """Gradients (dq, dk, dv) of :func:`attention_dropout`: those of attention with P M / (1 - p) for P in dV, and
    dP = (dO V^T) M / (1 - p), for the mask M; rowsum(dO * O) stays rowsum(P * dP)."""
    wide = accumulation_dtype(q.dtype)
    g, qw, kw, vw = grad.to(wide) / (1 - p), q.to(wide), k.to(wide), v.to(wide)
    scores, tanh = plain.masked_scores(qw, kw, None, True, scale, window, softcap)
    weights = (scores - lse.unsqueeze(-1)).exp()
    dp = (g @ plain.repeat_kv_heads(q, vw).transpose(-1, -2)) * keep
    ds = weights * (dp - (grad.to(wide) * out.to(wide)).sum(-1, keepdim=True))
    if tanh is not None:
        ds = ds * (1 - tanh * tanh)
    return plain.gradients(q, k, v, qw, kw, g, weights * keep, ds, scale)


def _setup(ctx, inputs, output):
    q, k, v, keep, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output, keep)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, _grad_lse):
    if grad is None:
        return (None,) * 8
    grads = torch.ops.mindspeed.attention_dropout_backward(grad, *ctx.saved_tensors, *ctx.settings)
    return *(g if need else None for g, need in zip(grads, ctx.needs_input_grad)), None, None, None, None, None


torch.library.register_autograd("mindspeed::attention_dropout", _backward, setup_context=_setup, lib=LIBRARY)


@attention_dropout.shard
def _sharding_rule(q, k, v, keep, *settings):
    return [
        ([out, lse], [dq, dk, dv, m]) for out, lse, dq, dk, dv, m, *_ in plain.attention_strategies(q, k, keep, True)
    ]


@attention_dropout_backward.shard
def _sharding_rule_backward(grad, q, k, v, out, lse, keep, *settings):
    return [
        (grads, [o, dq, dk, dv, o, s, m])
        for o, s, dq, dk, dv, m, _, grads in plain.attention_strategies(q, k, keep, True)
    ]


@attention_dropout.costs
def _cost(out, q, k, v, keep, scale, window, softcap, p):
    return cost.attention(out, q, k, v, True, keep, window=window)


@attention_dropout_backward.costs
def _backward_cost(out, grad, q, k, v, result, lse, keep, scale, window, softcap, p):
    return cost.attention(out, q, k, v, True, grad, result, lse, keep, window=window, backward=True)


def _fixed_settings(q, k):
    sizes = (q.shape[2], k.shape[2])
    return (
        None
        if all(isinstance(s, int) for s in sizes) and sizes[0] == sizes[1]
        else "sequence lengths of queries and keys are not fixed and equal"
    )


@attention_dropout.lower("cpu")("attention in blocks of rows", lambda q, k, *rest: _fixed_settings(q, k))
def _attend_blocked(q, k, v, keep, scale, window, softcap, p):
    return attention_blocked.overload(q, k, v, scale, window, softcap, keep, p)


@attention_dropout_backward.lower("cpu")(
    "attention backward in blocks of rows", lambda grad, q, k, *rest: _fixed_settings(q, k)
)
def _blocked_backward(grad, q, k, v, out, lse, keep, scale, window, softcap, p):
    return attention_blocked_backward.overload(grad, q, k, v, out, lse, scale, window, softcap, keep, p)
