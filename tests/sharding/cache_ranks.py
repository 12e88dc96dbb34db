"""A training step of a parallelized model in one gloo process, and what the compile caches count; run by
test_plan_cache.py."""

from __future__ import annotations

import copy
import json
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh

import mindspeed_fx
from tests.sharding import virtual_ranks
from tests.sharding.dynamic_ranks import batch
from tests.sharding.llama import Llama


def counted():
    """Hits, misses and bypasses of AOTAutograd's cache and of Inductor's."""
    aot, inductor = counters["aot_autograd"], counters["inductor"]
    words = ("hit", "miss", "bypass")
    return {
        "aot": [aot[f"autograd_cache_{word}"] for word in words],
        "fx": [inductor[f"fxgraph_cache_{word}"] for word in words],
    }


def stages_worker(rank, folder, sizes, plan, starts):
    """Each of ``starts``, (schedule, model), compiled anew: gradients are one device's, and what the caches count."""
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder, "cache"))
    world = math.prod(sizes.values())
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", world), rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    counts = []
    for schedule, model in starts:
        torch._dynamo.reset()
        counters.clear()
        virtual_ranks.step_equals_one_device(mesh, plan, schedule, model, {"codegen": "inductor"})
        counts.append({**counted(), "wrong": 0.0})
        dist.barrier()
    Path(folder, f"counts{rank}.json").write_text(json.dumps(counts))
    dist.destroy_process_group()


def worker(rank, folder, starts, groups=0):
    """Each of ``starts``, (mesh, plan, rows), compiled anew in one process; writes counters and the gradients' largest
    difference from one device's.

    Args:
        groups: process groups that are made before the mesh, so that its own have other names.
    """
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder, "cache"))
    world = 2
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", world), rank=rank, world_size=world)
    for _ in range(groups):
        dist.new_group([0, 1])
    counts = []
    for sizes, plan, rows in starts:
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        whole = Llama(1).double()
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        model = mindspeed_fx.parallelize(copy.deepcopy(whole), mesh, plan)
        torch.compile(model, backend="mindspeed", fullgraph=True, dynamic=False)(*batch(rows, 16)).backward()
        whole(*batch(rows, 16)).backward()
        wrong = [
            float((p.grad.full_tensor() - q.grad).abs().max() / q.grad.abs().max())
            for p, q in zip(model.parameters(), whole.parameters(), strict=True)
        ]
        counts.append({**counted(), "wrong": max(wrong)})
    Path(folder, f"counts{rank}.json").write_text(json.dumps(counts))
    dist.destroy_process_group()
