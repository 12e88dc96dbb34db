"""Scaled dot-product attention: grouped-query heads, causal, sliding window, masks, soft-cap and attention sinks.

Source: Dao 2023, "FlashAttention-2"; ``npu_fusion_attention_v3`` of torch_npu; ``aten.scaled_dot_product_attention``,
whose conventions are used: a boolean mask is True where attention is allowed, "causal" is aligned at the top left.
Dropout is :mod:`mindspeed_fx.kernels.attention_dropout`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_fx.compat.placements import PARTIAL, REPLICATED, Even
from mindspeed_fx.cost import operators as cost
from mindspeed_fx.kernels.base import LIBRARY, accumulation_dtype, operator
from mindspeed_fx.kernels.sharding import along


def stored_bsnd(x: Tensor) -> Tensor:
    """x [batch, heads, seq, ...] stored as [batch, seq, heads, ...]; ``x`` itself where it is."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _like_bsnd(x: Tensor, last: int) -> Tensor:
    """Empty [batch, heads, seq, last] stored as [batch, seq, heads, last], the layout that flash kernels return."""
    b, n, s, _ = x.shape
    return x.new_empty((b, s, n, last)).transpose(1, 2)


def fake(q, k, v, mask, causal, scale, window=0, softcap=0.0, sinks=None):
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=accumulation_dtype(q.dtype)).transpose(1, 2)
    return _like_bsnd(q, v.shape[-1]), lse


def repeat_kv_heads(q: Tensor, k: Tensor) -> Tensor:
    groups = q.shape[1] // max(k.shape[1], 1)
    return k if groups == 1 else k.repeat_interleave(groups, 1)


def _allowed_mask(q: Tensor, k: Tensor, causal: bool, window: int) -> Tensor | None:
    if not causal:
        return None
    keep = torch.ones((q.shape[2], k.shape[2]), dtype=torch.bool, device=q.device).tril()
    return keep.triu(1 - window) if window else keep


def masked_scores(
    q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float, window: int, softcap: float
) -> tuple[Tensor, Tensor | None]:
    """Masked scores, and tanh(scores / softcap) where there is a soft-cap, which its gradient needs."""
    scores, tanh = (q * scale) @ repeat_kv_heads(q, k).transpose(-1, -2), None
    if softcap:
        tanh = torch.tanh(scores / softcap)
        scores = tanh * softcap
    keep = _allowed_mask(q, k, causal, window)
    if keep is not None:
        scores = scores.masked_fill(~keep, float("-inf"))
    if mask is not None:
        scores = (
            scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask.to(scores.dtype)
        )
    return scores, tanh


