"""A backward graph takes over how its inputs lie in memory: what is computed of them follows."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from mindspeed_fx.compat import fake

aten = torch.ops.aten


def traced(function, *shapes):
    """The graph of a function with fake values, and inputs like them that lie channels last where they have images."""
    with FakeTensorMode():
        inputs = [torch.empty(shape) for shape in shapes]
        others = [x.to(memory_format=torch.channels_last) if x.ndim == 4 else x for x in inputs]
    return make_fx(function, tracing_mode="fake")(*inputs), others


def value(gm, target):
    (node,) = gm.graph.find_nodes(op="call_function", target=target)
    return node.meta["val"]


def test_what_follows_a_placeholder_has_its_strides():
    gm, inputs = traced(lambda x, y: (x.relu().sum(1), y.tanh()), (2, 3, 4, 5), (6,))
    tanh = value(gm, aten.tanh.default)
    fake.take_layouts(gm, inputs)
    assert value(gm, aten.relu.default).stride() == (60, 1, 15, 3)
    assert value(gm, aten.sum.dim_IntList).stride() == (20, 5, 1)
    assert value(gm, aten.tanh.default) is tanh


def test_several_results_and_views_of_them():
    gm, inputs = traced(lambda x: [h[0] * 2 for h in x.split([1, 2], 1)], (2, 3, 4, 5))
    fake.take_layouts(gm, inputs)
    (split,) = gm.graph.find_nodes(op="call_function", target=aten.split_with_sizes.default)
    (x,) = gm.graph.find_nodes(op="placeholder")
    assert {fake.storage_of(v) for v in split.meta["val"]} == {fake.storage_of(x.meta["val"])}
    halves = [n.meta["val"].stride() for n in gm.graph.find_nodes(op="call_function", target=aten.select.int)]
    assert halves == [(1, 15, 3)] * 2


def test_a_view_that_the_strides_do_not_allow_becomes_one_of_a_copy():
    gm, inputs = traced(lambda x: (x.view(2, 60), x.view(6, 4, 5)), (2, 3, 4, 5))
    fake.take_layouts(gm, inputs)
    gm.recompile()
    copies = gm.graph.find_nodes(op="call_function", target=aten.clone.default)
    assert [n.meta["val"].stride() for n in copies] == [(60, 20, 5, 1)] * 2
    x = torch.randn(2, 3, 4, 5)
    for got, want in zip(gm(x.to(memory_format=torch.channels_last)), (x.view(2, 60), x.view(6, 4, 5))):
        assert torch.equal(got, want)


def test_a_view_of_one_channel_stays_without_a_copy():
    gm, inputs = traced(lambda x: x.view(2, 20), (2, 1, 4, 5))
    fake.take_layouts(gm, inputs)
    assert not gm.graph.find_nodes(op="call_function", target=aten.clone.default)


def test_what_writes_stays():
    gm, inputs = traced(lambda x: x.clone().add_(1), (2, 3, 4, 5))
    (written,) = gm.graph.find_nodes(op="call_function", target=aten.add_.Tensor)
    before = written.meta["val"]
    fake.take_layouts(gm, inputs)
    assert written.meta["val"] is before


def test_a_view_of_what_lies_otherwise_than_its_fake_form():
    """The gradient of softplus of a transposed tensor (Doge's gates): torch's own ``aot_eager`` raises there."""

    def f(x, w):
        return (torch.nn.functional.softplus((x @ w).transpose(-1, -2)) * torch.arange(8.0, dtype=x.dtype)).sum()

    x, w = (torch.randn(*shape, dtype=torch.float64) for shape in ((2, 8, 4), (4, 2)))
    grads = []
    for g in (torch.compile(f, backend="mindspeed", fullgraph=True, options={"codegen": "eager"}), f):
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        grads.append(torch.autograd.grad(g(*leaves), leaves))
    for ours, eager in zip(*grads, strict=True):
        torch.testing.assert_close(ours, eager)
