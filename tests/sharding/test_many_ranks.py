"""Parts of many ranks are gathered and scattered by views, so that a graph does not grow with the ranks."""

from __future__ import annotations

import json

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from mindspeed_fx.compat import dtensor
from mindspeed_fx.sharding.spmd import many_ranks, redistribute
from tests import ranks
from tests.sharding import many_ranks as real_ranks


@pytest.mark.parametrize("placements", [[Shard(0), Shard(1)], [Shard(1), Replicate()], [Shard(1), Shard(1)]])
def test_what_is_gathered_and_scattered_is_the_whole(placements, monkeypatch):
    monkeypatch.setattr(many_ranks, "MANY", 1)
    move, calls = many_ranks.move, []
    monkeypatch.setattr(many_ranks, "move", lambda *args: calls.append(args) or move(*args))
    whole = torch.arange(96, dtype=torch.float64).reshape(4, 8, 3)
    with dtensor.all_ranks({"a": 2, "b": 2}) as mesh:
        x = distribute_tensor(whole, mesh, placements)
        for i in (1, 0):
            now = [Replicate() if j >= i else p for j, p in enumerate(placements)]
            x = redistribute.placed_at(x, now)
        assert torch.equal(dtensor.reconcile(x.to_local()), whole)
        gathers = sum(p == Shard(1) for p in placements)
        assert len(calls) == gathers
        terms = DTensor.from_local(dtensor.on_every_rank(whole), mesh, [Replicate(), Partial()], run_check=False)
        parts = redistribute.placed_at(terms, [Replicate(), Shard(1)])
        assert len(calls) == gathers + 1
        assert torch.equal(dtensor.reconcile(parts.full_tensor()), 2 * whole)


@pytest.mark.slow
@pytest.mark.parametrize("plan", real_ranks.PLANS)
def test_four_processes_train_alike(plan, tmp_path):
    """Real ranks, with the threshold at one: the same gradients as DTensor's way gives, and as one device's."""
    ranks.spawn(real_ranks.worker, (str(tmp_path / "store"), str(tmp_path), plan), nprocs=real_ranks.RANKS)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(real_ranks.RANKS)]
    assert len({f["moves"] for f in found}) == 1 and found[0]["moves"] > 0
    for f in found:
        assert not f["layouts"] and f["ways"] <= 1e-13 and f["device"] <= 1e-12, f
