"""From the placements that a plan names to DTensor's, and from one placement of a value to another."""

from __future__ import annotations

from typing import Any, Mapping

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from mindspeed_fx.passes.sharding.plan import ShardingError, parse_placement


def placements_of(placed: Mapping[str, str], mesh: DeviceMesh, ndim: int, where: str) -> tuple[Placement, ...]:
    """DTensor placements on every dimension of ``mesh``; what ``placed`` does not name is whole.

    Raises:
        ShardingError: a dimension that the mesh or a tensor of ``ndim`` dimensions does not have.
    """
    found: list[Placement] = [Replicate()] * mesh.ndim
    for name, word in placed.items():
        dim = parse_placement(word, where)
        if dim is not None:
            if not -ndim <= dim < ndim:
                raise ShardingError(f"{where}: placement {word} of a tensor of {ndim} dimensions")
            found[mesh.mesh_dim_names.index(name)] = Shard(dim % ndim)
    return tuple(found)


def redistribute(x: DTensor, placed: Mapping[str, str]) -> DTensor:
    """``x`` at ``placed``; mesh dimensions that it does not name stay. The gradient comes back as ``x`` is."""
    wanted = list(x.placements)
    where = f"value of shape {tuple(x.shape)}"
    for name, word in placed.items():
        i = x.device_mesh.mesh_dim_names.index(name)
        wanted[i] = placements_of({name: word}, x.device_mesh, x.ndim, where)[i]
    even(x.shape, wanted, x.device_mesh, where)
    return _Redistribute.apply(x, tuple(wanted))


class _Redistribute(torch.autograd.Function):
    """DTensor's ``redistribute`` whose local results are stored in the order of dimensions that the whole has: what
    collectives return is contiguous, and a view that is right for the whole would fail on it."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, placements: tuple[Placement, ...]) -> DTensor:
        ctx.placements = tuple(Replicate() if p.is_partial() else p for p in x.placements)
        return _stored_alike(x.redistribute(placements=placements))

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None]:
        return _stored_alike(grad.redistribute(placements=ctx.placements)), None


def _stored_alike(x: DTensor) -> DTensor:
    local = x.to_local()
    order = sorted(range(x.ndim), key=lambda d: -x.stride(d))
    if 0 in x.stride() or local.permute(order).is_contiguous():
        return x
    back = sorted(range(x.ndim), key=order.__getitem__)
    return DTensor.from_local(local.permute(order).contiguous().permute(back), x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())


def even(shape: torch.Size, placements: Any, mesh: DeviceMesh, where: str) -> None:
    """Refuse parts of different sizes.

    Raises:
        ShardingError: with the size and the number of ranks.
    """
    parts: dict[int, int] = {}
    for size, p in zip(mesh.shape, placements):
        if isinstance(p, Shard):
            parts[p.dim] = parts.get(p.dim, 1) * size
    for dim, n in parts.items():
        if shape[dim] % n:
            raise ShardingError(f"{where}: dimension {dim} has {shape[dim]} elements, which {n} ranks cannot share evenly; pad it, choose another number of ranks, or keep it whole (R)")
