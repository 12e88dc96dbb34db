"""RMSNorm of every head and rotary position embedding of the result, as queries and keys go into attention (Qwen3,
Gemma 3).

With n = x / sqrt(mean(x^2) + eps) * weight over a head, the first ``turned`` elements of n, as many as the angles have,
become n * cos + rotate(n) * sin and the others pass. Source: Dehghani et al. 2023, "Scaling Vision Transformers to 22
Billion Parameters" (norms of queries and keys), and the formulas of rms_norm.py and rope.py. Computed in float32 for
16-bit inputs; nothing is rounded between the norm and the rotation.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from mindspeed_fx.compat import fake
from mindspeed_fx.compat.placements import PARTIAL, REPLICATED
from mindspeed_fx.cost.operators import once
from mindspeed_fx.kernels import triton
from mindspeed_fx.kernels.base import LIBRARY, accumulation_dtype, as_rows, operator
from mindspeed_fx.kernels.rope import rotate
from mindspeed_fx.kernels.sharding import along


def result_dtype(x: Tensor, weight: Tensor | None, cos: Tensor, cast_first: bool) -> torch.dtype:
    norm = torch.promote_types(x.dtype, weight.dtype) if weight is not None and cast_first else x.dtype
    return torch.promote_types(norm, cos.dtype)


def _stored_as(y: Tensor, x: Tensor) -> Tensor:
    """``y`` in the order in which the dimensions of ``x`` lie in memory."""
    order = sorted(range(x.dim()), key=lambda d: (-fake.hint(x.stride(d)), d))
    return y.permute(order).contiguous().permute([order.index(d) for d in range(x.dim())])


def _turn(n: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool = False) -> Tensor:
    """The first elements of ``n`` turned, the others as they are; ``back``: the transpose."""
    turned, rest = cos.shape[-1], n.shape[-1] - cos.shape[-1]
    first = n[..., :turned]
    other = -rotate(first * sin, interleaved) if back else rotate(first, interleaved) * sin
    return n * pad(cos, (0, rest), value=1.0) + pad(other, (0, rest)) if rest else n * cos + other


def _fake(x, weight, cos, sin, eps, cast_first, interleaved):
    y = torch.empty_like(x, dtype=result_dtype(x, weight, cos, cast_first))
    return y, x.new_empty((*x.shape[:-1], 1), dtype=accumulation_dtype(x.dtype))


@operator(
    "qk_norm_rope(Tensor x, Tensor? weight, Tensor cos, Tensor sin, float eps, bool cast_first, bool interleaved) -> "
    "(Tensor, Tensor)",
    _fake,
    tags=("cheap",),
)
def qk_norm_rope(
    x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float, cast_first: bool, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """RMSNorm over the last dimension, then a rotation of its first elements.

    Args:
        x: [..., dim], float; any layout of the leading dimensions.
        weight: [dim] or None.
        cos, sin: [..., turned], of one type, without a gradient; broadcast against the leading dimensions of ``x``;
            turned even, at most dim.
        eps: added to the mean square.
        cast_first: the result has the promoted type of ``x``, ``weight`` and ``cos``; else of ``x`` and ``cos``.
        interleaved: layout of the pairs, see :mod:`mindspeed_fx.kernels.rope`.

    Returns:
        y, the shape and memory layout of ``x``, and rstd [..., 1] in float32 (float64 for float64 inputs), contiguous.

    Raises:
        NotImplementedError: the angles need a gradient.
    """
    wide = x.to(accumulation_dtype(x.dtype))
    rstd = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps).contiguous()
    n = wide * rstd if weight is None else wide * rstd * weight.to(wide.dtype)
    y = _turn(n, cos.to(wide.dtype), sin.to(wide.dtype), interleaved)
    return _stored_as(y.to(result_dtype(x, weight, cos, cast_first)), x), rstd


def _fake_backward(grad, x, weight, rstd, cos, sin, interleaved, need_weight):
    return torch.empty_like(x), torch.empty_like(weight) if need_weight else x.new_empty(0)


@operator(
    "qk_norm_rope_backward(Tensor grad, Tensor x, Tensor? weight, Tensor rstd, Tensor cos, Tensor sin, bool "
    "interleaved, bool need_weight) -> (Tensor, Tensor)",
    _fake_backward,
)
def qk_norm_rope_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients (dx, dweight) of :func:`qk_norm_rope`, dx in the layout of ``x``; dweight is empty unless
    ``need_weight``.

    With g the gradient rotated the other way, n = x * rstd and h = g * weight: dx = rstd * (h - n * mean(h * n)),
    dweight = sum over heads of g * n.
    """
    wide, dtype = x.to(rstd.dtype), rstd.dtype
    g, normal = _turn(grad.to(dtype), cos.to(dtype), sin.to(dtype), interleaved, back=True), wide * rstd
    h = g if weight is None else g * weight.to(dtype)
    dx = _stored_as((rstd * (h - normal * (h * normal).mean(-1, keepdim=True))).to(x.dtype), x)
    return dx, as_rows(g * normal).sum(0).to(weight.dtype) if need_weight else x.new_empty(0)


