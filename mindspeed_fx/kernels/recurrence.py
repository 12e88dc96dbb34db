"""What operators share that go through a sequence with a state: their shapes named, and their gradient, which begins at
the states that the forward kept.

Such an operator is (tensors..., settings...) -> (out, the state at the end, states before each span); its gradient's
operator, of the same name with "_backward" behind, is (grad, gradient of the last state, states, tensors...,
settings...) -> the gradients of the tensors.
"""

from __future__ import annotations

from typing import Any, Sequence

import torch
from torch import Tensor

from mindspeed_fx.compat import symbols
from mindspeed_fx.kernels.base import LIBRARY, accumulation_dtype


def computed_in(*tensors: Tensor | None) -> torch.dtype:
    """The type that is computed in: float32, or float64 where an argument has it."""
    dtypes = {accumulation_dtype(x.dtype) for x in tensors if x is not None}
    return torch.float64 if torch.float64 in dtypes else torch.float32


def like_bsnd(x: Tensor) -> Tensor:
    """Empty, shaped as x [batch, heads, seq, ...] and stored as [batch, seq, heads, ...]."""
    return torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


def rows_of_tokens(x: Tensor) -> Tensor:
    """x [batch, heads, seq, width] with adjacent elements in a row, as kernels read it: a copy of what a convolution
    leaves with the sequence last."""
    return x if symbols.statically_known_true(x.stride(3) == 1) else like_bsnd(x).copy_(x)


def check_shapes(name: str, wanted: dict[str, tuple[Tensor | None, Sequence[int]]]) -> None:
    """Raises ValueError for the first argument of operator ``name`` that is there and has another shape."""
    for argument, (x, shape) in wanted.items():
        torch._check_value(
            x is None or tuple(x.shape) == tuple(shape),
            lambda: f"{name}: {argument} is {list(x.shape)}; valid: {list(shape)}",  # noqa: B023
        )


def register_gradient(name: str, tensors: int) -> None:
    """The gradient of operator ``name``, whose first ``tensors`` arguments have one each."""
    backward = getattr(torch.ops.mindspeed, f"{name}_backward")

    def setup(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.settings, ctx.like = inputs[tensors:], (output[0].shape, output[0].dtype)
        ctx.save_for_backward(output[2], *inputs[:tensors])
        ctx.mark_non_differentiable(output[2])
        ctx.set_materialize_grads(False)

    def gradient(ctx: Any, grad: Any, grad_state: Any, _: Any) -> tuple:
        settings = (None,) * len(ctx.settings)
        if grad is None and grad_state is None:
            return *(None,) * tensors, *settings
        starts, *saved = ctx.saved_tensors
        if grad is None:
            shape, dtype = ctx.like
            grad = starts.new_zeros(shape, dtype=dtype)
        grads = backward(grad, grad_state, starts, *saved, *ctx.settings)
        return *(x if need else None for x, need in zip(grads, ctx.needs_input_grad)), *settings

    torch.library.register_autograd(f"mindspeed::{name}", gradient, setup_context=setup, lib=LIBRARY)
