"""Attention on NPU: ``npu_fusion_attention_v3`` and its backward.

What the operator says in its own words becomes the kernel's: an allowed position is False in ``atten_mask``; a bias is
``pse``, divided by the scale, because the kernel adds it before scaling; a causal mask is sparse mode 2 with the fixed
2048 x 2048 triangle, a window mode 4 with as many keys before as it is wide, and shorter sequences have a mask of their
own size in mode 0, as the documentation advises. The log-sum-exp replaces the two statistics
backward: as largest score, with a sum of 1, it gives the same weights, the sinks' share included. The kernel has no
soft-cap: such attention runs in blocks of rows (:mod:`mindspeed_fx.kernels.cpu.attention_blocked`), where it is causal.

Taken as read, for the documentation does not say it: a sink counts in ``softmax_sum``.
"""

from __future__ import annotations

import functools
from typing import Any, TypeGuard

import torch
from torch import Tensor

from mindspeed_fx.compat.fake import hint
from mindspeed_fx.compat.symbols import statically_known_true
from mindspeed_fx.kernels.attention import attention, attention_backward, stored_bsnd
from mindspeed_fx.kernels.attention_lse import attention_lse
from mindspeed_fx.kernels.cpu.attention import _blocked_backward_supports, _blocked_supports
from mindspeed_fx.kernels.cpu.attention_blocked import attention_blocked, attention_blocked_backward
from mindspeed_fx.kernels.npu import check_types, first, in_acl_graph, lowering, within

npu = torch.ops.npu
TRIANGLE, FULL = 2048, 2147483647
LOWEST = -1e30
"""Log-sum-exp below which a boolean mask allows a row no key: masked scores are the smallest float32, not minus
infinity."""
COUNTLESS = -(2.0**22)
"""Log-sum-exp below which float32 does not tell how many keys of one score there are: a mask's numbers hide the row."""

# --------------------------------------------------------------------------- limits


def _supports(q, k, v, mask, causal, scale, window=0, softcap=0.0, sinks=None, op="npu_fusion_attention_v3"):
    if softcap:
        return f"{op}: a soft-cap of {softcap}; the kernel has none"
    if sinks is not None and sinks.dim() > 1:
        return f"{op}: a sink for each query; valid: one for each head"
    heads, shared = hint(q.shape[1]), hint(k.shape[1])
    return first(
        check_types(q=q, k=k, v=v),
        f"{op}: q, k and v are {q.dtype}, {k.dtype}, {v.dtype}; valid: one type".replace("torch.", "")
        if not q.dtype == k.dtype == v.dtype
        else None,
        within(f"{op}: head_dim", q.shape[3], 1, 768),
        f"{op}: head_dim of v is {v.shape[3]}; valid: up to that of k, {k.shape[3]}"
        if hint(v.shape[3]) > hint(k.shape[3])
        else None,
        within(f"{op}: heads", heads, 1, 256),
        f"{op}: {heads} heads and {shared} of keys; valid: a multiple" if heads % shared else None,
        within(f"{op}: batch", q.shape[0], 1, 2 * 2**20),
        within(f"{op}: length of q", q.shape[2], 1, 2**20),
        within(f"{op}: length of k", k.shape[2], 1, 2**20),
        _mask_limits(op, q, k, mask, causal, scale, window),
        f"{op}: sinks are {sinks.dtype}; valid: {', '.join(map(str, (torch.float32, q.dtype)))}".replace("torch.", "")
        if sinks is not None and sinks.dtype not in (torch.float32, q.dtype)
        else None,
    )


def _mask_limits(op, q, k, mask, causal, scale, window):
    if _is_additive(mask):
        if mask.dtype != q.dtype:
            return f"{op}: the bias is {mask.dtype}; valid: the type of q, {q.dtype}".replace("torch.", "")
        if scale == 0:
            return f"{op}: a bias with scale 0, by which pse would be divided"
    if window and mask is None and not statically_known_true(q.shape[2] == k.shape[2]):
        return (
            f"{op}: a window of {window} keys with {q.shape[2]} queries and {k.shape[2]} keys; valid: as many (a "
            "band starts at the other corner)"
        )
    return within(f"{op}: window", window, 0, FULL)


def _supports_backward(grad, q, k, v, out, lse, mask, causal, scale, window=0, softcap=0.0):
    op = "npu_fusion_attention_grad_v3"
    return _supports(q, k, v, mask, causal, scale, window, softcap, op=op) or check_types(
        (q.dtype,), grad=grad, out=out
    )


# --------------------------------------------------------------------------- masks


