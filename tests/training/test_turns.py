"""Two calls that take turns: who runs when, what they return, and what becomes of failures."""

from __future__ import annotations

import pytest
import torch

from mindspeed_fx.graph.collectives import WAIT
from mindspeed_fx.training import turns


def speaker(log, name, times):
    def call():
        for i in range(times):
            log.append(f"{name}{i}")
            turns.hand_over()
        log.append(f"{name} ends")
        return name

    return call


@pytest.mark.parametrize(
    "first, second, order",
    [
        (2, 2, "a0 b0 a1 b1 a ends b ends"),
        (3, 1, "a0 b0 a1 b ends a2 a ends"),
        (1, 3, "a0 b0 a ends b1 b2 b ends"),
        (0, 2, "a ends b0 b1 b ends"),
        (2, 0, "a0 b ends a1 a ends"),
    ],
)
def test_who_runs_when(first, second, order):
    log = []
    assert turns.run(speaker(log, "a", first), speaker(log, "b", second)) == ("a", "b")
    assert " ".join(log) == order
    turns.hand_over()  # nobody else is there


def test_the_second_begins():
    log = []
    calls = speaker(log, "a", 2), speaker(log, "b", 1)
    assert turns.run(*calls, second_begins=True) == ("a", "b")
    assert " ".join(log) == "b0 a0 b ends a1 a ends"
    torch.manual_seed(0)
    alone, rest = torch.rand(2), torch.rand(1)
    torch.manual_seed(0)
    states = torch.get_rng_state, torch.set_rng_state
    one, other = turns.run(lambda: torch.rand(2), lambda: torch.rand(2), states, second_begins=True)
    assert torch.equal(one, alone) and torch.equal(other, alone) and torch.equal(torch.rand(1), rest)
    with pytest.raises(ValueError, match="stop"):
        turns.run(speaker(log, "a", 1), lambda: (_ for _ in ()).throw(ValueError("stop")), second_begins=True)
    assert turns._pair is None


@pytest.mark.parametrize("who", [0, 1])
def test_failures_end_both(who):
    log = []

    def fail():
        turns.hand_over()
        raise ValueError("stop")

    calls = [speaker(log, "a", 3), speaker(log, "b", 3)]
    calls[who] = fail
    with pytest.raises(ValueError, match="stop"):
        turns.run(*calls)
    assert turns._pair is None
    assert "b0 a0"[3 * who] in " ".join(log)
    with torch.no_grad():
        modes = turns.run(torch.is_grad_enabled, torch.is_grad_enabled)
    assert modes == (False, False)


def test_random_numbers_are_each_calls_own():
    def draw():
        first = torch.rand(2)
        turns.hand_over()
        return torch.cat([first, torch.rand(2)])

    torch.manual_seed(0)
    alone = draw()
    rest = torch.rand(1)
    torch.manual_seed(0)
    both = turns.run(draw, draw, (torch.get_rng_state, torch.set_rng_state))
    assert torch.equal(both[0], alone) and torch.equal(both[1], alone) and torch.equal(torch.rand(1), rest)


def test_a_graph_does_not_hand_over_for_messages_of_the_turn_before():
    """Two start together: the second has arrived when the other call, whose messages come after both, hands back."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    starts = [graph.call_function(torch.sin, (x,)) for _ in range(2)]
    first = graph.call_function(WAIT, (starts[0],))
    more = graph.call_function(torch.cos, (first,))
    second = graph.call_function(WAIT, (starts[1],))
    third = graph.call_function(WAIT, (more,))
    graph.output((second, third))
    gm = torch.fx.GraphModule({}, graph)
    turns.insert(gm)
    names = [n.target for n in gm.graph.nodes if n.op == "call_function"]
    assert names == [torch.sin, torch.sin, turns.hand_over, WAIT, torch.cos, WAIT, turns.hand_over, WAIT]


def test_a_graph_hands_over_before_each_wait_that_follows_work():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    one = graph.call_function(torch.sin, (x,))
    waits = [graph.call_function(WAIT, (one,)), graph.call_function(WAIT, (one,))]
    two = graph.call_function(torch.cos, (waits[1],))
    last = graph.call_function(WAIT, (two,))
    graph.output((waits[0], last))
    gm = torch.fx.GraphModule({}, graph)
    turns.insert(gm)
    names = [n.target for n in gm.graph.nodes if n.op == "call_function"]
    assert names == [torch.sin, turns.hand_over, WAIT, WAIT, torch.cos, turns.hand_over, WAIT]
    assert "hand_over" in gm.code


def test_generated_code_is_refused():
    layer = torch.nn.Linear(2, 2)
    turns.mark(layer.parameters())
    with pytest.raises(Exception, match='"codegen" is "inductor"; valid where a forward runs beside a backward'):
        torch.compile(layer, backend="mindspeed", options={"codegen": "inductor"})(torch.ones(1, 2))
