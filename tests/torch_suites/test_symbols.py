"""Sizes that are symbols, of inputs and of data: no pass asks for their numbers."""

import torch
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
