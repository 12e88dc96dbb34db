"""Batch norm under a divided batch: running statistics are one device's, on every rank, and evaluation reads them."""

from __future__ import annotations

import copy

import pytest
import torch

from tests import ranks


class Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.norm(self.inner(x)).relu()).square().mean()


def worker(rank: int, store: str) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import mindspeed_fx

    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    reference, batches = Normed().double(), torch.randn(2, 8, 8, dtype=torch.float64)
    model = mindspeed_fx.parallelize(copy.deepcopy(reference), mesh, "zero2")
    step = torch.compile(model, backend="mindspeed", fullgraph=True, dynamic=False, options={"codegen": "eager"})
    for x in batches:
        step(x).backward(), reference(x).backward()
    for name, expected in reference.norm.named_buffers():
        torch.testing.assert_close(getattr(model.norm, name), expected, rtol=1e-12, atol=1e-12)
    assert reference.norm.running_mean.abs().max() > 1e-3
    model.eval(), reference.eval()
    torch.testing.assert_close(step(batches[0]), reference(batches[0]), rtol=1e-12, atol=1e-12)
    dist.destroy_process_group()


@pytest.mark.slow
def test_running_statistics_are_one_devices(tmp_path):
    ranks.spawn(worker, (str(tmp_path / "store"),))
