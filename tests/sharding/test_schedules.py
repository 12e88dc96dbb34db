"""Schedules and unequal stages in the search: what torch's orders take, the best combination of all, and the layers of
each stage.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("scipy", reason="the search needs scipy's HiGHS")

import mindspeed_fx
from mindspeed_fx.cost.hardware import hardware
from mindspeed_fx.cost.pipeline import Parts, play_stages, torch_order
from mindspeed_fx.errors import OptionError
from mindspeed_fx.planning import generation
from mindspeed_fx.planning.balanced_layers import balanced_layers
from mindspeed_fx.planning.layer_lists import layers_of
from mindspeed_fx.planning.search.branch_and_bound import branch_and_bound
from mindspeed_fx.planning.search.costs import Prices
from mindspeed_fx.planning.search.layouts import RECOMPUTE, Layout, microbatches
from mindspeed_fx.planning.search.model_graph import trace_model
from mindspeed_fx.planning.search.schedules import (
    V_SHAPED,
    in_flight,
    rank_of_stage,
    schedules,
    waiting_seconds,
)
from mindspeed_fx.planning.search.solve import Program
from mindspeed_fx.planning.search.stage_loads import AFTER, BEFORE, Load, balanced_sizes, even_sizes, joined, rank_bytes
from mindspeed_fx.planning.search.stage_step import _step, part_loads
from mindspeed_fx.planning.stage_module import Stage, stages
from mindspeed_fx.sharding.plan import ShardingError
from tests.sharding import virtual_ranks
from tests.sharding.llama import Llama
from tests.sharding.searched_problems import large

GiB = 2**30
HW = hardware("ascend910b2")


def layouts(p: int, m: int) -> list[Layout]:
    base = Layout(pp=p, microbatches=m)
    return [dataclasses.replace(base, schedule=name, virtual=v) for name, v in schedules(base, 64)]


def played(layout: Layout, parts: list[Parts]):
    order = torch_order(layout.schedule, layout.pp, layout.pp * layout.virtual, layout.microbatches)
    return order, play_stages(order, parts)


@pytest.mark.parametrize("p,m", [(2, 2), (2, 3), (2, 8), (4, 4), (4, 6), (4, 16), (8, 20)])
def test_prices_are_those_of_the_orders_that_torch_plays(p, m):
    """Idle time and kept microbatches of every schedule, with something recomputed before the gradients of inputs."""
    assert len(layouts(p, m)) >= 7
    for layout in layouts(p, m):
        for forward, recompute, inputs, weights in ((1.0, 0.0, 1.0, 1.0), (1.3, 0.4, 1.5, 0.9)):
            each = Parts(forward, recompute, inputs, weights)
            stages = [each] * (p * layout.virtual)
            steady = layout.virtual * (forward + recompute + inputs + weights)
            _, step = played(layout, [Parts(forward, 0.0, recompute + inputs, weights)] * len(stages))
            assert waiting_seconds(layout, stages, steady) == pytest.approx(step.seconds - m * steady), layout
            assert in_flight(layout, 0) == pytest.approx(step.waiting / layout.virtual), layout


def test_the_rank_of_each_stage_is_torchs():
    for layout in layouts(4, 8):
        order, _ = played(layout, [Parts(1, 0, 1, 1)] * (4 * layout.virtual))
        for rank, groups in enumerate(order):
            assert {rank_of_stage(layout, s) for group in groups for _, s, _ in group} == {rank}


@pytest.mark.parametrize("longer,off", [([15], 0.02), ([0], 0.07), ([0, 15], 0.07), ([0, 3, 6, 9, 12, 15], 0.1)])
def test_unequal_stages_take_what_their_orders_take(longer, off):
    """The fullest rank all the time, the others once: exact for V-shaped schedules, which are played."""
    for layout in layouts(4, 16):
        count = 4 * layout.virtual
        scale = [1.0 + 0.3 * (s * 16 // count in longer) for s in range(count)]
        parts = [Parts(x, 0.0, x, x) for x in scale]
        fullest = max(sum(3 * x for s, x in enumerate(scale) if rank_of_stage(layout, s) == r) for r in range(4))
        modelled = 16 * fullest + waiting_seconds(layout, parts, fullest)
        allowed = 1e-9 if layout.schedule in V_SHAPED else off
        assert modelled == pytest.approx(played(layout, parts)[1].seconds, rel=allowed), layout


@pytest.fixture(scope="module")
def problem():
    return trace_model(*large(layers=8, batch=16, seq=2048), {})


@pytest.mark.parametrize("memory", [60, 20])
@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_best_of_all_schedules_microbatches_and_recomputation(problem, tp, memory):
    """Every combination by itself, with the same mesh; with little memory another one than with much."""
    limit, found, fixed = memory * GiB / (1.5 if tp > 1 else 1), {}, {"pp": 2, "tp": tp}
    prices = Prices(problem, HW)
    for m in microbatches(2, 16):
        for recompute in RECOMPUTE:
            base = Layout(pp=2, tp=tp, microbatches=m, recompute=recompute)
            for name, v in schedules(base, 8):
                layout = dataclasses.replace(base, schedule=name, virtual=v)
                program = Program(prices, layout, limit)
                program.priced()
                if (result := program.solve(integral=True)) is not None:
                    solution = program.evaluate(result[1], result[0])
                    assert result[0] <= solution.seconds * (1 + 1e-6), layout
                    if solution.memory <= limit:
                        found[layout] = solution.seconds
    best = branch_and_bound(problem, HW, 2 * tp, limit, keep=1, fixed=fixed).solutions[0]
    assert best.seconds == pytest.approx(min(found.values()), rel=1e-4) and best.memory <= limit
    assert len({(x.schedule, x.virtual) for x in found}) >= 6 and best.layout.virtual > 1
    if memory == 20 and tp == 1:  # two ranks of tp hold half of what binds one
        free = branch_and_bound(problem, HW, 2 * tp, 1e15, keep=1, fixed=fixed).solutions[0]
        assert (free.layout.recompute, free.layout.schedule) != (best.layout.recompute, best.layout.schedule)


def test_a_bubble_counts_what_is_recomputed(problem):
    found = branch_and_bound(problem, HW, 4, 60 * GiB, keep=1, fixed={"pp": 4}, recompute=("full",)).solutions[0]
    assert found.layout.recompute == "full" and found.parts["recompute"] > 0 and found.parts["bubble"] > 0


def test_the_plan_says_why():
    plan = mindspeed_fx.plan(*large(layers=4, batch=8), mesh={"pp": 2}, hardware="ascend910b2", trace=False)
    (line,) = [x for x in str(plan).splitlines() if x.startswith("schedule: ")]
    assert f"schedule: {plan.layout.schedule}, {plan.layout.virtual} stages a rank, idle for " in line
    assert "1F1B:1 +" in line and "DualPipeV:2" in line


# --------------------------------------------------------------------------- layers of each stage


def test_layers_by_time():
    loads = {0: Load(forward=1.0), 1: Load(forward=3.0), BEFORE: Load(forward=0.5), AFTER: Load(forward=4.0)}
    two, order = Layout(pp=2, microbatches=4), [0, 0, 0, 0, 1, 1]
    assert balanced_sizes(two, order, loads, 1e9) == [5, 1]
    assert balanced_sizes(Layout(pp=6, microbatches=6), order, loads, 1e9) == [1] * 6
    assert balanced_sizes(Layout(pp=7, microbatches=7), order, loads, 1e9) is None
    sizes = balanced_sizes(Layout(pp=2, microbatches=4, schedule="Interleaved1F1B", virtual=2), order, loads, 1e9)
    assert sum(sizes) == 6 and min(sizes) >= 1


def test_layers_leave_a_rank_that_does_not_fit():
    loads = {0: Load(forward=1.0, state=1.0, kept=1.0), BEFORE: Load(), AFTER: Load(forward=2.0)}
    layout, order = Layout(pp=2, microbatches=4), [0] * 8
    assert balanced_sizes(layout, order, loads, 1e9) == [5, 3]
    sizes = balanced_sizes(layout, order, loads, 13.0)  # two microbatches are kept on the first rank, one on the last
    assert sizes == [4, 4] and max(sum(x.values()) for x in rank_bytes(layout, order, loads, sizes)) == 12.0
    assert joined(loads, {0: 3, AFTER: 1}).forward == 5.0


def test_no_split_is_faster(problem):
    """Of two stages all splits are tried: what is chosen is the least, and no bound is above it."""
    program = Program(Prices(problem, HW), Layout(pp=2, microbatches=4), 1e15)
    program.priced()
    bound, chosen = program.solve(integral=True)
    loads, _, _ = part_loads(program, chosen)
    found = {i: sum(_step(program, loads, [i, 8 - i])[0].values()) for i in range(1, 8)}
    solution = program.evaluate(chosen, bound)
    assert bound <= min(found.values()) * (1 + 1e-9) and solution.even == pytest.approx(found[4])
    sizes = balanced_sizes(program.layout, program.order, loads, 1e15)
    assert found[sizes[0]] == pytest.approx(min(found.values()), rel=1e-3)


def headed(**sizes):
    """A model whose output layer takes as long as some of its layers."""
    return large(**{"layers": 8, "batch": 16, "seq": 2048, "ffn": 4096, "vocab": 262144, **sizes})


def test_a_large_output_layer_gets_fewer_layers():
    plan = mindspeed_fx.plan(*headed(), mesh={"pp": 2}, hardware="ascend910b2", trace=False, memory="400GiB")
    sizes = plan.solution.layers
    assert sizes and sum(sizes) == 8 and sizes[-1] < max(sizes)
    assert plan.schedule == f"{plan.layout.schedule}:{plan.layout.virtual}:{'+'.join(map(str, sizes))}"
    assert plan.solution.even > plan.seconds * 1.015 and f"layers of the stages: {'+'.join(map(str, sizes))}" in str(
        plan
    )


def test_layers_that_are_alike_stay_even():
    plan = mindspeed_fx.plan(*headed(vocab=512), mesh={"pp": 2}, hardware="ascend910b2", trace=False, memory="400GiB")
    assert plan.solution.layers is None and plan.schedule.count(":") == 1


def test_layers_of_stages_by_hand_are_balanced():
    with torch.device("meta"):
        model, given = Llama(6, vocab=65536).double(), virtual_ranks.batch(4)
    sizes = balanced_layers(model, (), given, Layout(pp=2, microbatches=2))
    assert sum(sizes) == 6 and sizes[0] > sizes[1] >= 1
    assert even_sizes(6, 2) == [3, 3]


class Headless(nn.Module):
    """A first layer of another kind, which is in no run."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16), *(nn.Sequential(nn.Linear(16, 16)) for _ in range(5))])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.sum()


