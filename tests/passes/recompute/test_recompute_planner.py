"""The planner on random steps small enough to try every choice: plans fit, are the fastest, and the certificate is
true.
"""

import dataclasses
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_fx.graph.liveness import curve
from mindspeed_fx.partition.max_flow import SINK, SOURCE, Network
from mindspeed_fx.passes.recompute.problem import segments
from mindspeed_fx.passes.recompute.problem.remat_problem import RematProblem
from mindspeed_fx.passes.recompute.solve import budget_search
from mindspeed_fx.passes.recompute.solve.budget_search import Search
from mindspeed_fx.passes.recompute.solve.lower_bound import least_seconds, moments
from mindspeed_fx.passes.recompute.solve.row_generation import exact_seconds, optimum
from mindspeed_fx.passes.recompute.solve.threshold_accepting import anneal
from tests.passes.recompute.random_steps import step


def choices(schedule: RematProblem):
    """Every choice of what to save, evaluated; what the caller gets is kept anyhow."""
    kept = {schedule.root[i] for i in schedule.returned} & set(schedule.values)
    free = [v for v in schedule.values if v not in kept]
    plans = (
        schedule.evaluate({*kept, *some}) for n in range(len(free) + 1) for some in itertools.combinations(free, n)
    )
    return [p for p in plans if p]


def test_gaps_to_the_optimum_and_bounds_over_random_steps():
    pytest.importorskip("scipy", reason="integer programs need scipy")
    gaps, certified, programs = [], [], []
    for seed in range(0, 50, 10):
        schedule, whole = step(seed, 9)
        every = choices(schedule)
        search = Search(schedule)
        assert search.least.bytes == min(p.bytes for p in every), seed
        assert search.richest.seconds == 0.0
        low, high = search.least.bytes, search.richest.bytes
        for part in range(10):
            limit = low + (high - low) * part // 9
            best = min(p.seconds for p in every if p.bytes <= limit)
            plan, bound = search.best(limit), least_seconds(schedule, search.cuts, limit)
            assert plan.bytes <= limit
            assert bound is not None and bound <= best + 1e-12, (seed, part)
            if part % 3 == 0:
                exact = exact_seconds(schedule, limit)
                assert exact is not None and bound - 1e-10 <= exact <= best + 1e-12, (seed, part)
                programs.append((best - exact) / (whole + best))
            gaps.append((plan.seconds - best) / (whole + best))
            certified.append((plan.seconds - bound) / (whole + bound))
        assert search.best(low - 1) is None
    assert sum(gaps) / len(gaps) <= 0.01 and max(gaps) <= 0.03
    assert sum(certified) / len(certified) < 0.05  # the relaxation has a gap of its own
    assert sum(programs) / len(programs) < 0.02


