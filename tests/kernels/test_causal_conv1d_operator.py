"""Causal depthwise convolution against torch's own, in values and gradients."""

import pytest
import torch
import torch.nn.functional as F

import mindspeed_fx.kernels  # noqa: F401

ops = torch.ops.mindspeed


def by_torch(x, weight, bias, silu):
    y = F.conv1d(x, weight[:, None], bias, padding=weight.shape[1] - 1, groups=x.shape[1])[..., : x.shape[2]]
    return F.silu(y) if silu else y


def arguments(batch, channels, size, seq, bias=True, last=False, dtype=torch.float64):
    torch.manual_seed(0)
    x = torch.randn(batch, channels, seq, dtype=dtype)
    x = torch.randn(batch, seq, channels + 2, dtype=dtype)[..., 1:-1].transpose(1, 2) if last else x
    weight = torch.randn(channels, size, dtype=dtype, requires_grad=True)
    return x.requires_grad_(), weight, torch.randn(channels, dtype=dtype, requires_grad=True) if bias else None


def both(args, silu):
    for f in (ops.causal_conv1d, by_torch):
        out = f(*args, silu)
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        yield out, *torch.autograd.grad((out * weights).sum(), [x for x in args if x is not None])


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("shape", [(2, 5, 4, 11), (1, 3, 3, 2, False, True), (2, 4, 1, 7, True, True), (1, 2, 4, 1)])
def test_is_a_convolution(shape, silu):
    args = arguments(*shape)
    (out, *have), (want, *grads) = both(args, silu)
    assert (out.stride(1) == 1) == (shape[-1] is True or shape[3] == 1)
    for h, w in zip((out, *have), (want, *grads), strict=True):
        torch.testing.assert_close(h, w, rtol=1e-12, atol=1e-12)


def test_gradient_by_finite_differences():
    assert torch.autograd.gradcheck(lambda *a: ops.causal_conv1d(*a, True), arguments(2, 2, 3, 5))


@pytest.mark.parametrize("last", [False, True])
def test_rules_of_custom_operators(last):
    args = arguments(2, 4, 3, 7, last=last)
    results = torch.library.opcheck(ops.causal_conv1d.default, (*args, True), raise_exception=False)
    assert set(results.values()) == {"SUCCESS"}, results


def test_computes_in_float32():
    args = [x.detach().bfloat16().requires_grad_() for x in arguments(1, 6, 4, 150)]
    wide = [x.detach().double().requires_grad_() for x in args]
    out, want = ops.causal_conv1d(*args, True), by_torch(*wide, True)
    have = torch.autograd.grad(out.sum(), args)
    for h, w in zip((out, *have), (want, *torch.autograd.grad(want.sum(), wide)), strict=True):
        assert h.dtype == torch.bfloat16
        assert (h.double() - w).abs().max() <= 2**-8 * w.abs().max()


@pytest.mark.parametrize(
    "weight, bias, message",
    [
        ((4, 3), None, r"weight is \[4, 3\] and x \[1, 5, 7\]; valid: \[channels, k\] and \[batch, channels, seq\]"),
        ((5, 0), None, r"weight is \[5, 0\]"),
        ((5, 3), (4,), r"bias is \[4\]; valid: \[5\]"),
    ],
)
def test_what_does_not_fit_is_refused(weight, bias, message):
    with pytest.raises(ValueError, match=message):
        ops.causal_conv1d(torch.rand(1, 5, 7), torch.rand(weight), bias if bias is None else torch.rand(bias), True)


@pytest.mark.parametrize("silu", [False, True])
def test_cost_is_a_product_and_a_sum_for_each_weight(silu):
    from mindspeed_fx.cost.operators import SPECIAL, spec
    from mindspeed_fx.kernels.causal_conv1d import causal_conv1d, causal_conv1d_backward

    x, weight, bias = (spec(a.detach()) for a in arguments(2, 6, 4, 9))
    forward = causal_conv1d.cost(x, x, weight, bias, silu)
    backward = causal_conv1d_backward.cost((x, weight, bias), x, x, weight, bias, silu)
    elements = 2 * 6 * 9
    assert forward.vector == elements * (8 + (SPECIAL if silu else 0))
    assert backward.vector == elements * (2 * 8 + (8 + SPECIAL + 6 if silu else 0))
