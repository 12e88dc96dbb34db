"""Steps of many layers: plans fit, are what the step as the graph has it says, and no bound is above them."""

import pytest

from mindspeed_fx.passes.recompute.problem.contract import contract
from mindspeed_fx.passes.recompute.solve.whole_step import WholeStep
from tests.passes.recompute.random_steps import layered, step


def work(search: WholeStep) -> int:
    """Nodes walked over in plans tried."""
    return len(search.small.sources) * search.small.evaluations + len(search.schedule.sources) * (
        search.schedule.evaluations
    )


@pytest.mark.parametrize("seed", range(3))
def test_plans_of_layers_fit_and_are_those_of_the_whole_step(seed):
    schedule, _ = layered(seed, 8 + 4 * seed)
    search = WholeStep(schedule)
    low, high = search.least.bytes, search.richest.bytes
    assert search.richest.seconds == 0.0 and low < high
    times = []
    for part in (0, 3, 6):
        limit = low + (high - low) * part // 10
        plan, bound = search.best(limit), search.bound(limit)
        assert plan.bytes <= limit and plan == schedule.evaluate(plan.saved)
        assert 0.0 <= bound <= plan.seconds + 1e-12
        times.append(plan.seconds)
    assert times == sorted(times, reverse=True)
    assert search.best(low - 1) is None


def test_the_least_peak_of_many_layers_grows_with_their_root():
    """What crosses every few layers is kept and one segment at a time recomputed (Chen et al. 2016)."""
    few, many = (WholeStep(layered(1, layers)[0]) for layers in (16, 64))
    assert many.least.bytes < 3 * few.least.bytes
    assert many.least.bytes < 0.5 * many.richest.bytes


def test_work_grows_no_faster_than_the_step():
    few, many = (WholeStep(layered(3, layers, 12)[0]) for layers in (8, 64))
    for search in (few, many):
        search.best((search.least.bytes + search.richest.bytes) // 2)
    assert work(many) <= 8 * work(few)


@pytest.mark.parametrize("seed", range(4))
def test_without_views_a_step_takes_the_same_time_and_memory(seed):
    schedule, _ = step(seed, 14)
    small, nodes, _ = contract(schedule)
    search = WholeStep(schedule)
    for plan in search.inner.frontier():
        whole = schedule.evaluate(nodes[v] for v in plan.saved)
        assert (whole.seconds, whole.bytes) == (pytest.approx(plan.seconds), plan.bytes)
