"""A rank's part of a DTensor, with its gradient: part of :mod:`mindspeed_fx.compat`."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, _api, _redistribute


def part_of(x: DTensor) -> torch.Tensor:
    """``x.to_local()``. Before torch 2.12 that gives a parameter that nothing reads zeros for a gradient, with which an
    optimizer decays its weight."""
    return x.to_local() if _leaves_no_gradient() else _Part.apply(x)


@functools.cache
def _leaves_no_gradient() -> bool:
    own = getattr(_api, "_ToTorchTensor", None)
    return own is None or "set_materialize_grads" in own.forward.__code__.co_names


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.mesh, ctx.shape, ctx.stride = x.device_mesh, x.shape, x.stride()
        ctx.placements = [Replicate() if p.is_partial() else p for p in x.placements]
        return x._local_tensor.view_as(x._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> DTensor | None:
        if grad is None:
            return None
        return DTensor.from_local(grad, ctx.mesh, ctx.placements, run_check=False, shape=ctx.shape, stride=ctx.stride)


def leave_missing_gradients() -> None:
    """``DTensor.redistribute`` (2.11 to 2.13) takes the zeros that autograd puts in the place of a missing gradient for
    a DTensor, and fails: a gradient that is missing stays so from here on."""
    own = _redistribute.Redistribute
    if getattr(own, "_leaves_missing", False):
        return
    forward, backward = own.forward, own.backward

    def forward_without_zeros(ctx: Any, *args: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.arguments = len(args)
        return forward(ctx, *args)

    def backward_of_some(ctx: Any, grad: Any) -> Any:
        return (None,) * ctx.arguments if grad is None else backward(ctx, grad)

    own.forward, own.backward = staticmethod(forward_without_zeros), staticmethod(backward_of_some)
    own._leaves_missing = True  # type: ignore[attr-defined]
