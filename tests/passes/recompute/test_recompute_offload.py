"""Activations in host memory: plans that the link can carry out, copies that are never read too early, and a peak that
is the modelled one.
"""

import operator
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mindspeed_fx
from mindspeed_fx.compat import fake
from mindspeed_fx.compat.memory_meter import _Meter
from mindspeed_fx.errors import OptionError
from mindspeed_fx.graph.storage import views_of
from mindspeed_fx.options import Options
from mindspeed_fx.partition.offload import move
from mindspeed_fx.passes.recompute.solve.budget_search import Search
from mindspeed_fx.passes.recompute.solve.offload import Offload
from tests.passes.recompute.random_steps import step

OFFLOAD, RELOAD, WAIT = (getattr(torch.ops.mindspeed, n).default for n in ("offload", "reload", "wait_copy"))
MIB = 2**20


def played(schedule, plan, rate):
    """Seconds of a step whose two links and whose compute are played one call after the other, waits where the plan has
    them.
    """
    run, _, cut = schedule.trace(plan)
    away = {v: (free, back) for v, free, back in plan.moves}
    last = {
        v: max(t for t, i in enumerate(run[:cut]) if v in {schedule.root[a] for a in (i, *schedule.sources[i])})
        for v in away
    }
    first = {
        v: min(t for t, i in enumerate(run[cut:], cut) if v in {schedule.root[a] for a in schedule.sources[i]})
        for v in away
    }
    now = out = 0.0
    over = {}
    for t, i in enumerate(run[:cut]):
        now = max([now, *(over[v] for v in away if away[v][0] == t)]) + schedule.run_seconds[i]
        for v in sorted(v for v in away if last[v] == t):
            out = over[v] = max(out, now) + schedule.saved_bytes[v] / rate
    now = back = max([now, *(over[v] for v in away if away[v][0] == cut)])
    there = {}
    for t, i in enumerate(run[cut:], cut):
        for v in sorted((v for v in away if away[v][1] == t), key=lambda v: (first[v], v)):
            back = there[v] = max(back, now) + schedule.saved_bytes[v] / rate
        now = max([now, *(there[v] for v in away if first[v] == t)]) + schedule.run_seconds[i]
    return now


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([2e6, 2e7, 2e8, 1e12]), st.integers(0, 9))
def test_plans_fit_are_no_slower_and_take_the_time_that_was_modelled(seed, rate, part):
    schedule, _ = step(seed, 9)
    search = Search(schedule)
    limit = search.least.bytes + (search.richest.bytes - search.least.bytes) * part // 10
    plain = search.best(limit)
    plan = Offload(search, schedule.values, rate).best(limit, plain)
    assert plan.bytes <= limit and plan.seconds <= plain.seconds
    run, alive, _ = schedule.trace(plan)
    assert max(alive) == plan.bytes
    modelled = sum(schedule.run_seconds[i] for i in run) + plan.seconds - schedule.evaluate(plan.saved).seconds
    assert played(schedule, plan, rate) <= modelled * (1 + 1e-9)


def test_a_link_without_end_needs_nothing_made_again_and_none_moves_nothing():
    schedule, _ = step(7, 9)
    search = Search(schedule)
    limit = search.least.bytes + 1
    plain = search.best(limit)
    assert plain.seconds > 0
    free = Offload(search, schedule.values, 1e18).best(limit, plain)
    assert free.seconds < plain.seconds and free.moves
    assert Offload(search, schedule.values, 1e18, host=0).best(limit, plain) == plain
    few = Offload(search, schedule.values, 1e18, host=schedule.saved_bytes[free.moves[0][0]])
    assert sum(schedule.saved_bytes[v] for v, _, _ in few.best(limit, plain).moves) <= few.host
    assert few.least().bytes <= search.least.bytes


class Sines(torch.nn.Module):
    def __init__(self, layers=5):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = torch.sin(layer(x))
        return x.sum()


class _OnDevice(_Meter):
    """Bytes alive, those in host memory left out; counts the copies."""

    copies = 0

    @classmethod
    def is_infra_mode(cls):
        return True  # else Dynamo runs the model as it is

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func is OFFLOAD:
            self.copies += 1
            self.input_storages.add(fake.storage_of(out))
            self.alive.pop(fake.storage_of(out), None)
        return out


