"""Until when memory is needed: by data, through views and writes in place, and while a transfer reads it."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from mindspeed_fx.graph import live_memory
from mindspeed_fx.graph.liveness import live_nodes, lives

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def traced(f, *shapes):
    return make_fx(f, tracing_mode="fake")(*(torch.empty(s) for s in shapes))


def spans(gm):
    """Name of what allocates a memory -> names of the first and the last node of its life."""
    found = lives(gm.graph)
    return {
        found.memories.maker[m].name: (found.nodes[found.first[m]].name, found.nodes[found.last[m]].name)
        for m in range(len(found.first))
    }


def test_a_memory_lives_as_long_as_its_views():
    def f(x):
        a = x.exp()
        left, right = a.split(4, 1)
        b = right.neg()
        return (b * left.sum(),)

    found = spans(traced(f, (4, 8)))
    assert found["exp"] == ("exp", "sum_1") and found["neg"] == ("neg", "mul")


def test_a_write_in_place_is_a_use():
    """What is written last and read never is in memory until then."""

    def f(x):
        a = x.exp()
        b = a.neg()
        a.add_(1.0)
        return (b * 2.0,)

    assert spans(traced(f, (4, 8)))["exp"] == ("exp", "add_")


def test_inputs_and_results_stay():
    found = spans(traced(lambda x: (x.exp().view(32), (x * 2.0).sum()), (4, 8)))
    assert found["x_1"] == ("x_1", "sum_1") and found["exp"] == ("exp", "sum_1") and found["mul"] == ("mul", "sum_1")


def gathered():
    """mm's operand is sent while ``neg`` runs, and what is gathered is read behind the wait."""
    graph = torch.fx.Graph()
    with torch._subclasses.FakeTensorMode():
        small, large = torch.empty(4, 8), torch.empty(8, 8)
        other = torch.empty(8, 8)
        x = graph.placeholder("x")
        a = graph.call_function(aten.exp.default, (x,))
        start = graph.call_function(c10d.all_gather_into_tensor.default, (a, 2, "0"))
        b = graph.call_function(aten.neg.default, (x,))
        wait = graph.call_function(c10d.wait_tensor.default, (start,))
        total = graph.call_function(aten.sum.default, (wait,))
        graph.output((b, total))
        for node, value in (
            (x, small),
            (a, torch.empty(4, 8)),
            (start, large),
            (b, torch.empty(4, 8)),
            (wait, other),
            (total, torch.empty(())),
        ):
            node.meta["val"] = value
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def test_a_transfer_reads_until_it_is_waited_for():
    """The operand lived until the collective's start for one planner, until its wait for another."""
    assert spans(gathered())["exp_default"] == ("exp_default", "wait_tensor_default")


def test_a_wait_for_what_the_graph_is_given():
    """A backward waits for a transfer that the forward began and saved."""
    gm = traced(lambda x: (c10d.wait_tensor(x) * 2.0,), (4, 8))
    assert spans(gm) == {"x_1": ("x_1", "mul"), "mul": ("mul", "mul")}


def test_a_wait_gives_what_the_collective_made():
    """The result of a gather was counted twice, at its start and at its wait."""
    gm = gathered()
    assert "wait_tensor_default" not in spans(gm)
    # At the wait: x, exp and neg of 128 bytes each, and the gathered 256.
    assert live_memory.peak(gm)["peak"] == 3 * 128 + 256


def test_live_nodes_are_read_or_write():
    def f(x, y):
        y.copy_(x)
        x.exp()
        return (x * y,)

    gm = traced(f, (4,), (4,))
    assert {n.name for n in live_nodes(gm.graph)} == {"x_1", "y_1", "copy_", "mul", "output"}
