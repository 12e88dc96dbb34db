"""Losses that Megatron attaches to hidden states: the gradient that an operator gives them in a graph."""

import pytest
import torch

from mindspeed_fx.megatron import attached_losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [None, torch.tensor(0.25), 0.25])
def test_a_scale_comes_in_the_type_of_the_loss(monkeypatch, dtype, scale):
    """A router's z-loss is of the logits' type, Megatron's scale float32: the graph was told the former and got the
    latter, on which its next product failed."""
    scaler = attached_losses._scaler(attached_losses.ROUTER)
    monkeypatch.setattr(scaler, "main_loss_backward_scale", scale)
    arguments = torch.ones(3, dtype=dtype), torch.tensor(2.0, dtype=dtype), attached_losses.ROUTER
    gradient = attached_losses.aux_loss_gradient(*arguments)
    assert gradient.dtype == dtype and gradient.item() == (1.0 if scale is None else 0.25)
    torch.library.opcheck(attached_losses.aux_loss_gradient, arguments)
