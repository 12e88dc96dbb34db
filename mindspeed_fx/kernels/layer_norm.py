"""LayerNorm over the last dimension: ``y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias``.

Source: Ba, Kiros and Hinton 2016, "Layer Normalization"; ``aten.native_layer_norm``, whose results these are, but with
the statistics kept in float32 for 16-bit inputs on every target; ``npu_add_layer_norm`` of torch_npu has the same
formula.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_fx.compat.placements import PARTIAL, REPLICATED
from mindspeed_fx.compat.symbols import statically_known_true
from mindspeed_fx.cost.operators import once
from mindspeed_fx.kernels import triton
from mindspeed_fx.kernels.base import LIBRARY, accumulation_dtype, as_rows, operator

SCHEMA = "(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)"
BACKWARD = (
    "(Tensor grad, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, bool need_weight, bool need_bias) -> "
    "(Tensor, Tensor, Tensor)"
)


def fake(x, weight, bias, eps):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return y, *(x.new_empty((*x.shape[:-1], 1), dtype=accumulation_dtype(x.dtype)) for _ in range(2))


@operator(f"layer_norm{SCHEMA}", fake, tags=("norm",))
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """LayerNorm.

    Args:
        x: [..., hidden], float.
        weight, bias: [hidden] or None, float; read in the type in which the statistics are computed.
        eps: added to the variance.

    Returns:
        y [..., hidden] contiguous in the type of ``x``; mean and rstd [..., 1] in float32 (float64 for float64 inputs).
    """
    wide = x.to(accumulation_dtype(x.dtype))
    mean = wide.mean(-1, keepdim=True)
    centered = wide - mean
    rstd = torch.rsqrt((centered * centered).mean(-1, keepdim=True) + eps)
    y = centered * rstd
    y = y if weight is None else y * weight.to(wide.dtype)
    y = y if bias is None else y + bias.to(wide.dtype)
    return y.to(x.dtype).contiguous(), mean, rstd


def fake_backward(grad, x, weight, mean, rstd, need_weight, need_bias):
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return (
        dx,
        torch.empty_like(weight) if need_weight else x.new_empty(0),
        x.new_empty(x.shape[-1:] if need_bias else 0, dtype=rstd.dtype),
    )


@operator(f"layer_norm_backward{BACKWARD}", fake_backward)
def layer_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, need_weight: bool, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dx, dweight, dbias) of :func:`layer_norm`; the last two are empty unless needed, dbias has the type of
    ``rstd``.

    With n = (x - mean) * rstd and h = grad * weight: dx = rstd * (h - mean(h) - n * mean(h * n)), dweight = sum over
    rows of grad * n, dbias = sum over rows of grad.
    """
    normal, grad = (x.to(rstd.dtype) - mean) * rstd, grad.to(rstd.dtype)
    h = grad if weight is None else grad * weight.to(rstd.dtype)
    dx = rstd * (h - h.mean(-1, keepdim=True) - normal * (h * normal).mean(-1, keepdim=True))
    dweight, dbias = x.new_empty(0), rstd.new_empty(0)
    if need_weight:
        dweight = as_rows(grad * normal).sum(0).to(weight.dtype)
    if need_bias:
        dbias = as_rows(grad).sum(0)
    return dx.to(x.dtype).contiguous(), dweight, dbias


def _setup(ctx, inputs, output):
    x, weight, bias, _ = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(x, weight, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, _grad_mean, _grad_rstd):
    if grad is None:
        return (None,) * 4
    x, weight, mean, rstd = ctx.saved_tensors
    need_weight, need_bias = ctx.needs_input_grad[1:3]
    dx, dweight, dbias = torch.ops.mindspeed.layer_norm_backward(grad, x, weight, mean, rstd, need_weight, need_bias)
    return (
        dx if ctx.needs_input_grad[0] else None,
        dweight if need_weight else None,
        dbias.to(ctx.bias_dtype) if need_bias else None,
        None,
    )


torch.library.register_autograd("mindspeed::layer_norm", _backward, setup_context=_setup, lib=LIBRARY)


def _sharding_rule(x, *rest):
    return [([d, d, d], [d, REPLICATED, REPLICATED]) for d in range(x.ndim - 1)]


def ways_backward(grad, x, weight, mean, rstd, *need):
    return [([d, *(PARTIAL if n else REPLICATED for n in need)], [d, d, REPLICATED, d, d]) for d in range(x.ndim - 1)]


layer_norm.shard(_sharding_rule)
layer_norm_backward.shard(ways_backward)


