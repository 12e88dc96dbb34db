"""Gated units and norms of 16-bit tensors: computed in float32, rounded once; gradients of the types of inputs."""

import pytest
import torch

import mindspeed_fx.backend  # noqa: F401  registers the operators

ops = torch.ops.mindspeed


def inputs():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(64, 32, generator=generator).bfloat16() for _ in range(3)]


def test_a_gate_is_rounded_once():
    _, x, up = inputs()
    once = (torch.relu(x.float()) * up.float()).bfloat16()
    assert torch.equal(ops.glu(x, up, "relu"), once)
    once = (x.float() * torch.sigmoid(x.float()) * up.float()).bfloat16()
    assert torch.equal(ops.swiglu(x, up), once)
    once = (torch.sigmoid(x.float()) * up.float()).bfloat16()
    assert torch.equal(ops.glu(x, up, "sigmoid"), once)
    gate = x.float().clamp(max=1.5)
    once = (gate * torch.sigmoid(1.702 * gate) * (up.float().clamp(-1.5, 1.5) + 1)).bfloat16()
    assert torch.equal(ops.clipped_swiglu(x, up, 1.702, 1.5, 1.0, False), once)


@pytest.mark.parametrize("up_dtype", [torch.bfloat16, torch.float32])
def test_gradients_have_the_types_of_their_inputs(up_dtype):
    grad, x, up = inputs()
    for dx, dup in (
        ops.swiglu_backward(grad, x, up.to(up_dtype)),
        ops.glu_backward(grad, x, up.to(up_dtype), "sigmoid"),
    ):
        assert dx.dtype == x.dtype and dup.dtype == up_dtype


def test_a_norm_is_computed_in_float32():
    x = inputs()[0]
    wide = x.float()
    y, rstd = ops.rms_norm(x, None, 1e-6, True)
    torch.testing.assert_close(rstd, torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6), rtol=1e-6, atol=0)
    assert torch.equal(y, (wide * rstd).bfloat16())


def test_gradients_of_what_lies_in_another_order_are_contiguous():
    grad, x, up = (torch.randn(4, 3, 8).transpose(0, 1) for _ in range(3))
    results = ops.weighted_swiglu_backward(grad, x, up, torch.randn(3, 4, 1))
    assert [r.stride() for r in results] == [(32, 8, 1), (32, 8, 1), (4, 1, 1)]


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_packed_gradient_has_the_type_of_the_pack(interleaved):
    grad, x, _ = inputs()
    dx, _ = ops.clipped_swiglu_backward(grad[:, :16], x, None, 1.702, 1.5, 1.0, interleaved)
    assert dx.dtype == x.dtype and dx.shape == x.shape
