"""Linear layer as one operator: ``y = x weight^T + bias`` over any number of leading dimensions.

``aten.linear`` becomes a product of matrices with flattened rows before DTensor sees it, and rows of a batch whose
sequence is divided are not contiguous in the whole: flattened they have no placement. Here every leading dimension
keeps its own. Sharded graphs use it; it is inlined before code is generated. Source: Shoeybi et al. 2019,
"Megatron-LM", for the column and the row way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_fx.compat.placements import PARTIAL, REPLICATED
from mindspeed_fx.cost.operators import once
from mindspeed_fx.kernels.base import LIBRARY, as_rows, operator


def _fake(x, weight, bias=None):
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@operator("linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor", _fake)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Linear layer.

    Args:
        x: [..., k], float.
        weight: [n, k], the dtype of ``x``.
        bias: [n] or None.

    Returns:
        [..., n], contiguous.
    """
    # F.linear rounds otherwise where no operand requires a gradient, and which do changes between calls of one graph.
    rows = as_rows(x)
    out = rows @ weight.t() if bias is None else torch.addmm(bias, rows, weight.t())
    return out.view(*x.shape[:-1], weight.shape[0])


def _fake_backward(grad, x, weight, needed):
    shapes = (x.shape, weight.shape, weight.shape[:1])
    return tuple(
        torch.empty(s, dtype=x.dtype, device=x.device) if need else x.new_empty(0) for s, need in zip(shapes, needed)
    )


@operator(
    "linear_backward(Tensor grad, Tensor x, Tensor weight, bool[3] needed) -> (Tensor, Tensor, Tensor)", _fake_backward
)
def linear_backward(grad: Tensor, x: Tensor, weight: Tensor, needed: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dx, dweight, dbias) of :func:`linear`, of size 0 where not needed: dx = grad weight, dweight = grad^T
    x over all rows, dbias = the sum of the rows of grad."""
    rows = as_rows(grad)
    dx = (rows @ weight).view(x.shape) if needed[0] else x.new_empty(0)
    dweight = rows.t() @ as_rows(x) if needed[1] else x.new_empty(0)
    return dx, dweight, rows.sum(0) if needed[2] else x.new_empty(0)


def _setup(ctx, inputs, output):
    x, weight, ctx.bias = inputs[0], inputs[1], inputs[2] is not None
    ctx.save_for_backward(x, weight)


def _backward(ctx, grad):
    needed = [*ctx.needs_input_grad[:2], ctx.bias and ctx.needs_input_grad[2]]
    grads = torch.ops.mindspeed.linear_backward(grad, *ctx.saved_tensors, needed)
    return tuple(g if need else None for g, need in zip(grads, needed))


torch.library.register_autograd("mindspeed::linear", _backward, setup_context=_setup, lib=LIBRARY)


@linear.shard
def _sharding_rule(x, weight, bias=None):
    """By row, by column of the result, and by summand; a bias is then one more summand."""
    last = x.ndim - 1
    return [([d], [d, REPLICATED, REPLICATED]) for d in range(last)] + [
        ([last], [REPLICATED, 0, 0]),
        ([PARTIAL], [last, 1, PARTIAL]),
    ]


@linear_backward.shard
def _sharding_rule_backward(grad, x, weight, needed):
    def results(*placements):
        return [p if need else REPLICATED for p, need in zip(placements, needed)]

    last = x.ndim - 1
    matches = [(results(d, PARTIAL, PARTIAL), [d, d, REPLICATED]) for d in range(last)]
    return matches + [
        (results(PARTIAL, 0, 0), [last, REPLICATED, 0]),
        (results(last, 1, REPLICATED), [REPLICATED, last, 1]),
    ]


@linear.costs
def _cost(out, x, weight, bias=None):
    return once(
        out,
        x,
        weight,
        bias,
        flops=2 * x.numel * weight.shape[0],
        vector=out.numel if bias is not None else 0,
        dtype=x.dtype,
    )


@linear_backward.costs
def _backward_cost(out, grad, x, weight, needed):
    """Each gradient is a product of its own, that reads the gradient of the result and the other operand."""
    to_x, to_weight, to_bias = (int(n) for n in needed)
    flops = 2 * (to_x + to_weight) * x.numel * weight.shape[0]
    read = [grad] + [weight] * to_x + [x] * to_weight
    return once(out, *read, flops=flops, vector=to_bias * grad.numel, dtype=grad.dtype)
