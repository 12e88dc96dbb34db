"""What two gloo processes check of sizes that change; run by test_dynamic_sizes.py."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh

import mindspeed_fx
from tests.sharding.llama import Llama

RANKS = 2


def batch(rows, seq):
    generator = torch.Generator().manual_seed(1000 * rows + seq)
    return tuple(torch.randint(0, 64, (rows, seq), generator=generator) for _ in range(2))


def worker(rank, store, dim, plan, sizes, dynamic, compiles, codegen):
    """Loss and every gradient of each (rows, positions) in ``sizes`` are one device's, with so many compilations."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    whole = Llama(1).double()
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=(dim,))
    model = mindspeed_fx.parallelize(copy.deepcopy(whole), mesh, plan)
    step = torch.compile(model, backend="mindspeed", fullgraph=True, dynamic=dynamic, options={"codegen": codegen})
    torch._dynamo.reset()
    counters.clear()
    for rows, seq in sizes:
        for m in (whole, model):
            m.zero_grad()
        losses = []
        for run in (whole, step):
            losses.append(run(*batch(rows, seq)))
            losses[-1].backward()
        assert abs(losses[0] - losses[1]) <= 1e-12 * abs(losses[0]), (plan, rows, seq, losses)
        for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
            difference = (p.grad.full_tensor() - q.grad).abs().max()
            assert difference <= 1e-12 * q.grad.abs().max(), (plan, rows, seq, name, difference)
    print("COMPILES", counters["stats"]["unique_graphs"], flush=True)
    assert compiles is None or counters["stats"]["unique_graphs"] == compiles, counters["stats"]
    dist.destroy_process_group()
