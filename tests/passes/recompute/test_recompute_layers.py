"""Layers that repeat are found, planned once, and planned right: what a folded step says holds for the whole one."""

import itertools
import random
import statistics

import pytest

from mindspeed_fx.passes.recompute.problem.contract import contract
from mindspeed_fx.passes.recompute.problem.folded_layers import fold, groups
from mindspeed_fx.passes.recompute.problem.repeated_layers import repeats
from mindspeed_fx.passes.recompute.solve import budget_search as searching
from mindspeed_fx.passes.recompute.solve.budget_search import Search
from mindspeed_fx.passes.recompute.solve.folded_search import Layers
from mindspeed_fx.passes.recompute.solve.min_cut import Cuts
from tests.passes.recompute.random_steps import layered, step


def work(search: Layers) -> int:
    """Nodes walked over in plans tried."""
    return (
        sum(len(s.schedule.sources) * s.schedule.evaluations for s in search.inner)
        + len(search.small.sources) * search.small.evaluations
    )


def planned(layers: int, seed: int = 3):
    schedule, _ = layered(seed, layers, 12)
    search = Layers(schedule, None, 0)
    low, high = search.least.bytes, search.richest.bytes
    plan = search.best((low + high) // 2)
    search.bound((low + high) // 2)
    return search, plan


def test_32_layers_are_no_more_work_than_4():
    few, _ = planned(4)
    many, plan = planned(32)
    assert few.repeats is None and many.repeats.count >= 28
    folded = [len(s.schedule.sources) for s in many.inner]
    assert folded[0] <= 2.5 * len(few.small.sources)  # five layers and what is left at the ends
    assert many.small.evaluations <= 12  # plans tried as the whole step
    assert work(many) <= 1.5 * work(few) + 12 * len(many.small.sources)
    assert [len(s.schedule.layers) for s in many.inner] == [5, 3, 3]
    assert plan.bytes == many.schedule.evaluate(plan.saved).bytes


@pytest.mark.parametrize("seed", range(6))
def test_plans_of_layers_fit_and_are_those_of_the_whole_step(seed, monkeypatch):
    monkeypatch.setattr(searching, "MOST", 60)
    monkeypatch.setattr(searching, "FILL_WORK", 10_000)
    layers = 8 + seed
    schedule, whole = layered(seed, layers)
    search, plain = Layers(schedule, None, 0), Search(schedule)
    low, high = search.least.bytes, search.richest.bytes
    assert search.richest == plain.richest
    for part in (0, 3, 6):
        limit = low + (high - low) * part // 10
        plan, bound = search.best(limit), search.bound(limit)
        assert plan.bytes <= limit and plan == schedule.evaluate(plan.saved)
        assert bound <= plan.seconds + 1e-12
        assert bound <= (plain.best(limit) or plan).seconds + 1e-12
        if part and plain.least.bytes <= limit:
            assert (whole + plan.seconds) / (whole + plain.best(limit).seconds) < 1.2


def layers_of(seed, layers=10, most=4):
    schedule, _ = layered(seed, layers, most)
    search = Layers(schedule, None, 0)
    return search if search.repeats else None


def test_cuts_over_averages_are_below_those_of_the_whole_step_and_near():
    """Any prices that all layers share: the sum of the folded network is a lower bound of the true minimum cut."""
    near = []
    for search in filter(None, map(layers_of, range(30))):
        folded, cuts, _ = search._certain
        rng, whole = random.Random(len(search.small.sources)), Cuts(search.small)
        for _ in range(3):
            price = {v: rng.random() * 2e-5 for v in folded.values}
            of = {folded.origin[v] + k * folded.period: price[v] for v in price for k in range(folded.weight[v])}
            assert set(of) == set(search.small.values)
            total, exact = cuts.cheapest(lambda v: price[v] * folded.weight[v])[1], whole.cheapest(of.__getitem__)[1]
            assert total <= exact + 1e-12
            near.append(total / exact if exact else 1.0)
    assert len(near) > 40 and statistics.mean(near) > 0.9


def test_moments_of_averages_are_below_the_memory_of_every_choice():
    checked = 0
    for seed, search in enumerate(map(layers_of, range(16))):
        if search is None:
            continue
        folded, _, rows = search._certain
        small, rng = search.small, random.Random(seed)
        runs = folded.computing(folded.returned)
        order = (*(i for i in folded.forward if runs[i]), *folded.backward)
        for _ in range(4):
            plan = small.evaluate({*small.returned, *(v for v in small.values if rng.random() < 0.5)})
            run, alive, cut = small.trace(plan)
            read = {small.root[a] for i in run[cut:] for a in small.sources[i]} | set(small.returned)
            plan = small.evaluate(plan.saved & read)
            run, alive, cut = small.trace(plan)
            share = {
                v: sum(folded.origin[v] + k * folded.period in plan.saved for k in range(folded.weight[v]))
                / folded.weight[v]
                for v in folded.values
            }
            at = {i: t for t, i in enumerate(run) if t < cut or small.sources[i] and i >= min(small.backward)}
            for t in rows.priced:
                least = rows.certain[t] + sum(w * share.get(v, 0.0) for v, w in rows.at(t).items())
                assert least <= alive[at[folded.origin[order[t]]]] + 1e-6, (seed, t)
                checked += 1
    assert checked > 500


@pytest.mark.parametrize("count", [6, 10, 30, 80])
def test_groups_are_all_layers_and_make_nearly_every_number(count):
    sizes = groups(count)
    sums = {sum(s) for n in range(len(sizes) + 1) for s in itertools.combinations(sizes, n)}
    assert sum(sizes) == count and min(sizes) >= 1 and len(sums) >= 0.75 * count


def test_uniform_choices_of_the_folded_step_have_the_peak_and_time_of_the_whole():
    exact = []
    for seed in range(12):
        schedule, _ = layered(seed, 20)
        small, _, _ = contract(schedule)
        found = repeats(small)
        folded, _ = fold(small, found, groups(found.count))
        search = Search(folded, None, [folded.edges])
        for plan in [p for p in search._seen.values() if p and folded.edges <= p.saved]:
            whole = small.evaluate(folded.expand(plan.saved))
            assert whole.seconds == pytest.approx(plan.seconds, rel=1e-9)
            assert plan.bytes >= whole.bytes, seed
            exact.append(plan.bytes == whole.bytes)
    assert len(exact) > 20 and statistics.mean(exact) > 0.8


def test_layers_that_something_reads_all_at_once_are_not_folded():
    schedule, _ = layered(5, 10)
    period = repeats(schedule).period
    reader = schedule.backward[0]
    schedule.sources[reader] = tuple(sorted({*schedule.sources[reader], *(3 + k * period for k in range(10))}))
    search = Layers(schedule, None, 0)
    assert search.repeats is None and search.best(search.least.bytes).bytes <= search.least.bytes


def test_no_layers_in_random_steps():
    assert all(repeats(step(seed, 12)[0]) is None for seed in range(10))
