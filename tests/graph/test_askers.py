"""Those who answered a question about a graph by a table of their own, and wrongly for what it did not name."""

import operator
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from mindspeed_fx.cost.graph import estimate
from mindspeed_fx.graph.annotate import annotate
from mindspeed_fx.graph.functional_writes import make_writes_functional
from mindspeed_fx.passes.base import PassReport
from mindspeed_fx.passes.fusion import merged_linear
from mindspeed_fx.passes.overlap.chunking.chunk_spec import ChunkSpec
from mindspeed_fx.passes.overlap.chunking.region import _only_inside
from mindspeed_fx.passes.sharding.constraint import _Edges
from mindspeed_fx.sharding.constraint import constrain
from mindspeed_fx.sharding.plan import Boundary
from tests.models import double, function_agrees

aten = torch.ops.aten


def traced(f, *shapes):
    return make_fx(f, tracing_mode="fake")(*(torch.empty(s) for s in shapes))


@pytest.mark.parametrize(
    "target, rest",
    [
        (aten.view.default, ([8, 8],)),
        (aten.flatten.using_ints, (0, 1)),
        (aten.mT.default, ()),
        (aten.squeeze.default, ()),
    ],
)
def test_a_value_is_placed_whole_before_whatever_rearranges_it(target, rest):
    """Behind a flattened batch and sequence the parts of a rank are not contiguous in the whole."""
    graph = torch.fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    moved = graph.call_function(target, (x, *rest))
    graph.output((graph.call_function(aten.matmul.default, (moved, w)),))
    with torch._subclasses.FakeTensorMode():
        x.meta["val"], w.meta["val"] = torch.empty(2, 4, 8), torch.empty(8, 3)
        moved.meta["val"] = target(x.meta["val"], *rest)
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    plan = SimpleNamespace(name="test", modules={}, operators={"aten.matmul": Boundary({"tp": "R"})})
    _Edges(gm, SimpleNamespace(plan=plan, prefix="", modules=[]), PassReport("test")).insert({w: [""]})
    assert [n.target for n in gm.graph.nodes if n.op == "call_function"] == [constrain, target, aten.matmul.default]


@pytest.mark.parametrize("reader", [torch.exp, lambda y: 1 - y, lambda y: y / 2, torch.nn.functional.relu6, torch.neg])
def test_whatever_is_pointwise_reads_a_part_of_a_merged_product(reader):
    with patch.object(merged_linear, "_unpaid", lambda group, device: None):
        report = function_agrees(
            lambda x, a, b: reader(F.linear(x, a)) * reader(F.linear(x, b)),
            double(3, 8),
            double(6, 8),
            double(6, 8),
            target="cuda",
            hardware="h100",
            enable=[merged_linear.NAME],
        )
    assert report.counts[merged_linear.NAME] == 1


def test_one_of_several_results_is_no_view():
    """With gaps between its elements it cannot be put together from chunks; it was taken for a view that can."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    pair = graph.call_function(aten.max.dim, (x, 0))
    item = graph.call_function(operator.getitem, (pair, 0))
    with torch._subclasses.FakeTensorMode():
        gaps = torch.empty(8, 8)[:, :4]
        pair.meta["val"], item.meta["val"] = (gaps, gaps), gaps
    assert _only_inside(item, ChunkSpec(0))


def test_fused_code_writes_what_it_was_given():
    """Nobody reads what a write in place returns, and still it goes to memory: it was counted 0 bytes."""

    def f(x, y):
        x.copy_(y * 2.0)
        return (y.sum(),)

    made = estimate(traced(f, (256, 256), (256, 256)), "ascend910b2", fused=True)
    node = next(n for n in made.nodes if "copy" in n.operator)
    assert (node.cost.read, node.cost.write) == (256 * 256 * 4, 256 * 256 * 4)


def test_memory_that_is_not_filled_is_not_what_its_shape_is_from():
    """``empty_like`` is no view: what is written into it and read again inside fused code is in memory nowhere."""

    def f(x):
        return (torch.empty_like(x).copy_(x * 2.0) * 3.0,)

    made = estimate(traced(f, (256, 256)), "ascend910b2", fused=True)
    assert [(n.cost.read, n.cost.write) for n in made.nodes] == [(256 * 256 * 4, 256 * 256 * 4)]


def test_a_copy_does_not_read_what_it_overwrites():
    def f(x, y):
        x.copy_(y)
        return (y.sum(),)

    made = estimate(traced(f, (256, 256), (256, 256)), "ascend910b2")
    assert (made.nodes[0].cost.read, made.nodes[0].cost.write) == (256 * 256 * 4, 256 * 256 * 4)


def test_a_part_is_not_written_under_a_view_of_the_whole():
    """``_unsafe_view`` does not say that it is one; its reader behind the write has to see what was written."""

    def f(x, y):
        whole = x.exp()
        view = aten._unsafe_view.default(whole, [32])
        whole[:, :4].copy_(y)
        return (view * 2.0,)

    x, y = torch.randn(4, 8), torch.randn(4, 4)
    gm = traced(f, (4, 8), (4, 4))
    annotate(gm)
    make_writes_functional(gm)
    assert torch.equal(gm(x, y)[0], f(x, y)[0])
