"""What gloo processes check of experts that are a list of modules; run by test_listed_experts.py."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import mindspeed_fx
from tests.sharding import listed_experts


def worker(rank, store, spellings, mesh, plan, codegen, fullgraph):
    """Loss and every gradient of two steps are those of one device; the second has an expert that nobody chose."""
    ranks = 1
    for n in mesh.values():
        ranks *= n
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    devices = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    for name in spellings:
        torch._dynamo.reset()
        torch.manual_seed(0)
        reference = listed_experts.Model(getattr(listed_experts, name)).double()
        model = mindspeed_fx.parallelize(copy.deepcopy(reference), devices, plan)
        step = torch.compile(
            model, backend="mindspeed", dynamic=False, fullgraph=fullgraph, options={"codegen": codegen, "level": 1}
        )
        for ids in (torch.randint(0, 32, (4, 6), generator=torch.Generator().manual_seed(1)), torch.full((4, 6), 7)):
            reference.zero_grad(), model.zero_grad()
            expected, loss = reference(ids), step(ids)
            expected.backward(), loss.backward()
            assert abs(loss - expected) <= 1e-12 * abs(expected), (name, loss, expected)
            for (n, p), q in zip(reference.named_parameters(), model.parameters(), strict=True):
                wanted = torch.zeros_like(p) if p.grad is None else p.grad
                got = torch.zeros_like(p) if q.grad is None else q.grad.full_tensor()
                assert (got - wanted).abs().max() <= 1e-12 * max(1e-3, wanted.abs().max()), (name, n)
    dist.destroy_process_group()
