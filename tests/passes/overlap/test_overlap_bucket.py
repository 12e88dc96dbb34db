"""overlap.bucket: what can be one collective becomes one, nothing else does, and values stay bitwise the same."""

import random

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import mindspeed_fx
from mindspeed_fx.passes.overlap.model.simulator import simulate
from mindspeed_fx.passes.overlap.model.tasks import COMPUTE, Buffer, Task, TaskGraph
from mindspeed_fx.passes.overlap.scheduler.buckets import Candidate, acyclic, buckets, merge_buckets

EAGER = {"codegen": "eager", "hardware": "h100", "overlap_memory": "1MiB"}


@pytest.fixture
def eight_ranks(lone_world, monkeypatch):
    """One rank runs; the cost model thinks there are eight."""
    monkeypatch.setattr("mindspeed_fx.passes.overlap.model.costs.ranks_of", lambda node: list(range(8)))


def reduce(x):
    return functional.wait_tensor(functional.all_reduce(x, "sum", dist.group.WORLD))


def gradients(x, w):
    """Three reductions that do not depend on each other, one that does, one maximum."""
    a, b = x @ w, x.sin()
    ra, rb, rc = reduce(a), reduce(b), reduce(x.cos())
    after = reduce(ra * 2)
    largest = functional.wait_tensor(functional.all_reduce(b, "max", dist.group.WORLD))
    return ra + 1, rb, rc, after, largest


def shards(x, w):
    """Parameters gathered, gradients scattered."""
    g = [functional.wait_tensor(functional.all_gather_tensor(t, 0, dist.group.WORLD)) for t in (x, w, x * 2)]
    s = [
        functional.wait_tensor(functional.reduce_scatter_tensor(t, "sum", 0, dist.group.WORLD))
        for t in (x + 1, w.t().contiguous())
    ]
    return *g, *s


def inputs():
    return [torch.randn(8, 8, generator=torch.Generator().manual_seed(s)) for s in (1, 2)]


def test_independent_reductions_are_one(eight_ranks):
    report = mindspeed_fx.explain(gradients, *inputs(), options=EAGER)
    assert [s.operator.split(",")[0] for s in report.sites("overlap.bucket")] == ["all_reduce_coalesced of 3"]
    assert len(report.skipped("overlap.bucket")) == 2
    code = next(g.stages["inference"] for g in report.graphs)
    assert (
        code.count("= _c10d_functional.all_reduce_coalesced(") == 1
        and code.count("= _c10d_functional.all_reduce(") == 2
    )
    torch._dynamo.reset()
    for a, b in zip(
        torch.compile(gradients, backend="mindspeed", options=EAGER)(*inputs()), gradients(*inputs()), strict=True
    ):
        assert torch.equal(a, b)


def test_gathers_and_scatters(eight_ranks, monkeypatch):
    monkeypatch.setattr("mindspeed_fx.passes.overlap.bucket.writes_again_at_each_wait", lambda group, kind: False)
    report = mindspeed_fx.explain(shards, *inputs(), options=EAGER)
    assert sorted(s.operator.split(",")[0] for s in report.sites("overlap.bucket")) == [
        "all_gather_into_tensor_coalesced of 3",
        "reduce_scatter_tensor_coalesced of 2",
    ]


def test_scatters_of_gloo_are_left_with_the_reason(eight_ranks):
    report = mindspeed_fx.explain(shards, *inputs(), options=EAGER)
    assert [s.operator.split(",")[0] for s in report.sites("overlap.bucket")] == [
        "all_gather_into_tensor_coalesced of 3"
    ]
    why = [s.reason for s in report.skipped("overlap.bucket") if "reduce_scatter" in s.operator]
    assert len(why) >= 2 and all("again at each wait" in w for w in why)


