"""What lowering leaves behind: casts that undo each other, with and without another shape between them."""

import pytest
import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mindspeed_fx.kernels.cleanup import cleanup

aten = torch.ops.aten


def chain(dtype, wide, back, shape=None, is_read=False, of_model=()):
    """``x.to(wide).view(shape).to(back) + 1``, and the widened value too where it is read; calls of the operators
    ``of_model`` were there before lowering."""
    graph = fx.Graph()
    with FakeTensorMode():
        node = graph.placeholder("x")
        node.meta["val"] = torch.empty(6, 2, dtype=dtype)
        nodes = [node]
        calls = [(aten.abs.default, (), {}), (aten._to_copy.default, (), {"dtype": wide})]
        calls += [(aten.view.default, (shape,), {})] if shape else []
        calls += [(aten._to_copy.default, (), {"dtype": back}), (aten.add.Tensor, (1,), {})]
        for target, args, kwargs in calls:
            nodes.append(graph.call_function(target, (nodes[-1], *args), kwargs))
            nodes[-1].meta["val"] = target(nodes[-2].meta["val"], *args, **kwargs)
    graph.output((nodes[-1], nodes[2]) if is_read else (nodes[-1],))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    cleanup(gm, [n for n in nodes[1:] if n.target not in of_model])
    gm.graph.lint()
    return fx.GraphModule(gm, gm.graph)


def casts(gm):
    return sum(n.target is aten._to_copy.default for n in gm.graph.nodes)


@pytest.mark.parametrize("shape", [None, [12]])
@pytest.mark.parametrize(
    "dtype, wide, back, left",
    [
        (torch.int32, torch.int64, torch.int32, 0),
        (torch.bfloat16, torch.float32, torch.bfloat16, 0),
        (torch.uint8, torch.int16, torch.uint8, 0),
        (torch.int64, torch.int32, torch.int64, 2),  # a large number is another one
        (torch.uint8, torch.int8, torch.uint8, 2),
        (torch.float16, torch.bfloat16, torch.float16, 2),
        (torch.int32, torch.float32, torch.int32, 2),
        (torch.int32, torch.int64, torch.int16, 2),
    ],
)
def test_a_value_that_was_widened_and_comes_back_is_itself(dtype, wide, back, left, shape):
    gm = chain(dtype, wide, back, shape)
    assert casts(gm) == left
    x = torch.arange(-3, 9).reshape(6, 2).to(dtype)
    want = x.abs().to(wide).view(shape or [6, 2]).to(back) + 1
    assert torch.equal(gm(x)[0], want) and gm(x)[0].dtype == want.dtype


def test_a_shape_of_the_models_own_keeps_no_cast_alive():
    gm = chain(torch.int32, torch.int64, torch.int32, [12], of_model=(aten.view.default,))
    assert casts(gm) == 0 and sum(n.target is aten.view.default for n in gm.graph.nodes) == 1


def test_a_shape_that_was_made_for_nothing_is_gone():
    """The cast is a result of the graph, and so is what it would be: it stays, and no view of it is left unread."""
    graph = fx.Graph()
    with FakeTensorMode():
        x = graph.placeholder("x")
        x.meta["val"] = torch.empty(6, 2, dtype=torch.int32)
        wide = graph.call_function(aten._to_copy.default, (x,), {"dtype": torch.int64})
        wide.meta["val"] = x.meta["val"].long()
        part = graph.call_function(aten.view.default, (wide, [12]))
        part.meta["val"] = wide.meta["val"].view(12)
        back = graph.call_function(aten._to_copy.default, (part,), {"dtype": torch.int32})
        back.meta["val"] = part.meta["val"].int()
    graph.output((back, part))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    cleanup(gm, [wide, back])
    gm.graph.lint()
    assert all(n.users or n.op in ("output", "placeholder") for n in gm.graph.nodes)


def test_what_else_reads_the_wide_value_keeps_it():
    gm = chain(torch.int32, torch.int64, torch.int32, [12], is_read=True)
    x = torch.arange(12, dtype=torch.int32).reshape(6, 2)
    assert casts(gm) == 1
    assert torch.equal(gm(x)[0], x.view(12) + 1) and gm(x)[1].dtype == torch.int64


@pytest.mark.parametrize("second, left", [((2, 0, 1), 0), ((1, 2, 0), 2)])
def test_orders_that_undo_each_other_are_gone(second, left):
    graph = fx.Graph()
    with FakeTensorMode():
        nodes = [graph.placeholder("x")]
        nodes[0].meta["val"] = torch.empty(4, 4, 4)
        turns = [(aten.permute.default, (order,)) for order in ((1, 2, 0), second)]
        for target, args in ((aten.abs.default, ()), *turns, (aten.neg.default, ())):
            nodes.append(graph.call_function(target, (nodes[-1], *args)))
            nodes[-1].meta["val"] = target(nodes[-2].meta["val"], *args)
    graph.output((nodes[-1],))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    cleanup(gm, nodes[1:])
    x = torch.arange(64.0).view(4, 4, 4)
    assert torch.equal(fx.GraphModule(gm, gm.graph)(x)[0], -x.permute(1, 2, 0).permute(second))
    assert sum(n.target is aten.permute.default for n in gm.graph.nodes) == left