def _setup(ctx, inputs, output):
    x, weight, cos, sin, _, _, ctx.interleaved = inputs
    if ctx.needs_input_grad[2] or ctx.needs_input_grad[3]:
        raise NotImplementedError(
            "mindspeed::qk_norm_rope has no gradient for cos and sin; use mindspeed::rms_norm and mindspeed::rope"
        )
    ctx.save_for_backward(x, weight, output[1], cos, sin)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, _grad_rstd):
    if grad is None:
        return (None,) * 7
    x, weight, rstd, cos, sin = ctx.saved_tensors
    need_weight = weight is not None and ctx.needs_input_grad[1]
    dx, dweight = torch.ops.mindspeed.qk_norm_rope_backward(
        grad, x, weight, rstd, cos, sin, ctx.interleaved, need_weight
    )
    return dx if ctx.needs_input_grad[0] else None, dweight if need_weight else None, *(None,) * 5


torch.library.register_autograd("mindspeed::qk_norm_rope", _backward, setup_context=_setup, lib=LIBRARY)


@qk_norm_rope.costs
def _cost(out, x, weight, cos, sin, eps, cast_first, interleaved):
    return once(out, x, weight, cos, sin, vector=8 * x.numel)


@qk_norm_rope_backward.costs
def _backward_cost(out, grad, x, weight, rstd, cos, sin, interleaved, need_weight):
    return once(out, grad, x, weight, rstd, cos, sin, vector=(14 if need_weight else 12) * x.numel)


@qk_norm_rope.shard
def _sharding_rule(x, weight, cos, sin, eps, cast_first, interleaved):
    return [([d, d], [d, REPLICATED, along(cos, d, x.ndim), along(sin, d, x.ndim)]) for d in range(x.ndim - 1)]


@qk_norm_rope_backward.shard
def _sharding_rule_backward(grad, x, weight, rstd, cos, sin, interleaved, need_weight):
    return [
        (
            [d, PARTIAL if need_weight else REPLICATED],
            [d, d, REPLICATED, d, along(cos, d, x.ndim), along(sin, d, x.ndim)],
        )
        for d in range(x.ndim - 1)
    ]


def _refuse(x, weight, cos, sin, **others):
    if x.shape[-1] > 1024:
        return f"heads of {x.shape[-1]} elements, the kernel takes up to 1024"
    if x.dim() > 4:
        return "more than three leading dimensions"
    if not all(t.stride(-1) == 1 for t in (x, cos, sin, *others.values())):
        return "the last dimension is not contiguous"
    return triton.refuse_types(x.shape[-1], x=x, weight=weight, cos=cos, sin=sin, **others)


triton.kernel(
    qk_norm_rope, _fake, "qk_norm_rope.forward", "norm and rotation in one read of a head",
    lambda x, weight, cos, sin, eps, cast_first, interleaved: _refuse(x, weight, cos, sin),
    beats_codegen=lambda x, *rest: triton.small(x),
)  # fmt: skip
triton.kernel(
    qk_norm_rope_backward, _fake_backward, "qk_norm_rope.backward", "both gradients in one read of a head",
    lambda grad, x, weight, rstd, cos, sin, interleaved, need_weight: _refuse(x, weight, cos, sin, grad=grad),
    beats_codegen=lambda grad, *rest: triton.small(grad),
)  # fmt: skip
