"""What a program asserts of sizes that data decides holds when the compiled program runs."""

import pytest
import torch

from mindspeed_fx.capture import capture

SEVEN = [0, 1, 3, 4, 2, 0, 0]


def rows_are_four(x):
    rows = x.nonzero()
    torch._check(rows.size(0) == 4)
    return rows + 3


def rows_are_four_seen_late(x):
    rows = x.nonzero().squeeze(1) * 2
    torch._check(rows.size(0) == 4)
    return rows


def chosen_are_four(x):
    chosen = x[x > 0]
    torch._check(chosen.size(0) == 4)
    return chosen * 2


def twice_as_many(x):
    rows = x.nonzero().squeeze(1)
    torch._check(2 * rows.size(0) == 8)
    return rows + 1


def as_many_as_another(x):
    rows, others = x.nonzero(), (x - 4).nonzero()
    torch._check(rows.size(0) == others.size(0) - 2)
    return rows.sum() + others.sum()


def values_add_up(x):
    total = x.sum().item()
    torch._check(total == 10)
    return x.new_ones(10) + total


def at_most_four(x):
    rows = x.nonzero()
    torch._check(rows.size(0) <= 4)
    return rows + 3


PROGRAMS = (
    rows_are_four,
    rows_are_four_seen_late,
    chosen_are_four,
    twice_as_many,
    as_many_as_another,
    values_add_up,
    at_most_four,
)


@pytest.mark.parametrize("level", (0, 2))
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True)
def test_holds_when_it_runs(program, level):
    options = {"level": level, "codegen": "eager"}
    compiled = torch.compile(program, backend="mindspeed", fullgraph=True, options=options)
    holds, fails = torch.tensor(SEVEN), torch.tensor([2, 3, 1, 5, 2, 4, 3])
    torch.testing.assert_close(compiled(holds), program(holds))
    with pytest.raises(RuntimeError):
        program(fails)
    with pytest.raises(RuntimeError):
        compiled(fails)


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_of_the_number_that_an_input_holds():
    def program(x, number):
        value = number.item()
        torch._check(value == 3)
        return x + value

    compiled = torch.compile(program, backend="mindspeed", fullgraph=True, options={"codegen": "eager"})
    x = torch.randn(4)
    torch.testing.assert_close(compiled(x, torch.tensor(3)), x + 3)
    with pytest.raises(RuntimeError):
        compiled(x, torch.tensor(4))


@pytest.mark.slow
@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_of_a_number_that_is_a_sum_of_sizes():
    """Generated code asserts it; of Dynamo's graph alone nobody could tell, which compares the number with itself."""

    def program(x, y, number):
        number += 7
        torch._check(x.size(0) < 100)
        torch._check(y.size(0) < 100)
        torch._check(number.item() == x.size(0) + y.size(0))
        return x, y, number

    compiled = torch.compile(program, backend="mindspeed", fullgraph=True, dynamic=True)
    x, y = torch.randn(16, 10), torch.randn(15, 10)
    compiled(x, y, torch.tensor(24))
    with pytest.raises(RuntimeError):
        compiled(x, y, torch.tensor(25))


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_a_size_that_an_input_remembers():
    """Its symbol is Dynamo's already, however often the graph is captured."""
    graphs = []

    def keep(gm, inputs):
        graphs.extend([capture(gm), capture(gm)])
        return gm

    torch.compile(lambda x: (x.nonzero() + 3, x[x > 0] * 2), backend=keep, fullgraph=True)(torch.tensor(SEVEN))
    for graph in graphs:
        assert any(n.target is torch.ops.aten.nonzero.default for n in graph.graph.nodes)
