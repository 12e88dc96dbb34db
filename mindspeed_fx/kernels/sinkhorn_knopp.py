"""Sinkhorn's algorithm on many small matrices: rows and columns nearly add up to one.

    S = softmax of rows of x, plus eps;  columns of S over their sums plus eps;  then rows and columns in turn, t - 1
    times.

Source: Sinkhorn and Knopp 1967; the mixing of residual streams in manifold-constrained hyper-connections (mHC; Xie et
al. 2025, arXiv 2512.24880, section 4.2). Matrices lie side by side, so that a step goes over all of them at once. The
backward makes the sums again and takes the divisions back, last first: of y = x / d, d the sum of a row or column of x
and eps, dx = (dy - sum(dy y)) / d.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_fx.cost.operators import SPECIAL, once
from mindspeed_fx.kernels import triton
from mindspeed_fx.kernels.base import LIBRARY, accumulation_dtype, operator


def fake(x, iterations, eps):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@operator("sinkhorn_knopp(Tensor x, int iterations, float eps) -> Tensor", fake, opaque=True)
def sinkhorn_knopp(x: Tensor, iterations: int, eps: float) -> Tensor:
    """Sinkhorn's algorithm.

    Args:
        x: [..., n, n], float.
        iterations: t, at least 1.
        eps: added to every entry after the softmax, and to every sum.

    Returns:
        [..., n, n] contiguous, in the type of x, computed in float32 (float64 for float64).

    Raises:
        ValueError: matrices that are not square, or no iteration.
    """
    check(x, iterations)
    y = _side_by_side(x).softmax(1).add_(eps)
    for turn in range(2 * iterations - 1):
        y /= y.sum(turn % 2, keepdim=True).add_(eps)
    return _back(y, x)


def check(x: Tensor, iterations: int) -> None:
    if x.dim() < 2 or x.shape[-1] != x.shape[-2]:
        raise ValueError(f"sinkhorn_knopp: x is {list(x.shape)}; square matrices [..., n, n] are expected")
    if iterations < 1:
        raise ValueError(f"sinkhorn_knopp: iterations is {iterations}; at least 1 is expected")


def _side_by_side(x: Tensor) -> Tensor:
    """[n, n, matrices] in float32 or float64: rows, columns."""
    n = x.shape[-1]
    return x.reshape(-1, n, n).permute(1, 2, 0).to(accumulation_dtype(x.dtype)).contiguous()


def _back(y: Tensor, x: Tensor) -> Tensor:
    return y.permute(2, 0, 1).reshape(x.shape).to(x.dtype).contiguous()


@operator(
    "sinkhorn_knopp_backward(Tensor grad, Tensor x, int iterations, float eps) -> Tensor",
    lambda grad, x, iterations, eps: fake(x, iterations, eps),
    opaque=True,
)
def sinkhorn_knopp_backward(grad: Tensor, x: Tensor, iterations: int, eps: float) -> Tensor:
    """The gradient of x in :func:`sinkhorn_knopp`, from that of its result [..., n, n]."""
    y, sums = _side_by_side(x).softmax(1).add_(eps), []
    for turn in range(2 * iterations - 1):
        sums.append(y.sum(turn % 2, keepdim=True).add_(eps))
        y /= sums[-1]
    g = _side_by_side(grad.to(x.dtype))
    for turn in reversed(range(2 * iterations - 1)):
        g = (g - (g * y).sum(turn % 2, keepdim=True)).div_(sums[turn])  # the first g may be the caller's
        y *= sums[turn]
    y -= eps
    return _back((g - (g * y).sum(1, keepdim=True)).mul_(y), x)


def _setup(ctx, inputs, output):
    x, ctx.iterations, ctx.eps = inputs
    ctx.save_for_backward(x)


def _backward(ctx, grad):
    (x,) = ctx.saved_tensors
    return torch.ops.mindspeed.sinkhorn_knopp_backward(grad, x, ctx.iterations, ctx.eps), None, None


torch.library.register_autograd("mindspeed::sinkhorn_knopp", _backward, setup_context=_setup, lib=LIBRARY)


@sinkhorn_knopp.costs
def _cost(out, x, iterations, eps):
    return once(out, x, vector=(SPECIAL + 3 + 2 * (2 * iterations - 1)) * x.numel)


@sinkhorn_knopp_backward.costs
def _backward_cost(out, grad, x, iterations, eps):
    return once(out, grad, x, vector=(SPECIAL + 7 + 7 * (2 * iterations - 1)) * x.numel)


@sinkhorn_knopp.shard
def _sharding_rule(x, iterations, eps):
    return [([d], [d]) for d in range(x.ndim - 2)]


@sinkhorn_knopp_backward.shard
def _sharding_rule_backward(grad, x, iterations, eps):
    return [([d], [d, d]) for d in range(x.ndim - 2)]


# --------------------------------------------------------------------------- Triton


def unable(x: Tensor) -> str | None:
    """Why the Triton kernel does not take ``x``, or None."""
    n = x.shape[-1]
    if n not in (2, 4, 8, 16):
        return f"matrices of {n} rows, the kernel takes 2, 4, 8 or 16"
    return triton.refuse_types(n, x=x)


triton.kernel(sinkhorn_knopp, fake, "sinkhorn_knopp.forward", "all turns on chip", lambda x, *settings: unable(x))
triton.kernel(
    sinkhorn_knopp_backward,
    lambda grad, x, iterations, eps: fake(x, iterations, eps),
    "sinkhorn_knopp.backward",
    "all turns on chip, then back",
    lambda grad, x, *settings: unable(x) or triton.refuse_types(1, grad=grad),
)
triton.on_npu(sinkhorn_knopp)
triton.on_npu(sinkhorn_knopp_backward)
