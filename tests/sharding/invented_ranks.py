"""What gloo processes check of models that nobody named; run by test_invented.py."""

from __future__ import annotations

import copy
import math

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import mindspeed_fx
from tests.sharding import invented


def worker(rank, store, cases, codegen):
    """Each of ``cases``, (model, mesh, plan): two steps of SGD, whose losses and weights are one device's."""
    torch.set_num_threads(1)
    ranks = math.prod(cases[0][1].values())
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    for name, sizes, plan in cases:
        torch._dynamo.reset()
        kind = getattr(invented, name)
        args, whole = invented.batch_of(kind), invented.model_of(kind)
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        model = mindspeed_fx.parallelize(copy.deepcopy(whole), mesh, plan)
        step = torch.compile(model, backend="mindspeed", dynamic=False, options={"codegen": codegen, "level": 1})
        for _ in range(2):
            losses = []
            for m, run in ((whole, whole), (model, step)):
                m.zero_grad()
                loss = run(**args)
                loss.backward()
                torch.optim.SGD(m.parameters(), lr=0.1).step()
                losses.append(loss.detach())
            assert abs(losses[0] - losses[1]) <= 1e-10 * abs(losses[0]), (name, plan, losses)
        for (n, p), q in zip(whole.named_parameters(), model.parameters(), strict=True):
            assert (q.full_tensor() - p).abs().max() <= 1e-10 * max(1, p.abs().max()), (name, plan, n)
    dist.destroy_process_group()
