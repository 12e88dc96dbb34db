"""What kind of operator a call is, and that all who ask hear the same."""

import pytest
import torch

from mindspeed_fx.cost import aten as cost
from mindspeed_fx.graph import op_sets
from mindspeed_fx.passes.overlap.chunking import chunk_rules
from mindspeed_fx.sharding.spmd import aten_rules

aten = torch.ops.aten

VIEWS = [
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.transpose.int,
    aten.expand.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.unbind.int,
    aten.contiguous.default,
    aten.to.dtype,
    torch.ops.mindspeed.wait_copy.default,
]
NO_VIEWS = [
    aten.clone.default,
    aten._to_copy.default,
    aten.add.Tensor,
    aten.add_.Tensor,
    aten.copy_.default,
    aten.cat.default,
    aten.max.dim,
    torch.add,
]
POINTWISE = [
    aten.add.Tensor,
    aten.mul_.Tensor,
    aten.where.self,
    aten.silu_backward.default,
    aten._to_copy.default,
    aten.to.dtype,
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    aten.fill_.Scalar,
    aten.copy_.default,
    aten.native_dropout.default,
]
NOT_POINTWISE = [
    aten.mm.default,
    aten.sum.dim_IntList,
    aten.cat.default,
    aten.view.default,
    aten.softmax.int,
    torch.add,
]


@pytest.mark.parametrize("target", VIEWS)
def test_views(target):
    assert op_sets.is_view(target) and op_sets.may_alias(target)


@pytest.mark.parametrize("target", NO_VIEWS)
def test_no_views(target):
    assert not op_sets.is_view(target)


def test_writes_in_place_alias_and_are_no_views():
    assert op_sets.may_alias(aten.add_.Tensor) and op_sets.may_write(aten.add_.Tensor)
    assert not op_sets.may_alias(aten.add.Tensor) and not op_sets.may_write(aten.add.Tensor)


@pytest.mark.parametrize("target", POINTWISE)
def test_pointwise(target):
    assert op_sets.is_pointwise(target)


@pytest.mark.parametrize("target", NOT_POINTWISE)
def test_not_pointwise(target):
    assert not op_sets.is_pointwise(target)


@pytest.mark.parametrize("target", [aten.masked_fill.Tensor, aten._to_copy.default, aten.mul.Tensor, aten.gelu.default])
def test_all_agree_on_what_is_pointwise(target):
    """masked_fill with a tensor was pointwise for the plan search alone, which then had no program for it."""
    assert chunk_rules.is_pointwise(target) and aten_rules.is_pointwise(target)
    assert cost.kind(op_sets.name(target), target) in ("pointwise", "copy")


@pytest.mark.parametrize("target", [aten.native_dropout.default, aten.rand_like.default])
def test_what_draws_is_not_divided(target):
    assert op_sets.is_random(target)
    assert not chunk_rules.is_pointwise(target) and not aten_rules.is_pointwise(target)


@pytest.mark.parametrize(
    "target, shape, rest",
    [
        (aten.transpose.int, (2, 3, 5), (-1, 0)),
        (aten.permute.default, (2, 3, 5), ([2, 0, -2],)),
        (aten.mT.default, (2, 3, 5), ()),
        (aten.numpy_T.default, (2, 3, 5), ()),
        (aten.swapaxes.default, (2, 3, 5), (0, -1)),
        (aten.movedim.int, (2, 3, 5), (0, -1)),
        (aten.movedim.intlist, (2, 3, 5), ([0, 1], [-1, 0])),
        (aten.t.default, (2, 3), ()),
        (aten.t.default, (2,), ()),
    ],
)
def test_order_of_dimensions(target, shape, rest):
    x, graph = torch.empty(shape), torch.fx.Graph()
    node = graph.call_function(target, (graph.placeholder("x"), *rest))
    node.meta["val"] = target(x, *rest)
    again = x.permute(op_sets.order_of(node))
    assert again.shape == node.meta["val"].shape and again.stride() == node.meta["val"].stride()


def test_other_views_have_no_order():
    graph = torch.fx.Graph()
    assert op_sets.order_of(graph.call_function(aten.view.default, (graph.placeholder("x"), [6]))) is None
