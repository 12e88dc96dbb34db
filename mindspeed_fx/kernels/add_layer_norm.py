"""Residual addition and LayerNorm in one: ``s = x + residual``, ``y = layer_norm(s)``; both are results.

Source: ``npu_add_layer_norm`` of torch_npu; see :mod:`mindspeed_fx.kernels.layer_norm` for the norm itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_fx.compat.placements import REPLICATED
from mindspeed_fx.cost.operators import once
from mindspeed_fx.kernels import triton
from mindspeed_fx.kernels.base import LIBRARY, operator
from mindspeed_fx.kernels.layer_norm import (
    fake_backward,
    layer_norm,
    layer_norm_aten,
    layer_norm_aten_backward,
    layer_norm_backward,
    pays,
    supports,
    supports_backward,
    ways_backward,
)


def _fake(x, residual, weight, bias, eps):
    s = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    y, mean, rstd = torch.ops.mindspeed.layer_norm(s, weight, bias, eps)
    return y, s, mean, rstd


@operator(
    "add_layer_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor, "
    "Tensor)",
    _fake,
    tags=("norm",),
)
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """LayerNorm of a sum.

    Args:
        x, residual: [..., hidden], float, same shape and dtype.
        weight, bias: [hidden] or None.
        eps: added to the variance.

    Returns:
        y [..., hidden], x + residual [..., hidden], both contiguous; mean and rstd [..., 1] in float32 (float64 for
        float64).
    """
    return _sum_first(layer_norm.reference, x, residual, weight, bias, eps)


def _sum_first(norm, x, residual, *parameters):
    s = (x + residual).contiguous()
    y, mean, rstd = norm(s, *parameters)
    return y, s, mean, rstd


def _fake_backward(grad, grad_sum, *rest):
    return fake_backward(grad, *rest)


@operator(
    "add_layer_norm_backward(Tensor grad, Tensor? grad_sum, Tensor s, Tensor? weight, Tensor mean, Tensor rstd, bool "
    "need_weight, bool need_bias)"
    " -> (Tensor, Tensor, Tensor)",
    _fake_backward,
)
def add_layer_norm_backward(grad, grad_sum, *rest):
    """Gradient of both summands, with ``grad_sum`` that of the sum where it is used elsewhere, and of weight and bias,
    which are empty unless needed."""
    return _plus_sum(layer_norm_backward.reference, grad, grad_sum, *rest)


def _plus_sum(backward, grad, grad_sum, *rest):
    ds, dweight, dbias = backward(grad, *rest)
    return ds if grad_sum is None else (ds + grad_sum).contiguous(), dweight, dbias


def _setup(ctx, inputs, output):
    weight, bias = inputs[2:4]
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(output[1], weight, *output[2:])
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, grad_sum, _grad_mean, _grad_rstd):
    s, weight, mean, rstd = ctx.saved_tensors
    need_weight, need_bias = (need and grad is not None for need in ctx.needs_input_grad[2:4])
    if grad is None:
        ds = grad_sum
    else:
        ds, dweight, dbias = torch.ops.mindspeed.add_layer_norm_backward(
            grad, grad_sum, s, weight, mean, rstd, need_weight, need_bias
        )
    return (
        *(ds if n else None for n in ctx.needs_input_grad[:2]),
        dweight if need_weight else None,
        dbias.to(ctx.bias_dtype) if need_bias else None,
        None,
    )


torch.library.register_autograd("mindspeed::add_layer_norm", _backward, setup_context=_setup, lib=LIBRARY)


@add_layer_norm.shard
def _sharding_rule(x, *rest):
    return [([d, d, d, d], [d, d, REPLICATED, REPLICATED]) for d in range(x.ndim - 1)]


@add_layer_norm_backward.shard
def _sharding_rule_backward(grad, grad_sum, *rest):
    return [(results, [inputs[0], *inputs]) for results, inputs in ways_backward(grad, *rest)]


@add_layer_norm.costs
def _cost(out, x, residual, weight, bias, eps):
    return once(out, x, residual, weight, bias, vector=9 * x.numel)


@add_layer_norm_backward.costs
def _backward_cost(out, grad, grad_sum, s, weight, mean, rstd, need_weight, need_bias):
    return once(out, grad, grad_sum, s, weight, mean, rstd, vector=(12 + 2 * need_weight + need_bias) * s.numel)


# On cpu the additions are left to generated code, which joins them with their neighbours.


def _cpu(*args):
    return _sum_first(layer_norm_aten.overload, *args)


def _cpu_backward(*args):
    return _plus_sum(layer_norm_aten_backward.overload, *args)


for _where, _good in ((True, lambda x: pays(x)), (False, lambda x: None)):
    add_layer_norm.lower("cpu")(
        "sum, then aten",
        lambda x, residual, weight, bias, eps, good=_good: good(x) or supports(x, weight, bias),
        beats_codegen=_where,
    )(_cpu)
    add_layer_norm_backward.lower("cpu")(
        "aten, then sum",
        lambda grad, grad_sum, *rest, good=_good: good(rest[0]) or supports_backward(*rest),
        beats_codegen=_where,
    )(_cpu_backward)


triton.kernel(
    add_layer_norm,
    _fake,
    "add_layer_norm.forward",
    "one read of a row",
    lambda x, residual, weight, bias, eps: triton.refuse(x.shape[-1], x=x, residual=residual, weight=weight, bias=bias),
    beats_codegen=False,
)
triton.kernel(
    add_layer_norm_backward,
    _fake_backward,
    "add_layer_norm.backward",
    "all gradients in one read of a row",
    lambda grad, grad_sum, s, weight, *rest: triton.refuse(
        s.shape[-1], grad=grad, grad_sum=grad_sum, s=s, weight=weight
    ),
    beats_codegen=lambda grad, *rest: triton.small(grad),
)
