"""A tiny training step, what it is called with, and meshes of two ranks that are not there."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


class Model(nn.Module):
    """Two layers that repeat; returns its loss."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean() * scale


X = torch.zeros(4, 8)


def plain(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@contextlib.contextmanager
def ranks(*names: str, count: int = 2) -> Iterator[Any]:
    """A mesh of ``count`` ranks along each of these dimensions, whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count ** max(1, len(names)))
    try:
        yield init_device_mesh("cpu", (count,) * max(1, len(names)), mesh_dim_names=names or None)
    finally:
        dist.destroy_process_group()