def trained(model, x, **options):
    """(loss and gradients, peak bytes on the device beside parameters and inputs, copies to the host) of the second
    step.
    """
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="mindspeed", options={"codegen": "eager", **options})
    compiled(x).backward()
    model.zero_grad(set_to_none=True)
    with _OnDevice([x, *model.parameters()]) as meter:
        loss = compiled(x)
        loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())], meter.peak, meter.copies


def decided(model, x, **options):
    torch._dynamo.reset()
    report = mindspeed_fx.explain(model, x, options={"codegen": "eager", **options})
    (run,) = [r.report for r in report.graphs[0].runs if r.report.name == "recompute.budget"]
    return run


@pytest.fixture(scope="module")
def sines():
    torch.manual_seed(0)
    return Sines(), torch.randn(2048, 64)


def test_bitwise_the_same_in_the_memory_that_was_modelled(sines):
    model, x = sines
    exact, whole, _ = trained(model, x)
    values, peak, copies = trained(model, x, memory_budget="min", offload=True)
    assert all(torch.equal(a, b) for a, b in zip(values, exact, strict=True))
    run = decided(model, x, memory_budget="min", offload=True)
    assert (
        copies == len(run.moves) > 0
        and not run.skipped
        and sum(s.operator == "offloaded" for s in run.rewrites) == len(run.moves)
    )
    inputs = sum(t.numel() * t.itemsize for t in (x, *model.parameters()))
    modelled = run.curves["this plan"].peak - inputs
    assert peak == pytest.approx(modelled, rel=0.03) and peak < 0.75 * whole
    assert "| offload |" in run.files["activations.md"]


def graphs(model, x, **options):
    """Forward and backward as they are after the cut."""
    from mindspeed_fx.passes import runner

    found, own = [], runner.move

    def seen(forward, backward, moves):
        kept = own(forward, backward, moves)
        found.extend((forward, backward))
        return kept

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "move", seen)
        values, _, copies = trained(model, x, memory_budget="min", offload=True, **options)
    return *found[:2], values


@pytest.mark.parametrize("target", ["cpu", "npu"])
def test_copies_start_behind_the_last_reader_and_are_waited_for_as_late_as_can_be(sines, target):
    """On npu the graph is traced; its copies run on cpu."""
    model, x = sines
    forward, backward, values = graphs(model, x, target=target, hardware="ascend910b2" if target == "npu" else None)
    place = {n: i for i, n in enumerate(forward.graph.nodes)}
    outs = forward.graph.find_nodes(op="call_function", target=OFFLOAD)
    assert outs
    for host in outs:
        (x_there,), (done,) = host.args, host.users
        assert done.target is WAIT and done.args == (host, x_there) and host.meta["val"].device.type == "cpu"
        last = max(
            place[n]
            for v in views_of(x_there)
            for n in (v, *v.users)
            if n.target not in (OFFLOAD, WAIT) and n.op != "output"
        )
        assert all(n.target is OFFLOAD for n in place if last < place[n] <= place[host])
    at = {n: i for i, n in enumerate(backward.graph.nodes)}
    backs = backward.graph.find_nodes(op="call_function", target=RELOAD)
    assert len(backs) == len(outs)
    early = 0
    for coming in backs:
        (there,) = coming.users
        reader = min(there.users, key=at.__getitem__)
        between = [n for n in at if at[there] < at[n] < at[reader]]
        assert there.target is WAIT and all(n.target in (WAIT, RELOAD) for n in between)
        early += any(at[coming] < at[n] < at[there] and n.target not in (RELOAD, WAIT) for n in at)
    assert early  # something is computed while the copies come back
    exact, *_ = trained(model, x, target=target)
    assert all(torch.equal(a, b) for a, b in zip(values, exact, strict=True))


