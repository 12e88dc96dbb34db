"""Capacities of experts that count the tokens of all tensor-parallel ranks."""

from __future__ import annotations

import math

import torch

from tests import ranks

TOKENS, EXPERTS, TOPK, FACTOR = 12, 4, 2, 0.75


def kept_by_formula(probs: torch.Tensor, routing_map: torch.Tensor) -> torch.Tensor:
    """The ceil(k n f / E) most probable tokens of every expert."""
    capacity = math.ceil(TOPK * TOKENS * FACTOR / EXPERTS)
    kept = torch.zeros_like(routing_map)
    for expert in range(EXPERTS):
        tokens = [t for t in range(TOKENS) if routing_map[t, expert]]
        tokens.sort(key=lambda t: -float(probs[t, expert]))
        kept[tokens[:capacity], expert] = True
    return kept


def worker(rank: int, store: str) -> None:
    import torch.distributed as dist

    from mindspeed_fx.megatron import capacity

    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    generator = torch.Generator().manual_seed(3)
    scores = torch.rand(TOKENS, EXPERTS, dtype=torch.float64, generator=generator)
    scores[:, 0] += torch.linspace(4, 2, TOKENS)  # all choose the first expert, the first tokens most
    routing_map = torch.zeros_like(scores).scatter(1, scores.topk(TOPK, 1).indices, 1).bool()
    kept = kept_by_formula(scores, routing_map)
    assert routing_map.sum() > kept.sum()
    assert kept[: TOKENS // 2, 0].sum() == 5 == kept[:, 0].sum()  # not half of them on each rank
    own = slice(rank * TOKENS // 2, (rank + 1) * TOKENS // 2)
    for drop in (capacity.drop_tokens, torch.compile(capacity.drop_tokens, backend="aot_eager", fullgraph=True)):
        probs = (scores * routing_map)[own].clone().requires_grad_()
        result, result_map = drop(probs, routing_map[own], TOPK, FACTOR, "probs", dist.group.WORLD)
        assert torch.equal(result_map, kept[own])
        assert torch.equal(result, probs * kept[own])
        result.sum().backward()
        assert torch.equal(probs.grad, kept[own].double())
    dist.destroy_process_group()


def test_capacity_of_the_whole_sequence(tmp_path):
    ranks.spawn(worker, (str(tmp_path / "store"),))
