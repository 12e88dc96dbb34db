"""What gloo processes check of sizes, most of them such that change; run by test_dynamic_sizes.py and
test_generated_code.py."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh

import mindspeed_fx
from mindspeed_fx.sharding.plan import ShardingError
from tests.sharding.input_ranks import Small
from tests.sharding.llama import Llama
from tests.sharding.mixtral import Mixtral
from tests.zoo import parallel_models


class Scaled(Small):
    """Takes what embeddings would be; a number of it is another in every step."""

    def __init__(self):
        super().__init__()
        self.scale = 1.0
        self.embed.requires_grad_(False)

    def forward(self, x, labels):
        x = x + self.down_proj(torch.nn.functional.silu(self.up_proj(x) * self.scale))
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


MODELS = {
    "llama": lambda: Llama(1),
    "mixtral": lambda: Mixtral(1),
    "small": Small,
    "scaled": Scaled,
    "t5": lambda: parallel_models.build("t5", num_layers=3, num_decoder_layers=3)[0],
}


def batch(rows, seq):
    generator = torch.Generator().manual_seed(1000 * rows + seq)
    return tuple(torch.randint(0, 64, (rows, seq), generator=generator) for _ in range(2))


def part(x, mesh, placed):
    """This rank's part of an argument; ``placed``: mesh dimension -> dimension of it."""
    for name, dim in placed.items():
        x = x.chunk(mesh[name].size(), dim)[mesh.get_local_rank(name)]
    return x.contiguous()


def worker(rank, store, kind, mesh, plan, sizes, dynamic, compiles, codegen, placed=None, dtype=torch.float64):
    """Loss and every gradient of each (rows, positions) in ``sizes`` are one device's, with so many compilations.

    Args:
        mesh: dimension -> ranks.
        placed: with ``inputs="local"`` where the arguments are divided, mesh dimension -> dimension.
        dtype: of the model; compared within 1e-12, or 1e-5 where it is float32.
    """
    near = 1e-12 if dtype == torch.float64 else 1e-5
    torch.set_num_threads(1)
    ranks = math.prod(mesh.values())
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    torch.manual_seed(0)
    whole = MODELS[kind]().to(dtype)
    mesh = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    model = mindspeed_fx.parallelize(copy.deepcopy(whole), mesh, plan, inputs="local" if placed else "whole")
    step = torch.compile(model, backend="mindspeed", fullgraph=True, dynamic=dynamic, options={"codegen": codegen})
    torch._dynamo.reset()
    counters.clear()
    for rows, seq in sizes:
        for m in (whole, model):
            m.zero_grad()
        args = batch(rows, seq)
        if kind == "scaled":
            args = whole.embed(args[0]).detach(), args[1]
            whole.scale = model.scale = rows / 7
        losses = [whole(*args), step(*(part(x, mesh, placed or {}) for x in args))]
        for loss in losses:
            loss.backward()
        assert abs(losses[0] - losses[1]) <= near * abs(losses[0]), (plan, rows, seq, losses)
        for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
            if q.grad is None:
                assert p.grad is None, name
                continue
            difference = (p.grad.full_tensor() - q.grad).abs().max()
            assert difference <= near * q.grad.abs().max(), (plan, rows, seq, name, difference)
    print("COMPILES", counters["stats"]["unique_graphs"], flush=True)
    assert compiles is None or counters["stats"]["unique_graphs"] == compiles, counters["stats"]
    dist.destroy_process_group()


def compares(rank, store):
    """A new size for which nothing is compiled: ranks compare their arguments all the same."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = mindspeed_fx.parallelize(Small().double(), mesh, "zero2")
    options = {"codegen": "eager", "level": 1}
    step = torch.compile(model, backend="mindspeed", fullgraph=True, dynamic=True, options=options)
    counters.clear()
    step(*batch(4, 8))
    step(*batch(6, 12))
    ids, labels = batch(8, 6)
    with pytest.raises(ShardingError, match='argument "ids".* has other values on another rank'):
        step(ids + rank, labels)
    assert counters["stats"]["unique_graphs"] == 1
    dist.destroy_process_group()
