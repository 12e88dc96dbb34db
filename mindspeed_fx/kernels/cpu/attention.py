"""Which kernel runs attention on CPU: our own flash kernel, ATen's, or blocks of rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_fx.compat import dispatcher, symbols
from mindspeed_fx.kernels.attention import attention, attention_backward, by_row, stored_bsnd
from mindspeed_fx.kernels.base import accumulation_dtype
from mindspeed_fx.kernels.cpu import attention_flash
from mindspeed_fx.kernels.cpu.attention_blocked import (
    SEQUENCE,
    attention_blocked,
    attention_blocked_backward,
    supports_blocks,
)

aten = torch.ops.aten
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _own_supports(q, k, v, mask, causal, scale, window=0, softcap=0.0, sinks=None):
    if sinks is not None and sinks.dim() > 1:
        return "a sink for each query"
    return attention_flash.supports(q, k, v, mask)


def _own_backward_supports(grad, q, k, v, out, lse, mask, causal, scale, window=0, softcap=0.0):
    return attention_flash.supports_backward(grad, q, k, v, mask)


@attention.lower("cpu")("flash attention in C++", _own_supports)
def _own(q, k, v, mask, causal, scale, window=0, softcap=0.0, sinks=None):
    return attention_flash.attention_flash.overload(q, k, v, causal, scale, window, softcap, sinks, mask)


@attention_backward.lower("cpu")("flash attention backward in C++", _own_backward_supports)
def _own_backward(grad, q, k, v, out, lse, mask, causal, scale, window=0, softcap=0.0):
    return attention_flash.attention_flash_backward.overload(
        grad, q, k, v, out, lse, causal, scale, window, softcap, mask
    )


def _flash_supports(q, k, v, mask, causal, scale, window=0, softcap=0.0, sinks=None):
    if softcap:
        return f"a soft-cap of {softcap}"
    if window:
        return f"a window of {window} keys"
    if q.shape[-1] < v.shape[-1]:
        return f"head_dim of v ({v.shape[-1]}) is larger than that of q and k ({q.shape[-1]})"
    if not q.dtype == k.dtype == v.dtype or q.dtype not in FLOATS:
        return f"q, k and v have types {q.dtype}, {k.dtype}, {v.dtype}"
    if not all(symbols.statically_known_true(n > 0) for x in (q, k, v) for n in x.shape):
        return "a size is 0, or may be, of which ATen's kernel divides by zero"
    if any(x.stride(-1) != 1 for x in (q, k, v)):
        return "the head dimension of q, k or v is not contiguous"
    return None


def _additive(mask: Tensor | None, q: Tensor) -> Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask if mask is None else mask.to(q.dtype)
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, float("-inf"))


def _pad(x: Tensor, like: Tensor) -> Tensor:
    """Flash wants one head dimension: zeros beyond v's add nothing (multi-head latent attention)."""
    missing = like.shape[-1] - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x


@attention.lower("cpu")("aten flash attention", _flash_supports)
def _flash(q, k, v, mask, causal, scale, window=0, softcap=0.0, sinks=None):
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, _pad(v, q), 0.0, causal, attn_mask=_additive(mask, q), scale=scale
    )
    out = out[..., : v.shape[-1]]
    if sinks is not None:
        lse = lse.to(
            accumulation_dtype(q.dtype)
        )  # torch 2.11's meta kernel says float32 where the kernel returns float64
        both = torch.logaddexp(lse, by_row(sinks.to(lse.dtype)))
        out, lse = (out * (lse - both).exp().nan_to_num(0.0).unsqueeze(-1)).to(q.dtype), stored_bsnd(both)
    return stored_bsnd(out), lse  # the kernel's result is stored as q is


def _flash_backward_supports(grad, q, k, v, out, lse, mask, causal, scale, window=0, softcap=0.0):
    if mask is not None and mask.dtype != torch.bool:
        return "a mask of numbers: of a row that it hides whole the log-sum-exp does not tell the weights"
    return _flash_supports(q, k, v, mask, causal, scale, window, softcap)


def _short_supports(grad, q, k, v, out, lse, mask, causal, scale, window=0, softcap=0.0):
    if window or softcap:
        return "a window or a soft-cap"
    if reason := _blocked_supports(q, k, v, mask, causal, scale):
        return reason
    if q.shape[2] not in SEQUENCE:
        return f"flash is the faster at {q.shape[2]} rows"
    if {x.dtype for x in (grad, q, k, v)} != {torch.float32}:
        return f"type {q.dtype}"
    return None if dispatcher.onednn_beats_blas() else "measured on other vendors' processors only"


def _blocked_supports(q, k, v, mask, causal, scale, window=0, softcap=0.0, sinks=None):
    return supports_blocks(q, k, mask, causal and sinks is None)


def _blocked_backward_supports(grad, q, k, v, out, lse, mask, causal, scale, window=0, softcap=0.0):
    return _blocked_supports(q, k, v, mask, causal, scale, window, softcap)


@attention.lower("cpu")("attention in blocks of rows", _blocked_supports)
def _attend_blocked(q, k, v, mask, causal, scale, window=0, softcap=0.0, sinks=None):
    return attention_blocked.overload(q, k, v, scale, window, softcap)


def _in_blocks(grad, q, k, v, out, lse, mask, causal, scale, window=0, softcap=0.0):
    return attention_blocked_backward.overload(grad, q, k, v, out, lse, scale, window, softcap)


attention_backward.lower("cpu")("attention backward in blocks of rows", _short_supports)(_in_blocks)


@attention_backward.lower("cpu")("aten flash attention backward", _flash_backward_supports)
def _flash_backward(grad, q, k, v, out, lse, mask, causal, scale, window=0, softcap=0.0):
    if mask is not None:  # rows without any allowed key, of which other kernels say -inf and ATen's 0
        lse = lse.masked_fill(lse == float("-inf"), 0.0)
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        _pad(grad, q),
        q,
        k,
        _pad(v, q),
        _pad(out, q),
        lse,
        0.0,
        causal,
        attn_mask=_additive(mask, q),
        scale=scale,
    )
    return dq, dk, dv if v.shape == dv.shape else stored_bsnd(dv[..., : v.shape[-1]])


attention_backward.lower("cpu")("attention backward in blocks of rows", _blocked_backward_supports)(_in_blocks)