def test_layers_of_another_kind_are_counted():
    model, x = Headless(), torch.rand(4, 16)
    sizes = balanced_layers(model, (x,), None, Layout(pp=2, microbatches=2))
    assert sum(sizes) == sum(n for _, n in layers_of(model, 2)) == 6
    parts = stages(model, 2, (x,), layers=sizes, options=virtual_ranks.EAGER)
    assert torch.allclose(parts[1](parts[0](x)), model(x))


def test_layers_that_a_dictionary_numbers_are_a_list():
    numbered = nn.ModuleDict({str(i): nn.Linear(2, 2) for i in range(3)})
    assert layers_of(nn.Sequential(OrderedDict(blocks=numbered, last=nn.ReLU())), 2) == (("blocks", 3),)


def test_wrong_words_for_layers():
    model, x = Headless(), torch.rand(4, 16)
    with pytest.raises(ShardingError, match="valid: 2 numbers from 1, 6 together"):
        stages(model, 2, (x,), layers=[1, 1], options=virtual_ranks.EAGER)


def test_the_likeliest_token_is_of_temperature_zero(monkeypatch):
    stage = SimpleNamespace(submod=object.__new__(Stage))
    monkeypatch.setattr(generation.pipelining, "stages_of", lambda schedule: [stage])
    tokens = torch.zeros(1, 3, dtype=torch.long)
    assert torch.equal(generation.generate(None, tokens, 0, temperature=0.0), tokens)
    with pytest.raises(OptionError, match="temperature"):
        generation.generate(None, tokens, 0, temperature=-0.1)
