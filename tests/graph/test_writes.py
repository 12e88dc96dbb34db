"""What calls of Dynamo's graphs change in place."""

import operator

import pytest
import torch
from torch.nn import functional as F

from mindspeed_fx.graph.writes import IN_PLACE, written_by


def graph_of(f, *inputs):
    graphs = []
    torch._dynamo.reset()
    torch.compile(f, backend=lambda gm, _: graphs.append(gm.graph) or gm.forward, fullgraph=True)(*inputs)
    return graphs[0]


@pytest.mark.parametrize(
    "call, count",
    [
        (lambda x, y: x.add_(y), 1),
        (lambda x, y: F.relu(x, inplace=True), 1),
        (lambda x, y: F.relu(x, True), 1),
        (lambda x, y: F.dropout(x, 0.5, True, True), 1),
        (lambda x, y: F.relu(input=x, inplace=True), 1),
        (lambda x, y: torch.mul(y, y, out=x), 1),
        (lambda x, y: torch._foreach_add_([x, y], 1.0), 2),
        (lambda x, y: x.__setitem__(0, 1.0), 1),
        (lambda x, y: operator.ipow(x, 2), 1),
        (lambda x, y: F.relu(x), 0),
        (lambda x, y: F.relu(x, inplace=False), 0),
        (lambda x, y: F.dropout(x, 0.5, True), 0),
        (lambda x, y: (x > 0) & (y > 0), 0),
        (lambda x, y: operator.or_(x > 0, y > 0), 0),
    ],
)
def test_what_is_written(call, count):
    def f(x, y):
        x, y = x.clone(), y.clone()
        call(x, y)
        return x + y

    x, y = torch.rand(4), torch.rand(4)
    graph = graph_of(f, x, y)
    names = [n.name for node in graph.nodes for n in written_by(node)]
    copies = [n.name for n in graph.nodes if n.target == "clone"]
    assert names == copies[:count]


def test_a_flag_is_not_memory():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    assert not written_by(graph.call_method("requires_grad_", (x,))) and written_by(graph.call_method("zero_", (x,)))


def test_every_function_of_operator_that_writes_is_known():
    """Those that have a method of their own in place, as ``+=`` has ``__iadd__``."""
    assert {n for n in dir(operator) if f"__{n}__" in dir(operator) and n.startswith("i")} - {
        "index",
        "inv",
        "invert",
    } == IN_PLACE - {"setitem", "delitem"}
