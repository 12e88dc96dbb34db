"""Losses that Megatron attaches to hidden states, so that the backward gives them a gradient of a scale of their own:
those of a router, and those of multi-token prediction.

The scale is set between forward and backward, in a class: an operator reads it when the backward runs.
"""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor

ROUTER = "transformer.moe.moe_utils:MoEAuxLossAutoScaler"
AHEAD = "transformer.multi_token_prediction:MTPLossAutoScaler"


def _scaler(owner: str) -> Any:
    from megatron.core.transformer import multi_token_prediction
    from megatron.core.transformer.moe import moe_utils

    return moe_utils.MoEAuxLossAutoScaler if owner == ROUTER else multi_token_prediction.MTPLossAutoScaler


@torch.library.custom_op("mindspeed::aux_loss_gradient", mutates_args=())
def aux_loss_gradient(grad: Tensor, aux_loss: Tensor, owner: str) -> Tensor:
    """Megatron's scale of the loss, which it sets between forward and backward; ``grad`` only says when.

    Returns:
        It in the type of the loss, to which autograd brings what Megatron's own backward gives: a scale in float32.
    """
    scale = _scaler(owner).main_loss_backward_scale
    ones = torch.ones_like(aux_loss)
    return ones if scale is None else ones * torch.as_tensor(scale, dtype=ones.dtype, device=ones.device)


@aux_loss_gradient.register_fake
def _(grad: Tensor, aux_loss: Tensor, owner: str) -> Tensor:
    return torch.empty_like(aux_loss)


def backward_of(owner: str) -> Callable:
    """``owner.backward``."""

    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        (aux_loss,) = ctx.saved_tensors
        return grad_output, aux_loss_gradient(grad_output, aux_loss, owner)

    return backward