def test_a_copy_takes_place_when_it_is_waited_for():
    x = torch.randn(3, 5).t()
    host = OFFLOAD(x)
    assert host.isnan().all() and host.stride() == x.stride()
    assert torch.equal(WAIT(host, x), x)
    with pytest.raises(RuntimeError, match="no copy to this tensor is under way"):
        WAIT(host, x)
    back = RELOAD(host, torch.device("cpu"))
    assert back.isnan().all() and WAIT(back, host) is not None and torch.equal(back, x)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"offload": 1}, '"offload" takes True or False, not 1'),
        ({"offload": True}, '"offload" is True, but what is moved to host memory is planned for a "memory_budget"'),
        ({"host_memory": "1GiB"}, '"host_memory" is .1GiB., but "offload" is False'),
        (
            {"host_bandwidth": "fast", "offload": True, "memory_budget": "min"},
            '"host_bandwidth" is .fast.; valid: bytes',
        ),
        ({"host_bandwidth": 0, "offload": True, "memory_budget": "min"}, '"host_bandwidth" is 0; valid'),
        ({"recompute": {"mlp": "offload"}}, 'maps "mlp" to "offload", but option "offload" is False'),
        ({"recompute": {"mlp": "ofload"}, "offload": True, "memory_budget": "min"}, 'did you mean "offload"'),
        ({"recompute": {"mlp": "offload"}, "offload": True}, 'is planned for a "memory_budget", which is None'),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(OptionError, match=message):
        Options(**options)
    with pytest.raises(OptionError, match='did you mean "host_bandwidth"'):
        Options.parse({"host_bandwith": 3})


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([2e6, 2e8]))
def test_what_is_always_moved_is_moved_in_every_plan(seed, rate):
    schedule, _ = step(seed, 9)
    search = Search(schedule)
    read = {schedule.root[a] for i in schedule.backward for a in schedule.sources[i]}
    wished = [v for v in schedule.values if v in read and v not in schedule.returned][:1]
    for v in wished:
        schedule.seconds[v] = float("inf")
    search = Search(schedule)
    moves = Offload(search, schedule.values, rate, always=wished)
    least = moves.least()
    for limit in (least.bytes, (least.bytes + search.richest.bytes) // 2, search.richest.bytes):
        plan = moves.best(limit, search.best(limit)) or least
        assert plan.bytes <= limit and set(wished) <= {v for v, _, _ in plan.moves} and not moves.left(plan)


class Total(torch.nn.Module):
    def forward(self, x):
        return x.sum()


def test_a_module_whose_activations_are_moved_by_name():
    torch.manual_seed(0)
    model, x = (
        torch.nn.Sequential(*(m for _ in range(3) for m in (torch.nn.Linear(64, 64), torch.nn.Tanh()))),
        torch.randn(2048, 64),
    )
    model.append(Total())
    exact, *_ = trained(model, x)
    options = dict(
        memory_budget=1.0, offload=True, recompute={"1": "offload", "3": "offload", "2": "offload", "nothing": "save"}
    )
    run = decided(model, x, **options)
    values, _, copies = trained(model, x, **options)
    moved = [s.module for s in run.rewrites if s.operator == "offloaded"]
    assert moved == ["1", "3"] and copies == len(run.moves) == 2  # what else fits stays
    assert any(
        s.reason == "2: is not moved to host memory, since nothing in the backward reads it" for s in run.skipped
    )
    assert all(torch.equal(a, b) for a, b in zip(values, exact, strict=True))
    assert "| 1: offload |" in run.files["activations.md"] and any("nothing" in s.reason for s in run.skipped)
    with pytest.raises(
        Exception, match='"host_memory" is 1024 bytes, but what option "recompute" maps to "offload" takes'
    ):
        decided(model, x, host_memory=1024, **options)
    slow = decided(model, x, host_bandwidth="1MB", **options)
    assert len(slow.moves) == 2 and "of the copies are not hidden" in " ".join(slow.notes)


@pytest.mark.slow
def test_with_generated_code():
    torch.manual_seed(0)
    model, x = Sines(), torch.randn(2048, 64)
    exact, *_ = trained(model, x, codegen="inductor", memory_budget="1GiB")
    run = decided(model, x, codegen="inductor", memory_budget="min", offload=True)
    values, _, copies = trained(model, x, codegen="inductor", memory_budget="min", offload=True)
    assert copies == len(run.moves) > 0 and not run.skipped
    assert all(torch.equal(a, b) for a, b in zip(values, exact, strict=True))


def test_the_host_takes_what_it_has_room_for():
    search = SimpleNamespace(schedule=SimpleNamespace(saved_bytes=[3, 5, 8]))
    asked = [SimpleNamespace(host=host, search=search, always=(0,)) for host in (7, 8, None)]
    assert [Offload._allowed(own, [1]) for own in asked] == [False, True, True]


def test_the_code_of_graphs_with_moves_is_written_anew():
    graphs = [torch.fx.symbolic_trace(lambda x: x + 1) for _ in range(2)]
    for gm in graphs:
        next(n for n in gm.graph.nodes if n.target is operator.add).target = operator.sub
    assert move(*graphs, {}) == {} and [gm(torch.ones(1)).item() for gm in graphs] == [0, 0]