def test_programs_prove_the_optimum_with_what_chains_hold_and_the_forward_prepares():
    """Rows for what is made again and for what the forward runs only for what is saved: never above the best choice,
    and nearly always its time.
    """
    pytest.importorskip("scipy", reason="integer programs need scipy")
    proved, without, tried = 0, 0, 0
    for seed in range(100, 122):
        schedule, _ = step(seed, 9)
        rng = random.Random(seed)
        schedule.workspace = [rng.choice((0, 0, 64, 512)) for _ in schedule.sources]
        schedule.prepares = [not r for r in schedule.computing(schedule.returned)]
        every = choices(schedule)
        low, high = min(p.bytes for p in every), max(p.bytes for p in every)
        for part in (0, 1, 3):
            limit = low + (high - low) * part // 8
            best = min((p for p in every if p.bytes <= limit), key=lambda p: p.seconds)
            found = optimum(schedule, limit)
            assert found.seconds is not None and found.seconds <= best.seconds + 1e-12, (seed, part)
            assert found.plan is None or found.plan.bytes <= limit and found.plan.seconds >= best.seconds - 1e-12, (
                seed,
                part,
            )
            again = optimum(schedule, limit, known=best)
            assert (
                again.plan is None or again.plan.seconds >= best.seconds - 1e-12
            ) and again.seconds <= best.seconds + 1e-12, (seed, part)
            tried += 1
            proved += found.plan is not None and found.seconds >= best.seconds * (1 - 1e-3) - 1e-12
            without += (optimum(schedule, limit, rounds=1).seconds or 0.0) >= best.seconds * (1 - 1e-3) - 1e-12
        assert optimum(schedule, min(p.bytes for p in every) // 4).seconds is None
    assert proved >= 0.9 * tried and proved > without, (proved, without, tried)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_the_linear_functions_are_below_the_memory_of_every_choice(seed):
    schedule, _ = step(seed, 7)
    rows = moments(schedule)
    for plan in choices(schedule):
        run, alive, cut = schedule.trace(plan)
        read = {schedule.root[a] for i in run[cut:] for a in schedule.sources[i]} | {
            schedule.root[i] for i in schedule.returned
        }
        if not plan.saved <= read:  # it saves what nobody reads: the same without that is no slower and no larger
            continue
        assert max(alive) == plan.bytes and run[alive.index(plan.bytes)] == plan.at
        memory = rows.memory(plan.saved)
        where = {node: t for t, node in enumerate(run) if t >= cut}
        for t, node in enumerate(schedule.backward, len(memory) - len(schedule.backward)):
            assert memory[t] <= alive[where[node]]
        assert max(memory) <= plan.bytes


def test_what_only_prepares_the_backward_takes_time_once_wherever_it_runs():
    """input 0 -> 1, returned; the backward 4 reads 3, made of 2, made of 1, which the forward runs only if 3 is
    saved.
    """
    numbers = range(5)
    made = RematProblem(
        sources=[(), (0,), (1,), (2,), (3,)],
        root=list(numbers),
        size=[0, 8, 8, 8, 8],
        saved_bytes=[0, 8, 8, 8, 8],
        seconds=[0.0, 1.0, 2.0, 4.0, 0.0],
        savable=[0 < i < 4 for i in numbers],
        must_recompute=[False] * 5,
        is_input=[i == 0 for i in numbers],
        backward=[4],
        needed=[3],
        returned=[1],
        gradients=[4],
        prepares=[False, False, True, True, False],
    )
    assert made.evaluate([1]).seconds == 0.0 and made.evaluate([1]).recompute == (2, 3)
    assert made.evaluate([1, 3]).seconds == 0.0 and made.evaluate([1, 3]).recompute == ()
    assert made.evaluate([]).seconds == 1.0  # the caller's value is made twice


def test_a_limit_that_the_certain_memory_exceeds_has_no_plan():
    schedule, _ = step(3, 8)
    assert least_seconds(schedule, Search(schedule).cuts, 0) is None


def test_what_must_not_run_again_is_saved_and_what_is_forced_never():
    schedule, _ = step(11, 9)
    free = [
        v for v in schedule.values if schedule.sources[v] and v not in {schedule.root[i] for i in schedule.returned}
    ]
    schedule.seconds[free[0]] = float("inf")
    schedule.must_recompute[free[-1]] = True
    for plan in Search(schedule).hull:
        assert free[0] not in plan.recompute and free[-1] not in plan.saved


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_flow_is_the_least_cut_and_goes_on_when_capacities_rise(data):
    count = data.draw(st.integers(2, 6))
    edges = data.draw(
        st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1), st.integers(0, 9)), max_size=14)
    )
    network = Network(count)
    numbers = [network.add(a, b, c) for a, b, c in edges]
    more = data.draw(st.lists(st.integers(0, 5), min_size=len(edges), max_size=len(edges)))
    flow = 0
    for add in ([0] * len(edges), more):
        for e, n in zip(numbers, add):
            network.room[e] += n
        edges = [(a, b, c + n) for (a, b, c), n in zip(edges, add)]
        flow += network.solve()
        sides = [{SINK, *some} for n in range(count - 1) for some in itertools.combinations(range(2, count), n)]
        cuts = {frozenset(s): sum(c for a, b, c in edges if a not in s and b in s) for s in sides}
        assert flow == min(cuts.values())
        found = frozenset(v for v in range(count) if network.sink_side()[v])
        assert SOURCE not in found and cuts[found] == flow


def test_a_call_with_two_results_fills_both_whoever_is_read():
    """input 0 -> call 1 -> results 2 and 3; the backward 4 reads 3, then 5 reads 2."""
    numbers = range(6)
    made = RematProblem(
        sources=[(), (0,), (1,), (1,), (3,), (2, 4)],
        root=list(numbers),
        size=[0, 0, 8, 16, 1, 1],
        saved_bytes=[0, 0, 8, 16, 1, 1],
        seconds=[0.0, 1.0, 0.0, 0.0, 0.0, 0.0],
        savable=[i in (2, 3) for i in numbers],
        must_recompute=[False] * 6,
        is_input=[i == 0 for i in numbers],
        backward=[4, 5],
        needed=[2, 3],
        returned=[],
        gradients=[5],
        maker={2: 1, 3: 1},
    )
    again = made.evaluate([])
    assert made.trace(again)[:2] == ([1, 3, 4, 2, 5], [24, 24, 25, 9, 10]) and again.seconds == 1.0
    one = made.evaluate([3])  # the other is made again, and 3 once more for a moment
    assert made.trace(one)[:2] == ([0, 1, 3, 4, 1, 2, 5], [0, 24, 16, 17, 25, 9, 10])


def test_the_curve_counts_both_ends():
    assert curve(4, [(8, 0, 1), (2, 1, 3), (1, 3, 3)]) == [8, 10, 2, 3]
    assert curve(0, []) == []