@layer_norm.costs
def _cost(out, x, weight, bias, eps):
    return once(out, x, weight, bias, vector=8 * x.numel)


@layer_norm_backward.costs
def _backward_cost(out, grad, x, weight, mean, rstd, need_weight, need_bias):
    return once(out, grad, x, weight, mean, rstd, vector=(11 + 2 * need_weight + need_bias) * x.numel)


# --------------------------------------------------------------------------- cpu: ATen's kernels, each one call


def _parameters(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """As ATen's kernel takes them: for 16-bit inputs both in float32, for only then its statistics are float32 too."""
    wide = accumulation_dtype(x.dtype)
    if wide != x.dtype:
        weight = x.new_ones(x.shape[-1], dtype=wide) if weight is None else weight
        bias = x.new_zeros(x.shape[-1], dtype=wide) if bias is None else bias
    return (*(p if p is None else p.to(wide).contiguous() for p in (weight, bias)),)


@operator(f"layer_norm_aten{SCHEMA}", fake, opaque=True, tags=("norm",))
def layer_norm_aten(x, weight, bias, eps):
    """:func:`layer_norm` by ``aten.native_layer_norm``."""
    return torch.native_layer_norm(x.contiguous(), x.shape[-1:], *_parameters(x, weight, bias), eps)


@operator(f"layer_norm_aten_backward{BACKWARD}", fake_backward, opaque=True)
def layer_norm_aten_backward(grad, x, weight, mean, rstd, need_weight, need_bias):
    """:func:`layer_norm_backward` by ``aten.native_layer_norm_backward``."""
    parameters = _parameters(x, weight, rstd.new_empty(x.shape[-1]) if need_bias else None)
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        grad.contiguous(), x.contiguous(), x.shape[-1:], mean, rstd, *parameters, [True, need_weight, need_bias]
    )
    return dx, dweight.to(weight.dtype) if need_weight else x.new_empty(0), dbias if need_bias else rstd.new_empty(0)


layer_norm_aten.shard(_sharding_rule)
layer_norm_aten_backward.shard(ways_backward)


layer_norm_aten.costs(_cost)
layer_norm_aten_backward.costs(_backward_cost)


def supports(x: Tensor, *args: Tensor | None) -> str | None:
    """Why ATen's kernel cannot take these; None when it can."""
    others = {str(t.dtype).removeprefix("torch.") for t in args if t is not None} - {
        "float64",
        "float32",
        "bfloat16",
        "float16",
    }
    return f"a parameter is {others.pop()}" if others else None


def supports_backward(x, weight, mean, rstd, need_weight, need_bias) -> str | None:
    """:func:`supports`, for the gradients."""
    if x.itemsize == 2 and (need_weight or need_bias):
        return "it adds up the gradients of weight and bias in 16 bits"
    return supports(x, weight)


def pays(x: Tensor) -> str | None:
    """Why generated code is as good, None where ATen's kernel was measured faster: forward and backward together in
    float32 take 0.5 to 0.9 of the time from 512 thousand elements on, in 16 bits 1.0 to 1.05, and a call costs 1.2 to
    1.3 of 16 thousand elements (one core of an x86 server, alone and between a residual addition and a GELU)."""
    if x.itemsize == 2:
        return "generated code is as fast for 16-bit inputs"
    return None if statically_known_true(x.numel() >= PAYS) else f"fewer than {PAYS} elements, or an unknown number"


PAYS = 2**19

for _where, _good in ((True, lambda x: pays(x)), (False, lambda x: None)):
    layer_norm.lower("cpu")(
        "aten, one read of a row",
        lambda x, weight, bias, eps, good=_good: good(x) or supports(x, weight, bias),
        beats_codegen=_where,
    )(layer_norm_aten.overload)
    layer_norm_backward.lower("cpu")(
        "aten, all gradients",
        lambda grad, *rest, good=_good: good(rest[0]) or supports_backward(*rest),
        beats_codegen=_where,
    )(layer_norm_aten_backward.overload)


triton.kernel(
    layer_norm,
    fake,
    "layer_norm.forward",
    "one read of a row",
    lambda x, weight, bias, eps: triton.refuse(x.shape[-1], x=x, weight=weight, bias=bias),
    beats_codegen=lambda x, *rest: triton.small(x),
)
triton.kernel(
    layer_norm_backward, fake_backward, "layer_norm.backward", "all gradients in one read of a row",
    lambda grad, x, weight, *rest: triton.refuse(x.shape[-1], grad=grad, x=x, weight=weight),
    beats_codegen=lambda grad, x, *rest: triton.small(x),
)  # fmt: skip
