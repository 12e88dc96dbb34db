"""Compile caches of parallelized models: a second start hits, and other plans and other programs do not share."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
import torch.fx as fx

from mindspeed_fx.sharding.plan import Boundary, Plan
from mindspeed_fx.sharding.spmd.program_key import program_key
from tests import ranks
from tests.sharding import cache_ranks

HIT, MISS = [1, 0, 0], [0, 1, 0]
"""Hits, misses and bypasses of AOTAutograd's cache, for one graph."""


@pytest.fixture
def start(tmp_path):
    """``start(*starts, groups=0)``: what each of two ranks counted, start by start; one cache directory for all."""

    def run(*starts, groups=0):
        Path(tmp_path, "store").unlink(missing_ok=True)
        ranks.spawn(cache_ranks.worker, (str(tmp_path), starts, groups), nprocs=2)
        counts = [json.loads(Path(tmp_path, f"counts{rank}.json").read_text()) for rank in range(2)]
        assert all(c["wrong"] < 1e-12 for each in counts for c in each), counts
        return counts

    return run


@pytest.mark.slow
@pytest.mark.parametrize("mesh,plan,shared", [({"dp": 2}, "zero2", 1), ({"tp": 2}, "tp_sp", 0)])
def test_a_second_start_hits(mesh, plan, shared, start):
    """The second start has made other process groups before, and rows that were not seen are compiled anew. Of the two
    graphs of a step one rank compiles those that are ``shared``, for both."""
    cold = [counts[0] for counts in start((mesh, plan, 4))]
    assert [c["aot"] for c in cold] == [MISS, MISS]
    assert sorted(c["fx"] for c in cold) == [[0, 2, 0], [shared, 2 - shared, 0]]
    warm = start((mesh, plan, 4), (mesh, plan, 8), groups=3)
    for again, other in warm:
        assert again["aot"] == HIT and again["fx"] == [2, 0, 0], again
        assert other["aot"] == MISS, other


@pytest.mark.slow
def test_plans_do_not_share(start):
    for first, second in start(({"dp": 2}, "zero2", 4), ({"dp": 2}, "zero3", 4)):
        assert first["aot"] == second["aot"] == MISS


@pytest.fixture
def start_stages(tmp_path):
    """``start_stages(sizes, plan, *starts)``: as ``start``, of stages of a pipeline."""

    def run(sizes, plan, *starts):
        Path(tmp_path, "store").unlink(missing_ok=True)
        count = math.prod(sizes.values())
        ranks.spawn(cache_ranks.stages_worker, (str(tmp_path), sizes, plan, starts), nprocs=count)
        return [json.loads(Path(tmp_path, f"counts{rank}.json").read_text()) for rank in range(count)]

    return run


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("schedule", ["Schedule1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"])
def test_a_second_start_of_stages_hits(schedule, start_stages):
    """Inductor's cache, of every graph and of the parts of backwards; AOTAutograd's is left out."""
    first = start_stages({"pp": 2}, None, (schedule, "small"))
    assert all(counts[0]["fx"][1] > 0 for counts in first), first
    for counts, before in zip(start_stages({"pp": 2}, None, (schedule, "small")), first):
        (again,) = counts
        assert again["aot"] == [0, 0, 0] and again["fx"] == [sum(before[0]["fx"]), 0, 0], (again, before)


# ------------------------------------------------------------------ the key


class Region(torch.nn.Module):
    def __init__(self, scale=2.0):
        super().__init__()
        self.register_buffer("table", torch.arange(4.0))
        self.scale = scale

    def forward(self, x):
        return torch.relu(x * self.scale) + self.table


def graph(scale=2.0, shift=0.0):
    region = Region(scale)
    region.table += shift
    return fx.symbolic_trace(region)


PLAN = Plan("mine", ("tp",), modules={"a": Boundary(input={"tp": "S(1)"})})


@pytest.mark.parametrize(
    "change",
    [
        lambda g, p, place, v: (graph(scale=3.0), p, place, v),
        lambda g, p, place, v: (graph(shift=1.0), p, place, v),
        lambda g, p, place, v: (g, dataclasses.replace(p, modules={"a": Boundary(input={"tp": "S(0)"})}), place, v),
        lambda g, p, place, v: (g, dataclasses.replace(p, recompute="full"), place, v),
        lambda g, p, place, v: (g, dataclasses.replace(p, keep_whole=True), place, v),
        lambda g, p, place, v: (g, p, "mesh rank 1", v),
        lambda g, p, place, v: (g, p, place, ["S(1)"]),
    ],
)
def test_what_changes_a_program_changes_its_key(change):
    same = graph(), copy.deepcopy(PLAN), "mesh rank 0", ["S(0)"]
    assert program_key(*same) == program_key(graph(), PLAN, "mesh rank 0", ["S(0)"])
    assert program_key(*change(*same)) != program_key(*same)


def test_what_its_text_does_not_tell_has_no_key():
    gm = graph()
    gm.graph.find_nodes(op="call_function", target=torch.relu)[0].update_kwarg("hidden", object())
    with pytest.raises(TypeError, match="no compile cache can know"):
        program_key(gm, PLAN, "mesh rank 0", [])
    with pytest.raises(TypeError, match="without a place"):
        program_key(graph(), PLAN, "", [])
