"""A step of AdamW on flat buffers, by torch's operators, is torch's optimizer's; the kernel is in test_triton.py."""

import pytest
import torch

from mindspeed_fx.kernels.adamw import adamw_, unable


def test_steps_are_torchs():
    weight, settings = (
        torch.randn(100, dtype=torch.float64),
        {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1},
    )
    want = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.AdamW([want], **settings)
    m, v, copy = torch.zeros_like(weight), torch.zeros_like(weight), torch.empty(100, dtype=torch.bfloat16)
    for step in range(1, 5):
        want.grad = torch.randn(100, dtype=torch.float64)
        adamw_(weight, 2 * want.grad, m, v, copy, step=step, grad_scale=0.5, **settings)
        optimizer.step()
    torch.testing.assert_close(weight, want.detach(), rtol=1e-12, atol=1e-12)
    assert torch.equal(copy, weight.bfloat16())


def test_a_gradient_of_16_bits_is_read_in_the_weights_type():
    weight, grad = torch.randn(100), torch.randn(100).bfloat16()
    results = []
    for g in (grad, grad.float()):
        w, m, v = weight.clone(), torch.zeros(100), torch.zeros(100)
        adamw_(w, g, m, v, step=1, lr=0.1, grad_scale=1 / 3)
        results.append((w, m, v))
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_what_is_refused():
    x = torch.zeros(8)
    with pytest.raises(ValueError, match=r"grad is \[4\] with strides \[1\]; valid: \[8\], contiguous"):
        adamw_(x, x[:4], x, x, step=1, lr=0.1)
    with pytest.raises(ValueError, match="step is 0; valid: from 1"):
        adamw_(x, x, x, x, step=0, lr=0.1)
    assert (
        unable(x, x, x.double(), x, None) == "exp_avg is float64"
        and unable(x, x, x, x, None) == "the tensors are on cpu"
    )
