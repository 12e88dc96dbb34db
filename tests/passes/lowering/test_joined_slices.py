"""Gradients of parts of a tensor are one concatenation on npu, and stay sums where parts overlap."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from mindspeed_fx.options import Options
from mindspeed_fx.passes.base import Context
from mindspeed_fx.passes.lowering.joined_slices import joined_slices

aten = torch.ops.aten


def pairs(x):
    return (x[..., ::2].sin() * x[..., 1::2].cos()).sum()


def thirds(x):
    return (x[..., ::3] * x[..., 1::3] + x[..., 2::3].exp()).sum()


def latent(x):
    """The queries of latent attention: what does not turn, and pairs; stored by tokens."""
    x = x.unflatten(-1, (2, 6)).transpose(1, 2)
    nope, turned = x.split([2, 4], -1)
    return (nope.sin().sum(-1) * (turned[..., ::2] * turned[..., 1::2]).sum(-1)).sum()


def rows(x):
    return (x[:, :2].sin().sum() * x[:, 2:].cos().sum()) ** 2


def overlapping(x):
    return (x[..., :8].sin() * x[..., 4:].cos()).sum()


def uneven(x):
    """Five and six of eleven."""
    y = x[..., :11]
    return (y[..., ::2].sin().sum() * y[..., 1::2].cos().sum()) ** 2


def incomplete(x):
    return (x[..., :4].sin() * x[..., 8:].cos()).sum()


def rewritten(f, target="npu"):
    x = torch.randn(2, 4, 12, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def gradient(x):
        (g,) = torch.autograd.grad(f(x), x)
        return g.clone(memory_format=torch.contiguous_format)

    gm = make_fx(gradient, tracing_mode="fake")(x)
    want = gm(x)
    report = joined_slices(
        gm, Context(Options.parse({"target": target, "codegen": "eager"}).resolve("cpu"), "backward")
    )
    assert torch.equal(gm(x), want)
    return gm, report


@pytest.mark.parametrize("f, joins", [(pairs, 1), (thirds, 1), (latent, 2), (rows, 1)])
def test_parts_are_joined(f, joins):
    gm, report = rewritten(f)
    assert report.rewrites
    targets = [n.target for n in gm.graph.nodes]
    assert aten.slice_backward.default not in targets and targets.count(aten.cat.default) == joins


@pytest.mark.parametrize("f", [overlapping, incomplete, uneven])
def test_what_stays_a_sum(f):
    gm, report = rewritten(f)
    assert not report.rewrites and any(n.target is aten.slice_backward.default for n in gm.graph.nodes)


def test_elsewhere_nothing_is_rewritten():
    assert not rewritten(pairs, "cuda")[1].rewrites


def test_a_copy_in_another_order_is_joined_in_that_order():
    def f(a, b):
        return torch.cat([a, b], -1).transpose(1, 2).clone(memory_format=torch.contiguous_format)

    args = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 2)
    gm = make_fx(f, tracing_mode="fake")(*args)
    want = gm(*args)
    joined_slices(gm, Context(Options.parse({"target": "npu"}).resolve("cpu"), "backward"))
    assert torch.equal(gm(*args), want) and gm(*args).is_contiguous()
    assert not any(n.target is aten.clone.default for n in gm.graph.nodes)
