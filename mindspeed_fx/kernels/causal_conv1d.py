"""Causal depthwise convolution over a sequence, with its activation: each token mixes with the few before it.

Per channel, with k weights: y_t = sum over j of w_j x_(t - k + 1 + j), zero before the sequence, plus the bias; then
SiLU, if asked for. Source: Gu and Dao 2023, "Mamba" (arXiv 2312.00752), section 3.4; the package causal-conv1d.

With three or four weights this is pointwise work that a library's convolution is not made for: written as shifted
products it becomes, with generated code, one loop together with its neighbours.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_fx.compat import symbols
from mindspeed_fx.compat.fake import hint
from mindspeed_fx.compat.placements import PARTIAL, REPLICATED
from mindspeed_fx.cost.operators import SPECIAL, once
from mindspeed_fx.kernels import triton
from mindspeed_fx.kernels.base import LIBRARY, accumulation_dtype, operator

SCHEMA = "Tensor x, Tensor weight, Tensor? bias, bool silu"


def _channels_last(x: Tensor) -> bool:
    return symbols.statically_known_true(x.stride(1) == 1) and not symbols.statically_known_true(x.stride(2) == 1)


def _like(x: Tensor) -> Tensor:
    """Empty, shaped as x [batch, channels, seq]; densely stored with that dimension last which is last in x."""
    if not _channels_last(x):
        return x.new_empty(x.shape)
    return x.new_empty((x.shape[0], x.shape[2], x.shape[1])).transpose(1, 2)


def _stored_like(y: Tensor, x: Tensor) -> Tensor:
    return y.transpose(1, 2).contiguous().transpose(1, 2) if _channels_last(x) else y.contiguous()


def _fake(x, weight, bias, silu):
    return _like(x)


@operator(f"causal_conv1d({SCHEMA}) -> Tensor", _fake)
def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """Causal depthwise convolution; the formula stands at the top of this file.

    Args:
        x: [batch, channels, seq], float.
        weight: [channels, k], the last for the token itself.
        bias: [channels] or None.
        silu: apply SiLU to the sum.

    Returns:
        [batch, channels, seq] of the type of x, computed in float32 for 16-bit inputs; stored as x is: sequence last,
        or channels last.

    Raises:
        ValueError: shapes that do not fit.
    """
    _check(x, weight, bias)
    y = _sums(x, weight, bias)
    y = F.silu(y) if silu else y
    return _stored_like(y.to(x.dtype), x)


def _sums(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    wide = accumulation_dtype(x.dtype)
    seq, size = x.shape[2], weight.shape[1]
    padded, weight = F.pad(x.to(wide), (size - 1, 0)), weight.to(wide)
    total = None if bias is None else bias.to(wide).unsqueeze(1)
    for j in range(size):
        part = padded.narrow(2, j, seq) * weight[:, j : j + 1]
        total = part if total is None else total + part
    return total


def _fake_backward(grad, x, weight, bias, silu):
    return _like(x), torch.empty_like(weight), x.new_empty(0) if bias is None else torch.empty_like(bias)


@operator(f"causal_conv1d_backward(Tensor grad, {SCHEMA}) -> (Tensor, Tensor, Tensor)", _fake_backward)
def causal_conv1d_backward(grad, x, weight, bias, silu):
    """Gradients of x, weight and bias (empty without bias). With g the gradient of the sums, which are made again:
    dx_t = sum over j of w_j g_(t + k - 1 - j), dw_j = sum over batch and t of g_t x_(t - k + 1 + j)."""
    wide = accumulation_dtype(x.dtype)
    g, (seq, size) = grad.to(wide), (x.shape[2], weight.shape[1])
    if silu:
        y = _sums(x, weight, bias)
        half = y.sigmoid()
        g = g * half * (1 + y * (1 - half))
    after, before = F.pad(g, (0, size - 1)), F.pad(x.to(wide), (size - 1, 0))
    dx, dweight = None, []
    for j in range(size):
        part = after.narrow(2, size - 1 - j, seq) * weight[:, j : j + 1].to(wide)
        dx = part if dx is None else dx + part
        dweight.append((g * before.narrow(2, j, seq)).sum((0, 2)))
    dbias = x.new_empty(0) if bias is None else g.sum((0, 2)).to(bias.dtype)
    return _stored_like(dx.to(x.dtype), x), torch.stack(dweight, 1).to(weight.dtype), dbias


def _check(x, weight, bias):
    torch._check_value(
        x.dim() == 3 and weight.dim() == 2 and weight.shape[0] == x.shape[1] and weight.shape[1] > 0,
        lambda: (
            f"causal_conv1d: weight is {list(weight.shape)} and x {list(x.shape)}; valid: [channels, k] and [batch, "
            "channels, seq]"
        ),
    )
    torch._check_value(
        bias is None or bias.shape == weight.shape[:1],
        lambda: f"causal_conv1d: bias is {list(bias.shape)}; valid: [{weight.shape[0]}]",
    )


def _setup(ctx, inputs, output):
    *tensors, ctx.silu = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad):
    grads = torch.ops.mindspeed.causal_conv1d_backward(grad, *ctx.saved_tensors, ctx.silu)
    return *(g if need else None for g, need in zip(grads, ctx.needs_input_grad)), None


torch.library.register_autograd("mindspeed::causal_conv1d", _backward, setup_context=_setup, lib=LIBRARY)


@causal_conv1d.shard
def _sharding_rule(x, weight, bias, silu):
    return [([0], [0, REPLICATED, REPLICATED]), ([1], [1, 0, 0])]


@causal_conv1d_backward.shard
def _sharding_rule_backward(grad, x, weight, bias, silu):
    def of(placement):
        return REPLICATED if bias is None else placement

    strategies = [
        ([0, PARTIAL, of(PARTIAL)], [0, 0, REPLICATED, REPLICATED]),
        ([1, 0, of(0)], [1, 1, 0, 0]),
    ]
    if bias is not None and not silu:  # nothing is read of the bias
        strategies += [
            ([REPLICATED, REPLICATED, REPLICATED], [REPLICATED, REPLICATED, REPLICATED, 0]),
            ([0, PARTIAL, PARTIAL], [0, 0, REPLICATED, 0]),
            ([1, 0, 0], [1, 1, 0, REPLICATED]),
        ]
    return strategies


@causal_conv1d.costs
def _cost(out, x, weight, bias, silu):
    """k multiply-adds for each element, on the vector units."""
    return once(out, x, weight, bias, vector=x.numel * (2 * weight.shape[1] + (SPECIAL if silu else 0)))


@causal_conv1d_backward.costs
def _backward_cost(out, grad, x, weight, bias, silu):
    """Twice the forward's, and with an activation the forward again."""
    one = 2 * weight.shape[1]
    return once(out, grad, x, weight, bias, vector=x.numel * (2 * one + (one + SPECIAL + 6 if silu else 0)))


