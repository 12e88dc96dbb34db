"""What a graph says of its collectives."""

import operator

import torch
import torch.fx as fx

from mindspeed_fx.graph.collectives import WAIT, waits_of

c10d = torch.ops._c10d_functional


def test_waits_of_a_coalesced_collective_are_those_of_its_tensors():
    graph = fx.Graph()
    x = graph.placeholder("x")
    start = graph.call_function(c10d.all_reduce_coalesced.default, ([x, x], "sum", "0"))
    items = [graph.call_function(operator.getitem, (start, i)) for i in range(2)]
    waits = [graph.call_function(WAIT, (item,)) for item in items]
    shape = graph.call_function(torch.ops.aten.sym_size.int, (items[0], 0))
    alone = graph.call_function(c10d.all_reduce.default, (x, "sum", "0"))
    end = graph.call_function(WAIT, (alone,))
    graph.output((*waits, shape, end))
    assert waits_of(start) == waits and waits_of(alone) == [end]
