"""Lower bounds of the search: never above what they bound, and not far below."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("scipy", reason="the search needs scipy's HiGHS")

from mindspeed_fx.cost.hardware import hardware
from mindspeed_fx.planning.search.branch_and_bound import branch_and_bound
from mindspeed_fx.planning.search.costs import Prices
from mindspeed_fx.planning.search.layouts import Layout
from mindspeed_fx.planning.search.lower_bounds import LowerBounds
from mindspeed_fx.planning.search.solve import Program
from tests.sharding.searched_problems import mixture_problem

GiB = 2**30
HW = hardware("ascend910b2")


@pytest.fixture(scope="module")
def mixture():
    return mixture_problem()


def test_an_nth_of_a_microbatch_takes_an_nth_of_its_time_at_least(mixture):
    """What :func:`_coarser` relies on, for every operator and with the collectives between them."""
    prices, seconds = Prices(mixture, HW), {}
    for cp, ep, tp, cut in itertools.product((1, 4), (1, 4), (1, 4), (1, 2, 8)):
        x = Layout(1, cut, cp, ep, tp)
        each = {
            n.name: min(
                p.forward + p.backward + p.moved
                for p in (prices.activations(n, s, x) for s in prices.space.strategies(n, x))
            )
            for n in mixture.nodes
        }
        seconds[cp, ep, tp, cut] = {**each, "core": Program(prices, x, 1e15).core()}
    for (cp, ep, tp, cut), mine in seconds.items():
        assert [n for n, t in mine.items() if t * cut < seconds[cp, ep, tp, 1][n] * (1 - 1e-9)] == []


def test_bytes_are_those_of_the_least_demanding_choice(mixture):
    """Nearly: of a pipeline what is at hand for a moment is not in the bound."""
    prices = Prices(mixture, HW)
    bounds, shares = LowerBounds(prices, 1e15, None), []
    for pp, ep, tp, zero, recompute, (schedule, virtual) in itertools.product(
        (1, 2), (1, 4), (1, 4), ("never", "zero3"), ("none", "norm+activation_function", "full"), SCHEDULES
    ):
        if pp == 1 and virtual > 1:
            continue
        layout = Layout(pp, 8 // ep, 1, ep, tp, 4, zero, recompute, schedule, virtual)
        program = Program(prices, layout, 1e15)
        program.priced()
        least = program.least_memory()
        shares.append(bounds.least_memory(layout) / least.memory)
    assert len(shares) > 50 and max(shares) <= 1 + 1e-6
    assert sorted(shares)[len(shares) // 2] > 0.7, shares


SCHEDULES = (("1F1B", 1), ("ZBVZeroBubble", 2), ("Interleaved1F1B", 2))


def test_what_does_not_fit_is_not_solved(mixture):
    """Programs of layouts whose kept activations alone are too large are never made."""
    free = branch_and_bound(mixture, HW, 8, 1e15, keep=1)
    tight = branch_and_bound(mixture, HW, 8, 0.3 * free.solutions[0].memory, keep=1)
    assert tight.too_large > 50 and tight.solved < tight.too_large / 8
    assert tight.solutions[0].memory <= 0.3 * free.solutions[0].memory
