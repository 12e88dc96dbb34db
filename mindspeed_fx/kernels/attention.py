"""Scaled dot-product attention with grouped-query heads, causal and additive or boolean masks.

Source: Dao 2023, "FlashAttention-2"; ``npu_fusion_attention_v3`` of torch_npu; ``aten.scaled_dot_product_attention``,
whose conventions are used: a boolean mask is True where attention is allowed, "causal" is aligned at the top left.
Dropout is not part of the operator: its mask would have to be drawn as the unfused model draws it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula, sdpa_backward_flop_count, sdpa_flop_count

from mindspeed_fx import compat
from mindspeed_fx.kernels.attention_blocked import SEQUENCE, causal_attention_backward_blocked
from mindspeed_fx.kernels.base import LIBRARY, accumulation_dtype, operator

aten = torch.ops.aten


def _like_bsnd(x: Tensor, last: int) -> Tensor:
    """Empty [batch, heads, seq, last] stored as [batch, seq, heads, last], the layout that flash kernels return."""
    b, n, s, _ = x.shape
    return x.new_empty((b, s, n, last)).transpose(1, 2)


def _fake(q, k, v, mask, causal, scale):
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=accumulation_dtype(q.dtype)).transpose(1, 2)
    return _like_bsnd(q, v.shape[-1]), lse


def _grouped(q: Tensor, k: Tensor) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    return k if groups == 1 else k.repeat_interleave(groups, 1)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    scores = (q * scale) @ _grouped(q, k).transpose(-1, -2)
    if causal:
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~keep, float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask.to(scores.dtype)
    return scores


@operator("attention(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float scale) -> (Tensor, Tensor)", _fake)
def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """softmax(scale * q k^T + mask) v.

    Args:
        q: [batch, heads, q_seq, dim], float.
        k: [batch, kv_heads, kv_seq, dim]; kv_heads divides heads.
        v: [batch, kv_heads, kv_seq, v_dim].
        mask: None, boolean (True: attend) or additive, broadcast to [batch, heads, q_seq, kv_seq]; has no gradient.
        causal: query i sees keys 0..i.
        scale: factor on q k^T.

    Returns:
        out [batch, heads, q_seq, v_dim], stored as [batch, q_seq, heads, v_dim], and the log-sum-exp of each row
        [batch, heads, q_seq] in float32 (float64 for float64). A row without any allowed key is zero.
    """
    wide = accumulation_dtype(q.dtype)
    scores = _scores(q.to(wide), k.to(wide), mask, causal, scale)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp().nan_to_num(0.0)
    out = weights @ _grouped(q, v).to(wide)
    return out.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2), lse.transpose(1, 2).contiguous().transpose(1, 2)


def _fake_backward(grad, q, k, v, out, lse, mask, causal, scale):
    return _like_bsnd(q, q.shape[-1]), _like_bsnd(k, k.shape[-1]), _like_bsnd(v, v.shape[-1])


@operator("attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? mask, bool causal, float scale) -> (Tensor, Tensor, Tensor)", _fake_backward)
def attention_backward(grad, q, k, v, out, lse, mask, causal, scale):
    """Gradients (dq, dk, dv) of :func:`attention`, each stored as [batch, seq, heads, dim].

    With P = exp(scores - lse): dV = P^T dO, dS = P * (dO V^T - rowsum(dO * O)), dQ = scale dS K, dK = scale dS^T Q;
    gradients of shared heads are summed.
    """
    wide = accumulation_dtype(q.dtype)
    g, qw, kw, vw = grad.to(wide), q.to(wide), k.to(wide), v.to(wide)
    p = (_scores(qw, kw, mask, causal, scale) - lse.unsqueeze(-1)).exp().nan_to_num(0.0)
    delta = (g * out.to(wide)).sum(-1, keepdim=True)
    ds = p * (g @ _grouped(q, vw).transpose(-1, -2) - delta)

    def shared(x: Tensor, like: Tensor) -> Tensor:
        return x.unflatten(1, (like.shape[1], -1)).sum(2)

    def store(x: Tensor, like: Tensor) -> Tensor:
        return x.to(like.dtype).transpose(1, 2).contiguous().transpose(1, 2)

    dq = ds @ _grouped(q, kw) * scale
    dk, dv = shared(ds.transpose(-1, -2) @ qw * scale, k), shared(p.transpose(-1, -2) @ g, v)
    return store(dq, q), store(dk, k), store(dv, v)


def _setup(ctx, inputs, output):
    q, k, v, mask, ctx.causal, ctx.scale = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse, mask)
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, _grad_lse):
    if grad is None:
        return (None,) * 6
    q, k, v, out, lse, mask = ctx.saved_tensors
    grads = torch.ops.mindspeed.attention_backward(grad, q, k, v, out, lse, mask, ctx.causal, ctx.scale)
    return *(g if need else None for g, need in zip(grads, ctx.needs_input_grad)), None, None, None


torch.library.register_autograd("mindspeed::attention", _backward, setup_context=_setup, lib=LIBRARY)


# --------------------------------------------------------------------------- cpu: ATen's flash kernel, or our own backward


def _cpu_supports(q, k, v, mask, causal, scale):
    if q.shape[-1] != v.shape[-1]:
        return f"head_dim of q and k ({q.shape[-1]}) differs from v's ({v.shape[-1]})"
    if not q.dtype == k.dtype == v.dtype:
        return f"q, k and v have types {q.dtype}, {k.dtype}, {v.dtype}"
    if q.dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        return f"type {q.dtype}"
    if any(x.stride(-1) != 1 for x in (q, k, v)):
        return "the head dimension of q, k or v is not contiguous"
    return None


def _cpu_mask(mask: Tensor | None, q: Tensor) -> Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask if mask is None else mask.to(q.dtype)
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, float("-inf"))


def _cpu_backward_supports(grad, q, k, v, out, lse, mask, causal, scale):
    return _cpu_supports(q, k, v, mask, causal, scale)


def _blocked_supports(grad, q, k, v, out, lse, mask, causal, scale):
    if mask is not None or not causal:
        return "not causal alone"
    rows, keys = q.shape[2], k.shape[2]
    if isinstance(rows, torch.SymInt) or isinstance(keys, torch.SymInt) or rows != keys:
        return "sequence lengths of queries and keys are not fixed and equal"
    if rows not in SEQUENCE:
        return f"flash is the faster at {rows} rows"
    if {x.dtype for x in (grad, q, k, v)} != {torch.float32}:
        return f"type {q.dtype}"
    return None if compat.onednn_beats_blas() else "measured on other vendors' processors only"


@attention_backward.lower("cpu")("attention backward in blocks of rows", _blocked_supports)
def _cpu_backward_blocked(grad, q, k, v, out, lse, mask, causal, scale):
    return causal_attention_backward_blocked.overload(grad, q, k, v, lse, scale)


@attention.lower("cpu")("aten flash attention", _cpu_supports)
def _cpu(q, k, v, mask, causal, scale):
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=_cpu_mask(mask, q), scale=scale)
    return out.transpose(1, 2).contiguous().transpose(1, 2), lse  # the kernel's result is stored as q is


@attention_backward.lower("cpu")("aten flash attention backward", _cpu_backward_supports)
def _cpu_backward(grad, q, k, v, out, lse, mask, causal, scale):
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal, attn_mask=_cpu_mask(mask, q), scale=scale
    )


@register_flop_formula(torch.ops.mindspeed.attention)
def _flops(q_shape, k_shape, v_shape, *args, out_shape=None, **kwargs) -> int:
    """Without the causal saving, as torch counts its own attention operators."""
    b, n = q_shape[:2]
    return sdpa_flop_count(q_shape, (b, n, *k_shape[2:]), (b, n, *v_shape[2:]))


@register_flop_formula(torch.ops.mindspeed.attention_backward)
def _backward_flops(grad_shape, q_shape, k_shape, v_shape, *args, out_shape=None, **kwargs) -> int:
    b, n = q_shape[:2]
    return sdpa_backward_flop_count(grad_shape, q_shape, (b, n, *k_shape[2:]), (b, n, *v_shape[2:]))
