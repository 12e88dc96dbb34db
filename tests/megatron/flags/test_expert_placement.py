"""``--enable-expert-placement``: where experts go, and that a run in which they move is the run in which they stay."""

from __future__ import annotations

import itertools
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

from mindspeed_fx.megatron import expert_placement
from tests import ranks
from tests.megatron.flags.test_hot_experts import BATCH, EXPERTS, HIDDEN, RANKS, SEQ, build
from tests.megatron.flags.values import normal


def test_the_choice():
    """Every rank has as many; the busiest rank is no more than a third above the best of all placements (Graham's
    bound for the longest first); who stays keeps its slot."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        tokens = torch.randint(0, 40, (6,), generator=generator).tolist()
        before = torch.randperm(6, generator=generator).tolist()
        after = expert_placement.choose(tokens, 3, before)
        assert sorted(after) == list(range(6))
        best = min(max(expert_placement.loads(tokens, 3, list(slots))) for slots in itertools.permutations(range(6)))
        assert max(expert_placement.loads(tokens, 3, after)) <= 4 / 3 * best + 1e-9
        for rank in range(3):
            here = slice(2 * rank, 2 * rank + 2)
            assert all(b == a for b, a in zip(before[here], after[here]) if b in after[here])
    assert expert_placement.variation([2.0, 2.0]) == 0 and expert_placement.variation([0.0, 0.0]) == 0


def worker(rank: int, store: str, compiles: bool, world: int) -> None:
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    import mindspeed_fx.megatron_adaptor

    mindspeed_fx.megatron_adaptor.apply()
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=RANKS)
    model_parallel_cuda_manual_seed(1)
    args = Namespace(
        enable_expert_placement=True,
        expert_placement_freq=2,
        enable_fine_grained_expert_placement=False,
        fine_grained_expert_placement_thre=0.08,
        print_expert_load=False,
        log_interval=1,
    )
    found = []
    for is_placed in (False, True):
        torch._dynamo.reset()
        model, layer = build()
        if is_placed:
            expert_placement.prepare(model, args)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.01)
        call = layer
        if compiles and is_placed:
            call = torch.compile(layer, backend="mindspeed", options={"codegen": "eager"}, fullgraph=True)
        outputs, tables = [], []
        for iteration in range(1, 6):
            x = normal(3 + rank + 10 * iteration, SEQ, BATCH, HIDDEN) + 3 * normal(1, EXPERTS, HIDDEN)[1:3].sum(0) * 0.3
            out, _ = call(x)
            layer.zero_grad()
            (out * normal(9 + rank, *out.shape)).sum().backward()
            optimizer.step()
            outputs.append(out.detach())
            if is_placed:
                expert_placement.after_step([model], SimpleNamespace(optimizer=optimizer), args, iteration)
                tables.append(layer.expert_of_slot.tolist())
        if is_placed:
            first = list(range(EXPERTS))
            assert tables[0] == first != tables[1] and tables[1] == tables[2], tables
            before, after = (expert_placement.loads(layer.mean_tokens.tolist(), RANKS, t) for t in (first, tables[1]))
            assert max(before) > 1.5 * min(before) and max(after) < 1.1 * min(after), (before, after)
            expert_placement.restore([model], SimpleNamespace(optimizer=optimizer))
            assert layer.expert_of_slot.tolist() == first
        states = [optimizer.state[p][key] for p in layer.parameters() for key in ("exp_avg", "exp_avg_sq")]
        found.append([*outputs, *(p.detach().clone() for p in layer.parameters()), *states])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-10)
    dist.destroy_process_group()


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_ranks(compiles, tmp_path):
    """Outputs of five steps, weights, both moments; experts moved after two."""
    ranks.spawn(worker, (str(tmp_path / "store"), compiles, RANKS), nprocs=RANKS)


def test_two_ranks_with_the_same_experts(tmp_path):
    """Both pairs of ranks place them alike, by the tokens of all."""
    ranks.spawn(worker, (str(tmp_path / "store"), False, 2 * RANKS), nprocs=2 * RANKS)