def _band(rows: int, columns: int, window: int, device: torch.device) -> Tensor:
    """[rows, columns], True where a causal mask hides a key: later than the query, or before the window; made once in a
    graph. At :data:`TRIANGLE` and without a window it is the mask of the compressed modes."""
    ones = torch.ones(rows, columns, dtype=torch.bool, device=device)
    return ones.triu(1) | ones.tril(-window) if window else ones.triu(1)


def _is_additive(mask: Tensor | None) -> TypeGuard[Tensor]:
    return mask is not None and mask.dtype != torch.bool


def _seen(q: Tensor, k: Tensor, mask: Tensor, causal: bool, window: int) -> Tensor:
    """An additive mask with what ``causal`` hides."""
    return mask.masked_fill(_band(q.shape[2], k.shape[2], window, q.device), float("-inf")) if causal else mask


def _mask(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float, window: int) -> dict:
    """The arguments that mask: pse, atten_mask, sparse_mode, pre_tockens, next_tockens, inner_precise."""
    arguments = {
        "pse": None,
        "atten_mask": None,
        "sparse_mode": 0,
        "pre_tockens": FULL,
        "next_tockens": FULL,
        "inner_precise": 0,
    }
    if _is_additive(mask):
        # Not minus infinity: the running maximum of a block that is masked whole would make it NaN.
        arguments["pse"] = (_bias(mask, q.shape[1]) / scale).clamp(min=torch.finfo(q.dtype).min / 2)
    if mask is not None and mask.dtype == torch.bool:
        mask = ~mask
        if causal:
            mask = mask | _band(q.shape[2], k.shape[2], window, q.device)
        # Shapes are BNSS, B1SS, 11SS; rows without any allowed key are zero only with inner_precise 2.
        batch, heads = (q.shape[0], q.shape[1]) if hint(mask.shape[1]) != 1 else (mask.shape[0], 1)
        arguments.update(atten_mask=mask.expand(batch, heads, q.shape[2], k.shape[2]).contiguous(), inner_precise=2)
    elif causal:
        small = isinstance(q.shape[2], int) and q.shape[2] == k.shape[2] < TRIANGLE
        before = window - 1 if window else FULL
        if small:
            arguments.update(
                atten_mask=_band(q.shape[2], q.shape[2], window, q.device), pre_tockens=before, next_tockens=0
            )
        elif window:
            arguments.update(
                atten_mask=_band(TRIANGLE, TRIANGLE, 0, q.device), sparse_mode=4, pre_tockens=before, next_tockens=0
            )
        else:
            arguments.update(atten_mask=_band(TRIANGLE, TRIANGLE, 0, q.device), sparse_mode=2)
    return arguments


def _bias(bias: Tensor, heads: int) -> Tensor:
    """[batch, heads, q_seq or 1, kv_seq]: pse has BNSS, BN1S and 1NSS."""
    return bias.expand(bias.shape[0], heads, *bias.shape[2:]).contiguous()


def _four(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """A mask of any broadcast shape as [.., .., q_seq, kv_seq]; a bias that is the same for every query, as ALiBi's by
    keys, as [batch, .., 1, kv_seq]:
    BN1S is the one form without all rows, and there is no 1N1S."""
    if mask is None:
        return None
    mask = mask[(None,) * (4 - mask.dim())]
    by_keys = mask.dtype != torch.bool and hint(mask.shape[2]) == 1 and hint(q.shape[2]) != 1
    return mask.expand(
        q.shape[0] if by_keys else mask.shape[0], mask.shape[1], 1 if by_keys else q.shape[2], k.shape[2]
    )


# --------------------------------------------------------------------------- layouts

ORDERS = {"BSND": (0, 2, 1, 3), "BNSD": (0, 1, 2, 3), "SBH": (2, 0, 1, 3)}
"""Layout -> order of [batch, heads, seq, dim] in memory."""


def _contiguous(x: Tensor, layout: str) -> bool:
    wanted = 1
    for i in reversed(ORDERS[layout]):
        if not (statically_known_true(x.shape[i] == 1) or statically_known_true(x.stride(i) == wanted)):
            return False
        wanted = wanted * x.shape[i]
    return True


def _layout(inputs: tuple[Tensor, ...], results: int) -> str:
    """The layout that copies least: inputs that are stored otherwise, and every result, which is stored BSND. ACL
    graphs take BNSD alone.
    """
    if in_acl_graph():
        return "BNSD"
    return min(
        ORDERS,
        key=lambda layout: sum(not _contiguous(x, layout) for x in inputs) + (results if layout != "BSND" else 0),
    )


def _to_layout(x: Tensor, layout: str) -> Tensor:
    x = x.permute(ORDERS[layout])
    return x.flatten(2) if layout == "SBH" else x


def _back(x: Tensor, layout: str, heads: int) -> Tensor:
    if layout == "BSND":
        return x.transpose(1, 2)
    if layout == "SBH":
        x = x.unflatten(2, (heads, -1))
    order = ORDERS[layout]
    return stored_bsnd(x.permute([order.index(i) for i in range(4)]))


# --------------------------------------------------------------------------- the kernels


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    window: int,
    sinks: Tensor | None = None,
    **dropout: Any,
) -> tuple[Tensor, ...]:
    """(out, lse, seed, offset) of the kernel, the last two for ``dropout``, its keep_prob."""
    layout = _layout((q, k, v), 1)
    out, top, total, _, seed, offset = npu.npu_fusion_attention_v3(
        *(_to_layout(x, layout) for x in (q, k, v)),
        q.shape[1],
        layout,
        scale=scale,
        sink=None if sinks is None else sinks.float(),
        **_mask(q, k, _four(mask, q, k), causal, scale, window),
        **dropout,
    )
    out, lse = _back(out, layout, q.shape[1]), _log_sum_exp(top, total, mask)
    if _is_additive(mask) and sinks is None:  # a sink takes all of a hidden row
        # Of a row that minus infinity hides whole the kernel, which is given the smallest numbers instead, averages.
        hidden = _seen(q, k, mask, causal, window).amax(-1, keepdim=True) == float("-inf")
        out, lse = (stored_bsnd(x.masked_fill(h, 0.0)) for x, h in ((out, hidden), (lse, hidden.squeeze(-1))))
    return out, lse, seed, offset