@operator(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float scale, int window=0, float softcap=0.0, "
    "Tensor? sinks=None) -> (Tensor, Tensor)",
    fake,
)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(softcap * tanh(scale * q k^T / softcap) + mask) v.

    Args:
        q: [batch, heads, q_seq, dim], float.
        k: [batch, kv_heads, kv_seq, dim]; kv_heads divides heads.
        v: [batch, kv_heads, kv_seq, v_dim].
        mask: None, boolean (True: attend) or additive, broadcast to [batch, heads, q_seq, kv_seq]; an additive one may
            have a gradient (:mod:`mindspeed_fx.kernels.attention_bias`).
        causal: query i sees keys 0..i.
        scale: factor on q k^T.
        window: with ``causal``, query i sees the last ``window`` keys up to its own; 0 for all.
        softcap: bound on the scores (Gemma 2); 0 for none.
        sinks: [heads], one more score per head without a value (Xiao et al. 2023; gpt-oss), or [batch, heads, q_seq],
            one for each query (Inkling), or None.

    Returns:
        out [batch, heads, q_seq, v_dim], stored as [batch, q_seq, heads, v_dim], and the log-sum-exp of each row, its
        sink included, [batch, heads, q_seq] in float32 (float64 for float64). A row without any allowed key is zero.
    """
    wide = accumulation_dtype(q.dtype)
    scores = masked_scores(q.to(wide), k.to(wide), mask, causal, scale, window, softcap)[0]
    lse = scores.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, by_row(sinks.to(wide)))
    weights = weights_of(scores, lse, mask)
    out = weights @ repeat_kv_heads(q, v).to(wide)
    return stored_bsnd(out.to(q.dtype)), stored_bsnd(lse)


FAR = 2.0**12
"""Magnitude from which a log-sum-exp in float32 says less than three digits of a sum of exponentials."""


def weights_of(scores: Tensor, lse: Tensor, mask: Tensor | None) -> Tensor:
    """exp(scores - lse): zero in a row without any allowed key, and NaN where a score is, as softmax has it.

    Where a ``mask`` of numbers such as -1e9 hides a row whole, nothing is left in ``lse`` of how many keys there are:
    the weights are divided by their sum, if that is as near to one as ``lse`` tells. (In a step of a ring it is of more
    keys than are here.)
    """
    weights = (scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1)).exp()
    if mask is None or mask.dtype == torch.bool:
        return weights
    total, size = weights.sum(-1, keepdim=True), lse.abs().unsqueeze(-1)
    is_of_all = total.log().abs() <= 4 * torch.finfo(lse.dtype).eps * size
    far = (size > FAR) & (lse != float("-inf")).unsqueeze(-1)
    return torch.where(far & is_of_all, weights / total, weights)


def by_row(sinks: Tensor) -> Tensor:
    """Sinks as they broadcast to the log-sum-exp [batch, heads, q_seq]."""
    return sinks if sinks.dim() == 3 else sinks[:, None]


def fake_backward(grad, q, k, v, out, lse, mask, causal, scale, window=0, softcap=0.0):
    return _like_bsnd(q, q.shape[-1]), _like_bsnd(k, k.shape[-1]), _like_bsnd(v, v.shape[-1])


def gradients(
    q: Tensor, k: Tensor, v: Tensor, qw: Tensor, kw: Tensor, g: Tensor, weights: Tensor, ds: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) from the gradient ``ds`` of the scores and the ``weights`` that v was multiplied with; gradients of
    shared heads are summed. ``qw``, ``kw`` and ``g``, the gradient of the result, are in the type that is computed in;
    the results are as q, k and v."""

    def shared(x: Tensor, like: Tensor) -> Tensor:
        # Not unflatten, which Dynamo cannot capture while dropout draws from Megatron's tracker.
        return x.reshape(x.shape[0], like.shape[1], x.shape[1] // max(like.shape[1], 1), *x.shape[2:]).sum(2)

    dq = ds @ repeat_kv_heads(q, kw) * scale
    dk, dv = shared(ds.transpose(-1, -2) @ qw * scale, k), shared(weights.transpose(-1, -2) @ g, v)
    return tuple(stored_bsnd(x.to(like.dtype)) for x, like in ((dq, q), (dk, k), (dv, v)))


@operator(
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? mask, bool causal, "
    "float scale, int window=0, float softcap=0.0) -> (Tensor, Tensor, Tensor)",
    fake_backward,
)
def attention_backward(grad, q, k, v, out, lse, mask, causal, scale, window=0, softcap=0.0):
    """Gradients (dq, dk, dv) of :func:`attention`, each stored as [batch, seq, heads, dim].

    With P = exp(scores - lse): dV = P^T dO, dS = P * (dO V^T - rowsum(dO * O)), dQ = scale dS K, dK = scale dS^T Q;
    a soft-cap multiplies dS by 1 - tanh^2; gradients of shared heads are summed.
    """
    wide = accumulation_dtype(q.dtype)
    g, qw, kw, vw = grad.to(wide), q.to(wide), k.to(wide), v.to(wide)
    scores, tanh = masked_scores(qw, kw, mask, causal, scale, window, softcap)
    p = weights_of(scores, lse, mask)
    delta = (g * out.to(wide)).sum(-1, keepdim=True)
    ds = p * (g @ repeat_kv_heads(q, vw).transpose(-1, -2) - delta)
    if tanh is not None:
        ds = ds * (1 - tanh * tanh)
    return gradients(q, k, v, qw, kw, g, p, ds, scale)


def _setup(ctx, inputs, output):
    q, k, v, mask, ctx.causal, ctx.scale, ctx.window, ctx.softcap, sinks = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse, mask, sinks)
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, _grad_lse):
    if grad is None:
        return (None,) * 9
    q, k, v, out, lse, mask, sinks = ctx.saved_tensors
    trained = ctx.needs_input_grad[3]
    backward = torch.ops.mindspeed.attention_bias_backward if trained else torch.ops.mindspeed.attention_backward
    *grads, dmask = (
        *backward(grad, q, k, v, out, lse, mask, ctx.causal, ctx.scale, ctx.window, ctx.softcap),
        *([] if trained else [None]),
    )
    dsinks = None
    if sinks is not None and ctx.needs_input_grad[8]:
        # The sink's weight exp(sink - lse) meets no value, so its dS is minus that weight times rowsum(dO * O).
        delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
        dsinks = -((by_row(sinks.to(lse.dtype)) - lse).exp() * delta)
        dsinks = (dsinks if sinks.dim() == 3 else dsinks.sum((0, 2))).to(sinks.dtype)
    return *(g if need else None for g, need in zip(grads, ctx.needs_input_grad)), dmask, None, None, None, None, dsinks


