"""Attention with dropout on its weights whose mask the kernel draws: ``dropout(softmax(...)) v``, the seed a result.

The mask is never stored: the backward draws it again from the seed. The numbers are the kernel's own, of the same
distribution as the model's dropout but not the same, so that only targets take this operator whose eager dropout is one
kernel with numbers of its own too. Everything else is as in :mod:`mindspeed_fx.kernels.attention`. Source: Dao 2023,
"FlashAttention-2"; ``npu_fusion_attention_v3``, which returns seed and offset as tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_fx.compat.placements import PARTIAL, REPLICATED
from mindspeed_fx.cost import operators as cost
from mindspeed_fx.kernels import attention as plain
from mindspeed_fx.kernels.base import LIBRARY, accumulation_dtype, operator
from mindspeed_fx.kernels.sharding import along

SETTINGS = "bool causal, float scale, int window, float p"


def _keep(seed: Tensor, weights: Tensor, p: float) -> Tensor:
    """What dropout multiplies the weights with: the same for the same seed."""
    draws = torch.rand(
        weights.shape, generator=torch.Generator(weights.device).manual_seed(int(seed)), device=weights.device
    )
    return (draws >= p).to(weights.dtype) / (1 - p)


def _fake(q, k, v, mask, causal, scale, window, p):
    return *plain.fake(q, k, v, mask, causal, scale), *(q.new_empty(1, dtype=torch.int64) for _ in range(2))


@operator(
    f"attention_seeded(Tensor q, Tensor k, Tensor v, Tensor? mask, {SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _fake,
    opaque=True,
    random=True,
)
def attention_seeded(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, window: int, p: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(keep * softmax(scale * q k^T + mask) / (1 - p)) v.

    Args:
        q: [batch, heads, q_seq, dim], float.
        k: [batch, kv_heads, kv_seq, dim]; kv_heads divides heads.
        v: [batch, kv_heads, kv_seq, v_dim].
        mask: None, boolean (True: attend) or additive, broadcast to [batch, heads, q_seq, kv_seq]; has no gradient.
        causal: query i sees keys 0..i.
        scale: factor on q k^T.
        window: with ``causal``, query i sees the last ``window`` keys up to its own; 0 for all.
        p: probability in [0, 1) of a weight to become zero.

    Returns:
        out and the log-sum-exp of each row before dropout, as those of ``mindspeed::attention``; seed and offset [1],
        int64, from which the backward draws the same mask; zero where p is.
    """
    wide = accumulation_dtype(q.dtype)
    scores = plain.masked_scores(q.to(wide), k.to(wide), mask, causal, scale, window, 0.0)[0]
    lse = scores.logsumexp(-1)
    weights = plain.weights_of(scores, lse, mask)
    seed = torch.randint(2**31, (1,), device=q.device) if p else torch.zeros(1, dtype=torch.int64, device=q.device)
    out = (weights * _keep(seed, weights, p) if p else weights) @ plain.repeat_kv_heads(q, v).to(wide)
    return plain.stored_bsnd(out.to(q.dtype)), plain.stored_bsnd(lse), seed, torch.zeros_like(seed)


def _fake_backward(grad, q, k, v, out, lse, seed, offset, mask, causal, scale, window, p):
    return plain.fake_backward(grad, q, k, v, out, lse, mask, causal, scale)


@operator(
    "attention_seeded_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor seed, Tensor "
    f"offset, Tensor? mask, {SETTINGS}) -> (Tensor, Tensor, Tensor)",
    _fake_backward, opaque=True,
)  # fmt: skip
def attention_seeded_backward(grad, q, k, v, out, lse, seed, offset, mask, causal, scale, window, p):
    """Gradients (dq, dk, dv) of :func:`attention_seeded`: those of attention with P M for P in dV, and dP = (dO V^T) M,
    for the factors M of the dropout; rowsum(dO * O) stays rowsum(P * dP)."""
    wide = accumulation_dtype(q.dtype)
    g, qw, kw, vw = (x.to(wide) for x in (grad, q, k, v))
    weights = plain.weights_of(plain.masked_scores(qw, kw, mask, causal, scale, window, 0.0)[0], lse, mask)
    keep = _keep(seed, weights, p) if p else torch.ones_like(weights)
    dp = (g @ plain.repeat_kv_heads(q, vw).transpose(-1, -2)) * keep
    ds = weights * (dp - (g * out.to(wide)).sum(-1, keepdim=True))
    return plain.gradients(q, k, v, qw, kw, g, weights * keep, ds, scale)


def _setup(ctx, inputs, output):
    q, k, v, mask, *ctx.settings = inputs
    if ctx.needs_input_grad[3]:
        raise NotImplementedError(
            "mindspeed::attention_seeded has no gradient for its additive mask; use mindspeed::attention, without "
            "dropout"
        )
    ctx.save_for_backward(q, k, v, *output, mask)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, *_):
    if grad is None:
        return (None,) * 8
    grads = torch.ops.mindspeed.attention_seeded_backward(grad, *ctx.saved_tensors, *ctx.settings)
    return *(g if need else None for g, need in zip(grads, ctx.needs_input_grad)), None, None, None, None, None


torch.library.register_autograd("mindspeed::attention_seeded", _backward, setup_context=_setup, lib=LIBRARY)


def _rows(q, k, v, mask, causal, p):
    """The ways of attention. With dropout each rank draws the numbers of its part, so parts of v's width, which would
    all need the same numbers, are no way; the backward finds what the forward saved placed as its own way wants it."""
    return [row for row in plain.attention_strategies(q, k, mask, causal) if not (p and row[4] == 3)]


@attention_seeded.shard
def _sharding_rule(q, k, v, mask, causal, scale, window, p):
    return [
        ([out, lse, REPLICATED, REPLICATED], [dq, dk, dv, m])
        for out, lse, dq, dk, dv, m, *_ in _rows(q, k, v, mask, causal, p)
    ]


@attention_seeded_backward.shard
def _sharding_rule_backward(grad, q, k, v, out, lse, seed, offset, mask, causal, scale, window, p):
    rows = [
        (grads, [o, dq, dk, dv, o, s, REPLICATED, REPLICATED, m])
        for o, s, dq, dk, dv, m, _, grads in _rows(q, k, v, mask, causal, p)
    ]
    # Without dropout some of the keys are enough, as in attention; with it the forward drew for all of them.
    return (
        rows
        if causal or p
        else [*rows, ([PARTIAL, 2, 2], [REPLICATED, REPLICATED, 2, 2, *[REPLICATED] * 4, along(mask, 3, 4)])]
    )


@attention_seeded.costs
def _cost(out, q, k, v, mask, causal, scale, window, p):
    return cost.attention(out, q, k, v, causal, mask, window=window)


@attention_seeded_backward.costs
def _backward_cost(out, grad, q, k, v, result, lse, seed, offset, mask, causal, scale, window, p):
    return cost.attention(out, q, k, v, causal, grad, result, lse, seed, offset, mask, window=window, backward=True)
