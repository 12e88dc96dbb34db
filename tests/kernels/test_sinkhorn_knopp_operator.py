"""Sinkhorn's algorithm on many small matrices against the divisions written out, in values and gradients."""

import pytest
import torch

import mindspeed_fx.kernels  # noqa: F401

ops = torch.ops.mindspeed


def written_out(x, iterations, eps):
    x = x.softmax(-1) + eps
    for turn in range(2 * iterations - 1):
        x = x / (x.sum(-2 if turn % 2 == 0 else -1, keepdim=True) + eps)
    return x


@pytest.mark.parametrize("iterations, eps", [(1, 1e-6), (2, 0.1), (20, 1e-6)])
@pytest.mark.parametrize("shape", [(4, 4), (2, 5, 3, 3), (7, 1, 1), (0, 4, 4)])
def test_is_divisions_in_turn(shape, iterations, eps):
    torch.manual_seed(0)
    x = (2 * torch.randn(shape, dtype=torch.float64)).requires_grad_()
    weights = torch.randn(shape, dtype=torch.float64)
    found, expected = ops.sinkhorn_knopp(x, iterations, eps), written_out(x, iterations, eps)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    gradients = (torch.autograd.grad((y * weights).sum(), x)[0] for y in (found, expected))
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


def test_strides_of_any_kind():
    x = torch.randn(4, 3, 4, dtype=torch.float64).permute(1, 2, 0)
    assert not x.is_contiguous() and ops.sinkhorn_knopp(x, 3, 1e-6).is_contiguous()
    torch.testing.assert_close(ops.sinkhorn_knopp(x, 3, 1e-6), written_out(x, 3, 1e-6))
    for given in (x, x[:1], x[:, :1, :1]):
        grad = torch.randn_like(given)
        kept = grad.clone(), given.clone()
        ops.sinkhorn_knopp_backward(grad, given, 3, 1e-6)
        assert torch.equal(grad, kept[0]) and torch.equal(given, kept[1])  # nothing of the caller's is written


def test_computes_in_float32():
    x = torch.randn(64, 4, 4).bfloat16().requires_grad_()
    wide = x.detach().double().requires_grad_()
    weights = torch.randn(64, 4, 4)
    pairs = []
    for y, leaf in ((ops.sinkhorn_knopp(x, 20, 1e-6), x), (written_out(wide, 20, 1e-6), wide)):
        pairs.append((y, *torch.autograd.grad((y * weights).sum(), leaf)))
    for found, expected in zip(*pairs):
        assert found.dtype == torch.bfloat16
        assert (found.double() - expected).abs().max() <= 2**-7 * expected.abs().max()


@pytest.mark.parametrize("shape, iterations, words", [((3, 4), 2, "square matrices"), ((4, 4), 0, "at least 1")])
def test_what_does_not_fit_is_refused(shape, iterations, words):
    with pytest.raises(ValueError, match=words):
        ops.sinkhorn_knopp(torch.randn(shape), iterations, 1e-6)
