"""What four gloo processes find of training under plans: thirty steps with dropout, accumulation and clipping beside
one device, and every plan's checkpoint loaded under every other; test_training.py runs it and reads the results.
"""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.sharding.optimizer_ranks import apart, whole

RANKS, STEPS, MICROBATCHES, ROWS, SEQ, VOCABULARY = 4, 30, 2, 8, 16, 32
PLANS: dict[str, dict[str, int]] = {
    "tp": {"tp": 4},
    "tp_sp": {"tp": 4},
    "tp_2d": {"tp_x": 2, "tp_y": 2},
    "ulysses": {"cp": 4},
    "ring": {"cp": 4},
    "kv_allgather": {"cp": 4},
    "hybrid": {"cp_ring": 2, "cp_ulysses": 2},
    "zero1": {"dp": 4},
    "zero2": {"dp": 4},
    "zero3": {"dp": 4},
    "zero2+tp_sp": {"dp": 2, "tp": 2},
    "zero3+ulysses": {"dp": 2, "cp": 2},
}
EXPERTS = {"ep": {"ep": 4}, "ep_alltoall": {"ep": 4}, "ep_alltoall+zero2": {"ep": 2, "dp": 2}, "zero3": {"dp": 4}}
CLIP = 0.3
OPTIONS = {"codegen": "eager"}


def build(experts: bool) -> nn.Module:
    """A decoder with dropout behind every feed-forward part or mixture, float64."""
    from tests.sharding.llama import Llama
    from tests.sharding.mixtral import Mixtral

    torch.manual_seed(0)
    sizes = dict(layers=2, hidden=16, ffn=32, vocab=VOCABULARY)
    model = (Mixtral(**sizes) if experts else Llama(heads=4, **sizes)).double()
    for layer in model.layers:
        layer.mlp = nn.Sequential(layer.mlp, nn.Dropout(0.1))
    return model


def make_batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(3)
    return [tuple(torch.randint(0, VOCABULARY, (ROWS, SEQ), generator=g) for _ in range(2)) for _ in range(steps)]


class Run:
    """A model in training.

    Args:
        model: whole, or of a plan.
        call: the model, or what it was compiled to.
    """

    def __init__(self, model: nn.Module, call: Any):
        self.model, self.call, self.losses, self.norms = model, call, [], []
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
        self.random = torch.Generator().manual_seed(11).get_state()

    def train(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """With random numbers of its own, so that several runs may take turns."""
        torch.set_rng_state(self.random)
        for batch in batches:
            self.optimizer.zero_grad()
            for i in range(MICROBATCHES):
                loss = self.call(*(x.chunk(MICROBATCHES)[i] for x in batch)) / MICROBATCHES
                loss.backward()
                self.losses.append(loss.detach())
            self.norms.append(whole(nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)))
            self.optimizer.step()
        self.random = torch.get_rng_state()

    def state(self) -> dict[str, Any]:
        """Of a checkpoint, and what loading writes into."""
        own = {n: self.optimizer.state[p] for n, p in self.model.named_parameters()}
        return {"model": self.model.state_dict(), "optimizer": own, "random": self.random}

    def values(self) -> list[torch.Tensor]:
        """Whole parameters and states."""
        held = [t for p in self.model.parameters() for t in (p, *self.optimizer.state[p].values())]
        return [whole(t.detach()).clone() for t in held]

    def clear(self) -> None:
        for t in [t for p in self.model.parameters() for t in (p.detach(), *self.optimizer.state[p].values())]:
            t.zero_()
        self.random = torch.zeros_like(self.random)


def divided(reference: nn.Module, plan: str, mesh: dict[str, int]) -> Run:
    import mindspeed_fx

    devices = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    model = mindspeed_fx.parallelize(copy.deepcopy(reference), devices, plan)
    torch._dynamo.reset()
    return Run(model, torch.compile(model, backend="mindspeed", dynamic=False, options=OPTIONS))


def worker(rank: int, store: str, folder: str, plans: list[str], experts: bool, steps: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    reference, batches, results, runs = build(experts), make_batches(steps), {}, {}
    alone = Run(copy.deepcopy(reference), None)
    alone.call = alone.model
    alone.train(batches)
    expected = alone.values()
    for plan in plans:
        run = runs[plan] = divided(reference, plan, (EXPERTS if experts else PLANS)[plan])
        run.train(batches)
        results[plan] = {
            "losses": apart(run.losses, alone.losses),
            "norms": apart(run.norms, alone.norms),
            "values": apart(run.values(), expected),
            "clipped": float(sum(norm > CLIP for norm in alone.norms)),
            "moved": apart([p.detach() for p in alone.model.parameters()], list(reference.parameters())),
        }
        dcp.save(run.state(), checkpoint_id=f"{folder}/{plan}")
    for saved in plans:
        for plan, run in runs.items():
            run.clear()
            state = run.state()
            dcp.load(state, checkpoint_id=f"{folder}/{saved}")
            same = torch.equal(run.random, alone.random)
            results[f"{saved} -> {plan}"] = {"values": apart(run.values(), expected) if same else float("inf")}
    if rank == 0:
        Path(folder, "results").write_text(json.dumps(results))
    dist.destroy_process_group()
