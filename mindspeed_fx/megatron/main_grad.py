"""Linear whose weight gradient is added to ``main_grad``: Megatron's ``gradient_accumulation_fusion``, in a graph.

Megatron's function writes to an attribute of the weight in its backward, through an extension for CUDA (Apex). Here
``main_grad`` is an argument that the backward changes in place, which AOTAutograd keeps as a write to an input of the
graph: no gradient of the size of the weight lives beside the buffer, and the sum over micro-batches is as wide as the
buffer, float32 as a rule.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_fx.cost.operators import Cost, product, size
from mindspeed_fx.kernels.base import adopt
from mindspeed_fx.training import gradient_ready


@torch.library.custom_op("mindspeed::linear_main_grad", mutates_args=())
def linear_main_grad(x: Tensor, weight: Tensor, main_grad: Tensor, dummy: bool, key: int) -> Tensor:
    """x weight^T, whose backward adds the weight's gradient to ``main_grad``.

    Args:
        x: [..., in], float.
        weight: [out, in], of the same type.
        main_grad: [out, in], float of any width.
        dummy: give autograd a gradient of zeros for the weight, without which hooks on it would not run; else none.
        key: of the weight in :mod:`mindspeed_fx.training.gradient_ready`, which is told when ``main_grad`` has the
            gradient; -1: nobody is told.

    Returns:
        [..., out].
    """
    # F.linear rounds otherwise where no operand requires a gradient, and which do changes between calls of one graph.
    out = x.reshape(-1, x.shape[-1]) @ weight.t()
    # No view: autograd refuses to change one from inside a function in place, as Megatron adds biases of experts.
    return torch.ops.aten._unsafe_view(out, (*x.shape[:-1], weight.shape[0]))


@linear_main_grad.register_fake
def _(x: Tensor, weight: Tensor, main_grad: Tensor, dummy: bool, key: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@torch.library.custom_op("mindspeed::add_to_main_grad", mutates_args={"main_grad"})
def add_to_main_grad(main_grad: Tensor, grad: Tensor, x: Tensor, key: int) -> None:
    """main_grad += grad^T x, multiplied and summed in the type of ``main_grad`` [out, in]; grad [tokens, out], x
    [tokens, in]. ``key``: as of :func:`linear_main_grad`.
    """
    main_grad.addmm_(grad.t().to(main_grad.dtype), x.to(main_grad.dtype))
    gradient_ready.announce(key)


@add_to_main_grad.register_fake
def _(main_grad: Tensor, grad: Tensor, x: Tensor, key: int) -> None:
    return None


def _setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weight, main_grad, ctx.dummy, ctx.key = inputs
    ctx.save_for_backward(x, weight)
    # Not saved: autograd would refuse the change that the backward before made to it (tied weights, micro-batches).
    ctx.main_grad = main_grad


def _backward(ctx: Any, grad: Tensor) -> tuple:
    x, weight = ctx.saved_tensors
    rows = grad.reshape(-1, grad.shape[-1])
    if ctx.needs_input_grad[1]:
        add_to_main_grad(ctx.main_grad, rows, x.reshape(-1, x.shape[-1]), ctx.key)
    zeros = torch.zeros_like(weight) if ctx.dummy and ctx.needs_input_grad[1] else None
    return (rows @ weight).view(x.shape) if ctx.needs_input_grad[0] else None, zeros, None, None, None


linear_main_grad.register_autograd(_backward, setup_context=_setup)


product_of = adopt(torch.ops.mindspeed.linear_main_grad.default, linear_main_grad)
added = adopt(torch.ops.mindspeed.add_to_main_grad.default, add_to_main_grad)


@product_of.costs
def _cost(out: Any, x: Any, weight: Any, main_grad: Any, dummy: bool, key: int) -> Cost:
    return product(out, weight.shape[1], x, weight)


@added.costs
def _add_cost(out: Any, main_grad: Any, grad: Any, x: Any, key: int) -> Cost:
    """The buffer is read and written; the product is done in its type."""
    flops = 2 * main_grad.numel * grad.shape[0]
    return Cost(flops, flops, 0, size(main_grad, grad, x), main_grad.bytes, main_grad.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x weight^T + bias``; the weight's gradient goes to ``weight.main_grad``.

    Raises:
        RuntimeError: the weight has no ``main_grad``.
    """
    if not adds_to_main_grad(True, [weight]):
        return torch.nn.functional.linear(x, weight, bias)
    key = gradient_ready.key_of(weight)
    out = linear_main_grad(x, weight, weight.main_grad, needs_dummy(weight, key), key)
    return out if bias is None else out + bias


def adds_to_main_grad(gradient_accumulation_fusion: bool, weights: list[Tensor]) -> bool:
    """Whether gradients of ``weights`` are made now and go to ``main_grad``.

    Raises:
        RuntimeError: a weight has none.
    """
    if not gradient_accumulation_fusion or not torch.is_grad_enabled() or not all(w.requires_grad for w in weights):
        return False
    if not all(hasattr(w, "main_grad") for w in weights):
        raise RuntimeError(
            "gradient_accumulation_fusion is True and a weight has no main_grad; wrap the model in "
            "DistributedDataParallel or give every weight one"
        )
    return True


def needs_dummy(weight: Tensor, key: int) -> bool:
    """Megatron's DistributedDataParallel waits for a gradient in a hook, if it is not told; zeros do no harm."""
    return key < 0 and hasattr(weight, "grad_added_to_main_grad")
