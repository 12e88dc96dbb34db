"""The simulator against schedules worked out by hand, and its memory against a walk with real sets."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_fx.passes.overlap.model.reasons import hideable, independent_seconds, reasons, share_hidden
from mindspeed_fx.passes.overlap.model.simulator import memory_curve, simulate
from mindspeed_fx.passes.overlap.model.tasks import COMPUTE, Buffer, Task, TaskGraph
from mindspeed_fx.passes.overlap.scheduler.local_search import schedule
from mindspeed_fx.report.timeline import chrome_trace, picture
from tests.passes.overlap.random_tasks import random_tasks


def gather_then_two_products():
    """gather 3 s, wait, product that needs it 2 s, product that does not 4 s; 5 bytes gathered, 7 bytes per product."""
    tasks = [
        Task("gather", 3.0, "dp", (), "dp", "all_gather"),
        Task("wait", 0.0, COMPUTE, (0,), kind="wait"),
        Task("needs", 2.0, COMPUTE, (1,)),
        Task("free", 4.0, COMPUTE, ()),
    ]
    buffers = [Buffer(0, 5, (1, 2)), Buffer(2, 7, kept=True), Buffer(3, 7, kept=True)]
    return TaskGraph(tasks, buffers)


def test_as_given_the_gather_is_exposed():
    t = simulate(gather_then_two_products())
    assert (t.seconds, t.exposed) == (9.0, {0: 3.0})
    assert t.memory == [5, 5, 12, 14] and t.peak == 14


def test_an_order_is_kept_as_it_was_given():
    order = [0, 1, 2, 3]
    t = simulate(gather_then_two_products(), order)
    order.reverse()
    assert t.order == [0, 1, 2, 3]


def test_how_much_of_what_could_be_hidden_is():
    assert share_hidden(simulate(gather_then_two_products())) == 0.0
    assert share_hidden(schedule(gather_then_two_products(), allowance=5)) == 1.0
    assert share_hidden(simulate(TaskGraph([Task("alone", 1.0, COMPUTE, ())]))) is None


def test_scheduled_it_is_hidden_and_the_bound_is_reached():
    graph = gather_then_two_products()
    t = schedule(graph, allowance=5)
    assert t.seconds == graph.bound() == 6.0 and not t.exposed
    assert [graph.tasks[i].name for i in t.order] == ["gather", "free", "wait", "needs"]


def test_without_allowance_memory_keeps_it_exposed_and_the_reason_says_so():
    graph = gather_then_two_products()
    given_ = simulate(graph)
    t = schedule(graph)  # gathering before "free" needs 5 + 7 + 7 bytes
    assert t.peak <= given_.peak and t.seconds == 9.0
    why = reasons(t, schedule(graph, allowance=None))
    assert list(why) == [0] and "memory allowance" in why[0]


def test_a_link_is_busy_with_one_transfer_at_a_time_and_the_tail_is_exposed():
    tasks = [
        Task("work", 1.0),
        Task("a", 2.0, "dp", (0,), "dp", "all_reduce"),
        Task("b", 2.0, "dp", (0,), "dp", "all_reduce"),
        Task("c", 3.0, "tp", (0,), "tp", "all_reduce"),
    ]
    t = simulate(TaskGraph(tasks))
    assert (t.start[1], t.start[2], t.start[3]) == (1.0, 3.0, 1.0)
    assert t.seconds == 5.0 and sum(t.exposed.values()) == pytest.approx(4.0)


def test_no_independent_work_is_said():
    tasks = [
        Task("work", 1.0),
        Task("a", 2.0, "tp", (0,), "tp", "all_reduce"),
        Task("wait", 0.0, COMPUTE, (1,), kind="wait"),
        Task("more", 1.0, COMPUTE, (2,)),
    ]
    graph = TaskGraph(tasks)
    t = schedule(graph)
    assert t.seconds == 4.0 == graph.bound() and hideable(graph) == [] and independent_seconds(graph, 1) == 0
    assert "no independent work" in reasons(t)[1]


def test_bad_graphs_and_orders_are_refused():
    with pytest.raises(ValueError, match='task "a" needs "b", which comes later'):
        TaskGraph([Task("a", 1.0, needs=(1,)), Task("b", 1.0)])
    with pytest.raises(ValueError, match="before what it needs"):
        simulate(gather_then_two_products(), [1, 0, 2, 3])
    with pytest.raises(ValueError, match="not scheduled"):
        simulate(gather_then_two_products(), [0, 1])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(3, 30))
def test_memory_curve_is_what_sets_of_live_buffers_give(seed, size):
    graph = random_tasks(seed, size)
    order = schedule(graph, allowance=None, work=200).order
    curve, issued = memory_curve(graph, order), set()
    for k, i in enumerate(order):
        after = issued | {i}
        live = [
            b for b in graph.buffers if b.made_by in after and (b.kept or b.made_by == i or not set(b.users) <= issued)
        ]
        assert curve[k] == sum(b.bytes for b in live)
        issued = after


def test_trace_and_picture_show_every_task_with_time():
    graph = gather_then_two_products()
    both = {"before": simulate(graph), "after": schedule(graph, allowance=5)}
    events = json.loads(chrome_trace(both))["traceEvents"]
    spans = [(e["pid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert (0, "gather", 0.0, 3e6) in spans and (1, "free", 0.0, 4e6) in spans and len(spans) == 6
    assert [e["args"]["exposed_us"] for e in events if e["ph"] == "X" and e["args"]] == [3e6]
    svg = picture(both)
    assert svg.startswith("<svg") and svg.count("<title>") == 6 and "gather: 3000.000 ms" in svg