@pytest.mark.slow
def test_inductor_compiles_buckets(eight_ranks):
    torch._dynamo.reset()
    for a, b in zip(
        torch.compile(gradients, backend="mindspeed", options={**EAGER, "codegen": "inductor"})(*inputs()),
        gradients(*inputs()),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def line(kinds):
    """A chain of compute with a collective hanging off each link of it, all of one key."""
    tasks, candidates = [], []
    for n, _ in enumerate(kinds):
        tasks += [
            Task(f"work{n}", 1.0, COMPUTE, (len(tasks) - 3,) if tasks else ()),
            Task(f"comm{n}", 0.5, "dp", (len(tasks),), "dp", "all_reduce"),
            Task(f"wait{n}", 0.0, COMPUTE, (len(tasks) + 1,), kind="wait"),
        ]
        candidates.append(Candidate(len(tasks) - 2, "k", 100, 0.2, 0.3))
    return TaskGraph(tasks), candidates


def test_sizes_and_the_smaller_first_bucket():
    graph, candidates = line(range(9))
    assert [len(b) for b in buckets(graph, candidates, 400)] == [4, 4]  # the first took one alone: 400 / 4 bytes
    together, members = merge_buckets(graph, buckets(graph, candidates, 400))
    seconds = sorted(t.seconds for t in together.tasks if t.resource == "dp")
    assert seconds == pytest.approx([0.5, 0.2 + 4 * 0.3, 0.2 + 4 * 0.3])
    assert sorted(i for group in members for i in group) == list(range(len(graph)))


def test_dependent_collectives_never_share_a_bucket_and_circles_are_broken():
    tasks = [
        Task("a", 1.0, "dp", (), "dp"),
        Task("wa", 0.0, COMPUTE, (0,), kind="wait"),
        Task("b", 1.0, "dp", (1,), "dp"),
    ]
    graph = TaskGraph(tasks)
    assert buckets(graph, [Candidate(0, "k", 1, 0.1, 0.1), Candidate(2, "k", 1, 0.1, 0.1)], 1000) == []
    # a1 before b1, b2 before a2: the bucket {a1, a2} would wait for {b1, b2} and the other way round
    tasks = [Task("a1", 1.0, "dp"), Task("b2", 1.0, "tp"), Task("b1", 1.0, "tp", (0,)), Task("a2", 1.0, "dp", (1,))]
    graph = TaskGraph(tasks)
    pair = lambda i, j: [Candidate(i, "k", 1, 0.1, 0.1), Candidate(j, "k", 1, 0.1, 0.1)]
    assert acyclic(graph, [pair(0, 3), pair(1, 2)]) in ([pair(0, 3)], [pair(1, 2)])


def is_acyclic(graph, chosen):
    return len(merge_buckets(graph, chosen)[0]) == len(graph) - sum(len(b) - 1 for b in chosen)


@pytest.mark.parametrize("seed", range(20))
def test_buckets_that_wait_for_each_other_give_way_from_the_last_on(seed):
    dice = random.Random(seed)
    tasks = [
        Task(str(i), 1.0, "dp", tuple(sorted(dice.sample(range(i), min(i, dice.choice((0, 1, 2))))))) for i in range(24)
    ]
    graph, left, chosen = TaskGraph(tasks), list(range(24)), []
    dice.shuffle(left)
    for size in (2, 3, 2, 4, 2):
        chosen.append([Candidate(i, "k", 1, 0.1, 0.1) for i in sorted(left[:size])])
        left = left[size:]
    kept = acyclic(graph, chosen)
    assert is_acyclic(graph, kept) and [b for b in chosen if b in kept] == kept
    dropped = sorted((b for b in chosen if b not in kept), key=lambda b: -b[-1].task)
    for n in range(len(dropped)):  # each was in, or behind, a circle of what was there still
        assert not is_acyclic(graph, [b for b in chosen if b in kept or b in dropped[n:]])
    assert seed or dropped


def test_merged_memory_is_that_of_the_bucket():
    tasks = [Task("w0", 1.0), Task("c0", 1.0, "dp", (0,)), Task("w1", 1.0, COMPUTE, (0,)), Task("c1", 1.0, "dp", (2,))]
    graph = TaskGraph(tasks, [Buffer(1, 10, kept=True), Buffer(3, 20, kept=True), Buffer(0, 5, (1, 2))])
    together, _ = merge_buckets(graph, [[Candidate(1, "k", 1, 0.5, 0.5), Candidate(3, "k", 1, 0.5, 0.5)]])
    assert [t.name for t in together.tasks] == ["w0", "w1", "c1"] and simulate(together).memory == [5, 5, 35]