def _log_sum_exp(top: Tensor, total: Tensor, mask: Tensor | None) -> Tensor:
    """[batch, heads, seq] of the statistics, 0 where a boolean mask hides a row whole: one launch where Triton is there
    and there is no such mask."""
    kernel, _ = attention_lse.choose("npu", (top, total), {})
    lse = (kernel.build if kernel else attention_lse.reference)(top, total)
    return lse if mask is None or _is_additive(mask) else stored_bsnd(lse.masked_fill(~(lse > LOWEST), 0.0))


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    window: int,
    **dropout: Any,
) -> tuple[Tensor, ...]:
    """(dq, dk, dv) of the kernel; ``dropout`` is its keep_prob, seed and offset."""
    layout = _layout((q, k, v, grad, out), 3)
    laid = functools.partial(_to_layout, layout=layout)
    dq, dk, dv, *_ = npu.npu_fusion_attention_grad_v3(
        laid(q),
        laid(k),
        laid(v),
        laid(grad),
        q.shape[1],
        layout,
        attention_in=laid(out),
        scale_value=scale,
        **_statistics(q, k, lse, mask, causal, window),
        **_mask(q, k, _four(mask, q, k), causal, scale, window),
        **dropout,
    )
    return tuple(_back(g, layout, like.shape[1]) for g, like in ((dq, q), (dk, k), (dv, v)))


def _statistics(q: Tensor, k: Tensor, lse: Tensor, mask: Tensor | None, causal: bool, window: int) -> dict[str, Tensor]:
    """What the backward gets for the statistics: the log-sum-exp as largest score, and a sum of 1; where numbers of an
    additive mask, such as -1e9, hide a row whole, as many as there are keys with the largest of them."""
    total = torch.ones(lse.shape, dtype=lse.dtype, device=lse.device)
    if _is_additive(mask):
        seen = _seen(q, k, mask, causal, window)
        total = torch.where(lse < COUNTLESS, (seen == seen.amax(-1, keepdim=True)).sum(-1), total)
    top, total = (x.unsqueeze(-1).expand(*lse.shape, 8).contiguous() for x in (lse, total))
    return {"softmax_max": top, "softmax_sum": total}


@lowering(attention, "npu_fusion_attention_v3", _supports, ("npu_fusion_attention_v3",))
def _attention(q, k, v, mask, causal, scale, window=0, softcap=0.0, sinks=None):
    return forward(q, k, v, mask, causal, scale, window, sinks)[:2]


@lowering(attention_backward, "npu_fusion_attention_grad_v3", _supports_backward, ("npu_fusion_attention_grad_v3",))
def _attention_backward(grad, q, k, v, out, lse, mask, causal, scale, window=0, softcap=0.0):
    return backward(grad, q, k, v, out, lse, mask, causal, scale, window)


@lowering(attention, "attention in blocks of rows", _blocked_supports)
def _in_blocks(q, k, v, mask, causal, scale, window=0, softcap=0.0, sinks=None):
    return attention_blocked.overload(q, k, v, scale, window, softcap)


@lowering(attention_backward, "attention backward in blocks of rows", _blocked_backward_supports)
def _in_blocks_backward(grad, q, k, v, out, lse, mask, causal, scale, window=0, softcap=0.0):
    return attention_blocked_backward.overload(grad, q, k, v, out, lse, scale, window, softcap)