REACH = 64
"""No more lines has a tile, with those before it that the weights read."""


def _refuse(x, weight, bias, **others):
    channels, size = weight.shape
    if not (isinstance(channels, int) and isinstance(size, int) and size <= 16):
        return f"{size} weights for each channel, the kernel takes known sizes up to 16"
    if not all(any(symbols.statically_known_true(t.stride(d) == 1) for d in (1, 2)) for t in (x, *others.values())):
        return "neither channels nor the sequence are contiguous"
    if any(REACH * hint(t.stride(d)) >= 2**31 for t in (x, *others.values()) for d in (1, 2)):
        return "lines further apart than offsets of 32 bits reach within a tile"
    return triton.refuse_types(1, x=x, weight=weight, bias=bias, **others)


triton.kernel(
    causal_conv1d,
    _fake,
    "causal_conv1d.forward",
    "a tile of tokens and channels, read once for each weight",
    lambda x, weight, bias, silu: _refuse(x, weight, bias),
    beats_codegen=lambda x, *rest: triton.small(x),
)
triton.kernel(
    causal_conv1d_backward,
    _fake_backward,
    "causal_conv1d.backward",
    "the convolution the other way, and sums by tiles",
    lambda grad, x, weight, bias, silu: _refuse(x, weight, bias, grad=grad),
    beats_codegen=lambda grad, *rest: triton.small(grad),
)
triton.on_npu(causal_conv1d)
triton.on_npu(causal_conv1d_backward)
