"""Sizes that are symbols, of inputs and of data: no pass asks for their numbers."""

import pytest
import torch
from torch._dynamo import lookup_backend
from torch.fx.experimental.proxy_tensor import make_fx

from mindspeed_fx.compat import dispatcher
from mindspeed_fx.passes.overlap.chunking import chunk_rules
from mindspeed_fx.passes.overlap.chunking.chunk_spec import ChunkSpec
from tests.torch_suites.torch_programs import OPTIONS


def test_a_layout_of_sizes_that_may_be_one():
    """Whether a view is the whole of its source asked whether two strides are equal: a guard that failed at once."""

    def program(t, size, stride):
        return t * t.as_strided(size, stride).view(-1).sum()

    compiled = torch.compile(program, backend="mindspeed", dynamic=True, options=OPTIONS)
    x = torch.randn(3)
    for size, stride in (([0, 3], [3, 1]), ([1, 3], [3, 1]), ([2, 1], [1, 1])):
        torch.testing.assert_close(compiled(x, size, stride), program(x, size, stride))


def test_pieces_of_sizes_that_change():
    """Whether pieces that are joined are equal was asked of a set, of which symbols are no elements."""
    for rows, pieces in ((6, None), (4, {"x_1": ChunkSpec(0), "y_1": ChunkSpec(0)})):
        gm = make_fx(lambda x, y: torch.cat([x, y]), tracing_mode="symbolic")(torch.ones(4, 8), torch.ones(rows, 8))
        (joined,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)
        found = chunk_rules.inputs(joined, ChunkSpec(0, 2))
        assert (found and {n.name: spec for n, spec in found.items()}) == pieces


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_a_product_whose_strides_data_decides(monkeypatch):
    monkeypatch.setattr(dispatcher, "onednn_beats_blas", lambda: True)

    def program(count, w):
        return torch.ones(512, count.item()).t() @ w

    compiled = torch.compile(program, backend="mindspeed", fullgraph=True, options=OPTIONS)
    for count in (3, 1):
        count, w = torch.tensor(count), torch.ones(512, 512)
        torch.testing.assert_close(compiled(count, w), program(count, w))


def floats_of(x, rate):
    return (x.sqrt() / rate**0.5 + 1e-8) * rate


def gate(x, rate):
    return x * torch.sigmoid(rate * x) + rate


def norm(x, rate):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + rate)


def scores(x, rate):
    return torch.softmax(x @ x.t() * rate, -1) @ x


@pytest.mark.parametrize("program", [floats_of, gate])
def test_a_number_that_changes_is_compiled_for_twice(program):
    """Once as a constant, and once for all: looking for patterns asked for its value, which tied the graph to it."""
    graphs = []

    def counted(gm, inputs):
        graphs.append(gm)
        return lookup_backend("mindspeed")(gm, inputs, options=OPTIONS)

    compiled = torch.compile(program, backend=counted)
    x = torch.rand(4, 8)
    for rate in (0.5, 0.25, 0.75, 1.5):
        torch.testing.assert_close(compiled(x, rate), program(x, rate))
    assert len(graphs) == 2


def test_a_number_that_a_rewrite_needs_is_what_it_was_compiled_for():
    compiled = torch.compile(norm, backend="mindspeed", dynamic=True, options=OPTIONS)
    x = torch.rand(4, 8)
    for eps in (1e-6, 0.25, 1e-6):
        torch.testing.assert_close(compiled(x, eps), norm(x, eps))


@torch._dynamo.config.patch(capture_scalar_outputs=True)
@pytest.mark.parametrize("program", [floats_of, gate, norm, scores])
def test_a_number_of_data(program):
    compiled = torch.compile(
        lambda x, data: program(x, data.sum().item()), backend="mindspeed", fullgraph=True, options=OPTIONS
    )
    for data in (torch.tensor([0.25, 0.5]), torch.tensor([1.0, 2.0])):
        x = torch.rand(4, 8)
        torch.testing.assert_close(compiled(x, data), program(x, data.sum().item()))


@torch._dynamo.config.patch(capture_scalar_outputs=True)
@pytest.mark.parametrize("along, across", [(0, 1), (0, 2), (1, 0)])
def test_pieces_as_long_as_data_says(along, across):
    """What reorders by one copy asked whether the reordered is contiguous."""

    def program(count):
        n = count.item()
        x = torch.ones(4, n, 6) if along == 0 else torch.ones(n, 4, 6)
        return torch.cat(x.split(2, along), across).cumsum(0)

    compiled = torch.compile(program, backend="mindspeed", fullgraph=True, options=OPTIONS)
    for count in (torch.tensor(3), torch.tensor(1), torch.tensor(0)):
        torch.testing.assert_close(compiled(count), program(count))
