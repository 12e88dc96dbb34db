"""``--balanced-moe-experts``: which experts are copied, that only who computes changes, and how much each does."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from mindspeed_fx.megatron import hot_experts
from tests import ranks
from tests.megatron.flags.values import fill_experts, normal

EXPERTS, SEQ, BATCH, HIDDEN, RANKS = 8, 16, 2, 32, 2


def test_the_choice():
    """The busiest rank's busiest expert; its tokens then count where they are; by MindSpeed's rule written out."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        of_ranks = torch.randint(0, 9, (4, 12), generator=generator) * torch.randint(0, 2, (4, 12), generator=generator)
        load = [sum(of_ranks[:, 3 * r : 3 * r + 3].sum(0).tolist()) for r in range(4)]
        taken: list[int] = []
        for _ in range(3):
            rank = max(range(4), key=lambda r: (load[r], -r))
            left = [e for e in range(3 * rank, 3 * rank + 3) if e not in taken]
            expert = max(left, key=lambda e: (int(of_ranks[:, e].sum()), -e))
            load[rank] -= int(of_ranks[:, expert].sum())
            load = [n + int(of_ranks[r, expert]) for r, n in enumerate(load)]
            taken.append(expert)
        assert hot_experts.choose(of_ranks, 3, 3).tolist() == sorted(taken)
    load, hot = spread(torch.tensor([[60, 2, 2, 0], [60, 0, 2, 2]]), 1)
    assert hot == [0] and load == [60 + 2, 60 + 6]  # 122 of 128 rows were of the first rank


def spread(of_ranks: torch.Tensor, number: int) -> tuple[list[int], list[int]]:
    """Rows of every rank with copies, and the copied experts."""
    hot = hot_experts.choose(of_ranks, of_ranks.shape[1] // len(of_ranks), number).tolist()
    local = of_ranks.shape[1] // len(of_ranks)
    rows = [int(of_ranks[r, hot].sum()) for r in range(len(of_ranks))]
    for e in (e for e in range(of_ranks.shape[1]) if e not in hot):
        rows[e // local] += int(of_ranks[:, e].sum())
    return rows, hot


def build(**more):
    from tests.megatron.gpt_models import tiny_gpt

    model = tiny_gpt(
        layers=1,
        experts=EXPERTS,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_router_dtype="fp64",
        expert_model_parallel_size=RANKS,
        **more,
    )
    layer = model.decoder.layers[0].mlp.double()
    fill_experts(layer)
    return model, layer


def worker(rank: int, store: str, compiles: bool) -> None:
    from argparse import Namespace

    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    import mindspeed_fx.megatron_adaptor
    from mindspeed_fx.megatron import experts

    mindspeed_fx.megatron_adaptor.apply()
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=RANKS)
    model_parallel_cuda_manual_seed(1)
    model, layer = build()
    rows, product = [0.0], experts.grouped_linear
    layer.experts.register_forward_pre_hook(lambda module, inputs: rows.append(inputs[0].shape[0]))

    def count(x, weights, counts):
        rows.append(int(counts.sum()) / 2)  # two products
        return product(x, weights, counts)

    experts.grouped_linear = count

    def train(call, batch: int = 0):
        # towards experts 1 and 2 of the first rank
        x = (
            normal(3 + rank + batch, SEQ, BATCH, HIDDEN) + 3 * layer.router.weight[1:3].detach().sum(0)
        ).requires_grad_()
        out, _ = call(x)
        leaves = [x, *layer.parameters()]
        return out, *torch.autograd.grad((out * normal(9 + rank, *out.shape)).sum(), leaves)

    def busiest() -> int:
        whole = torch.tensor(sum(rows))
        dist.all_reduce(whole, dist.ReduceOp.MAX)
        rows.clear()
        return int(whole)

    wanted, loads = [train(layer)], [busiest()]
    wanted.append(train(layer, 50))
    busiest()
    for number in (1, 2, 4):
        hot_experts.prepare(model, Namespace(balanced_moe_hot_expert_num=number))
        torch.testing.assert_close(train(layer), wanted[0], rtol=1e-9, atol=1e-10)
        loads.append(busiest())
    even = SEQ * BATCH * 2  # rows of a rank, two experts of a token
    assert loads[0] > 1.6 * even and loads == sorted(loads, reverse=True) and loads[2] <= 1.1 * even, loads
    print(even, loads)
    if compiles:
        hot_experts.prepare(model, Namespace(balanced_moe_hot_expert_num=2))
        experts.grouped_linear = product
        graph = torch.compile(layer, backend="mindspeed", options={"codegen": "eager"}, fullgraph=True)
        for batch, results in zip((0, 50), wanted, strict=True):
            torch.testing.assert_close(train(graph, batch), results, rtol=1e-9, atol=1e-10)
    dist.destroy_process_group()


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_ranks(compiles, tmp_path):
    ranks.spawn(worker, (str(tmp_path / "store"), compiles), nprocs=RANKS)


@pytest.mark.usefixtures("on_one_rank")
@pytest.mark.parametrize("number", [1, 2, 3])
def test_copies_are_compiled_where_no_gradients_are_made(number):
    weights, hot = [torch.randn(3, 4) for _ in range(number)], torch.tensor([number - 1])
    group = dist.group.WORLD

    @torch.compile(backend="mindspeed", options={"codegen": "eager"}, fullgraph=True)
    def copies(*weights):
        return hot_experts._Copies.apply(hot, 0, group, *weights)

    with torch.no_grad():
        assert torch.equal(copies(*weights), weights[-1].unsqueeze(0))