def test_a_walk_leaves_what_the_cuts_come_to():
    gains = []
    for seed, parts in ((2016, (1,)), (2029, (2, 3))):
        schedule, whole = step(seed, 40)
        for part in parts:
            planner = Search(schedule)
            limit = planner.least.bytes + (planner.richest.bytes - planner.least.bytes) * part // 9
            start, found = planner._fastest(limit), planner.best(limit)
            assert found.bytes <= limit
            gains.append((start.seconds - found.seconds) / whole)
    assert min(gains) > 0.01, gains


@pytest.mark.parametrize("seed", range(3))
def test_a_walk_ends_at_a_plan_that_fits_and_is_no_slower_and_goes_the_same_way_again(seed):
    schedule, _ = step(seed, 30)
    planner = Search(schedule)
    start = planner.least
    walks = [planner.walk(start, start.bytes + 64) for _ in range(2)]
    assert walks[0].saved == walks[1].saved and walks[0].seconds <= start.seconds and walks[0].bytes <= start.bytes + 64
    before, seconds = schedule.evaluations, lambda p: p.seconds
    walk = anneal(schedule, start, planner.cuts.values, 0, schedule.evaluate, seconds, seconds, 0.3)
    assert walk.saved == start.saved and schedule.evaluations == before


def test_a_choice_that_takes_too_long_is_no_plan():
    schedule, _ = step(7, 12)
    slow = schedule.evaluate(Search(schedule).least.saved)
    assert slow.seconds > 0 and schedule.evaluate(slow.saved, slow.seconds).bytes == slow.bytes
    assert schedule.evaluate(slow.saved, slow.seconds * 0.99) is None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_larger_random_steps(seed):
    schedule, whole = step(1000 + seed, 15)
    every, search = choices(schedule), Search(schedule)
    low, high = search.least.bytes, search.richest.bytes
    assert low <= 1.03 * min(p.bytes for p in every)
    for part in range(10):
        limit = low + (high - low) * part // 9
        best = min(p.seconds for p in every if p.bytes <= limit)
        assert (search.best(limit).seconds - best) / (whole + best) <= 0.03


def residual(layers: int) -> RematProblem:
    """Layers x' = x + narrow(wide(x)): what is narrow is dear to make, and the backward of a layer reads all three."""
    sources, size, seconds = [(), (0,)], [0, 8], [0.0, 1e-6]
    needed, x = [], 1
    for _ in range(layers):
        wide = len(sources)
        sources += [(x,), (wide,), (x, wide + 1)]
        size += [16, 8, 8]
        seconds += [1e-6, 50e-6, 1e-6]
        needed.append((x, wide, wide + 1))
        x = wide + 2
    count, gradient = len(sources), 0
    backward = [count]
    sources.append((x,))
    size.append(8)
    for reads in reversed(needed):
        gradient = len(sources)
        sources.append((*reads, gradient - 1))
        size.append(8)
        backward.append(gradient)
    total = len(sources)
    seconds += [1e-6] * (total - count)
    return RematProblem(
        sources=sources,
        root=list(range(total)),
        size=size,
        saved_bytes=size,
        seconds=seconds,
        savable=[0 < i < count for i in range(total)],
        must_recompute=[False] * total,
        is_input=[i == 0 for i in range(total)],
        backward=backward,
        needed=sorted({x, *(i for r in needed for i in r)}),
        returned=[x],
        gradients=[gradient],
    )


def test_a_residual_stream_is_made_again_segment_by_segment(monkeypatch):
    schedule = residual(24)
    places = segments.crossings(schedule)
    assert len(places) >= 23 and all(len(p) == 1 and schedule.saved_bytes[next(iter(p))] == 8 for p in places[1:-1])
    assert all(one != other for one, other in zip(places, places[1:])), "two places where the same crosses are one"
    monkeypatch.setattr(budget_search, "TRIES", 0)  # what the cuts alone come to
    small = Search(schedule).least
    monkeypatch.setattr(budget_search, "boundaries", lambda s: [])
    large = Search(schedule).least
    assert small.bytes < 0.8 * large.bytes, (small.bytes, large.bytes)


def test_neighbours_at_which_the_same_is_widest_are_one_place():
    """What a layer makes inside is small beside the stream that goes around it: three places of each layer are one."""
    schedule = residual(8)
    inside = [i for i in range(2, 2 + 3 * 8) if (i - 2) % 3 < 2]
    sizes = [1 if i in inside else 80 for i in range(len(schedule.saved_bytes))]
    places = segments.crossings(dataclasses.replace(schedule, saved_bytes=sizes))
    widest = [max(p, key=lambda v: (sizes[v], v)) for p in places]
    assert len(widest) >= 7 and len(set(widest)) == len(widest)