torch.library.register_autograd("mindspeed::attention", _backward, setup_context=_setup, lib=LIBRARY)


@attention.shard
def _sharding_rule(q, k, v, mask, causal, scale, window=0, softcap=0.0, sinks=None):
    return [
        ([out, lse], [dq, dk, dv, m, s if sinks is None or sinks.ndim == 1 else lse])
        for out, lse, dq, dk, dv, m, s, _ in attention_strategies(q, k, mask, causal)
    ]


@attention_backward.shard
def _sharding_rule_backward(grad, q, k, v, out, lse, mask, causal, scale, window=0, softcap=0.0):
    results = [
        (grads, [o, dq, dk, dv, o, s, m]) for o, s, dq, dk, dv, m, _, grads in attention_strategies(q, k, mask, causal)
    ]
    # The log-sum-exp of all keys is known here, so some of the keys are enough.
    return (
        results
        if causal
        else results + [([PARTIAL, 2, 2], [REPLICATED, REPLICATED, 2, 2, REPLICATED, REPLICATED, along(mask, 3, 4)])]
    )


def attention_strategies(q, k, mask, causal):
    """Rows of placements: out, lse, q, k, v, mask, sinks, and the gradients of q, k and v.

    By batch; by head, those that share a key together; by query where no query's place matters; by the width of v.
    """
    heads, kv_heads = q.shape[1], k.shape[1]
    yield 0, 0, 0, 0, 0, along(mask, 0, 4), REPLICATED, [0, 0, 0]
    kv = 1 if heads == kv_heads else Even(1)
    yield 1, 1, 1, kv, kv, along(mask, 1, 4), 0, [1, 1, 1]
    if kv_heads == 1:
        yield 1, 1, 1, REPLICATED, REPLICATED, along(mask, 1, 4), 0, [1, PARTIAL, PARTIAL]
    if not causal:
        yield 2, 2, 2, REPLICATED, REPLICATED, along(mask, 2, 4), REPLICATED, [2, PARTIAL, PARTIAL]
    yield 3, REPLICATED, REPLICATED, REPLICATED, 3, REPLICATED, REPLICATED, [PARTIAL, PARTIAL, 3]


@attention.costs
def _cost(out, q, k, v, mask, causal, scale, window=0, softcap=0.0, sinks=None):
    return cost.attention(out, q, k, v, causal, mask, sinks, window=window)


@attention_backward.costs
def _backward_cost(out, grad, q, k, v, result, lse, mask, causal, scale, window=0, softcap=0.0):
    return cost.attention(out, q, k, v, causal, grad, result, lse, mask, window=window, backward=True)
