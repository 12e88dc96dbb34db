"""From the placements that a plan names to DTensor's, and from one placement of a value to another."""

from __future__ import annotations

import math
from typing import Any, Mapping

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from mindspeed_fx import compat_sharding
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
    collectives return is contiguous, and a view that is right for the whole would fail on it. Parts of one dimension become parts
    of another by :func:`exchanged`."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, placements: tuple[Placement, ...]) -> DTensor:
        ctx.placements = tuple(Replicate() if p.is_partial() else p for p in x.placements)
        return _stored_alike(_redistributed(x, placements))

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None]:
        return _stored_alike(_redistributed(grad, ctx.placements)), None


def _redistributed(x: DTensor, placements: tuple[Placement, ...]) -> DTensor:
    changed = [i for i, (p, q) in enumerate(zip(x.placements, placements)) if p != q]
    if len(changed) == 1 and _exchangeable(x, placements, changed[0]):
        return exchanged(x, changed[0], placements)
    return x.redistribute(placements=placements)


def _exchangeable(x: DTensor, placements: tuple[Placement, ...], i: int) -> bool:
    """Parts of one dimension to parts of another, each of one piece: no inner mesh dimension divides either of them."""
    old, new, mesh = x.placements[i], placements[i], x.device_mesh
    if type(old) is not Shard or type(new) is not Shard or any(p.is_shard() and (type(p) is not Shard or (j > i and p.dim in (old.dim, new.dim))) for j, p in enumerate(placements)):
        return False
    parts = {d: mesh.size(i) for d in (old.dim, new.dim)}
    for j, p in enumerate(placements):
        if j != i and isinstance(p, Shard) and p.dim in parts:
            parts[p.dim] *= mesh.size(j)
    return all(x.shape[d] % n == 0 for d, n in parts.items())


def exchanged(x: DTensor, i: int, placements: tuple[Placement, ...]) -> DTensor:
    """One all-to-all over mesh dimension ``i``. DTensor (2.13) has an operator of its own for it, which ends where it starts and so hides behind
    nothing, and on CPU gathers everything to keep a part: n times the bytes."""
    old, new, mesh = x.placements[i].dim, placements[i].dim, x.device_mesh
    n = mesh.size(i)
    given = x.to_local().unflatten(new, (n, -1)).movedim(new, 0)
    taken = compat_sharding.waited(compat_sharding.all_to_all(given, [1] * n, [1] * n, mesh, i))
    local = taken.movedim(0, old).flatten(old, old + 1)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=x.shape, stride=x.stride())


def reshape(x: DTensor, shape: list[int]) -> DTensor:
    """``aten.view`` and ``aten.reshape``. A dimension that is divided over several mesh dimensions and flattened with others is one
    that DTensor (2.13) cannot part again in the backward; the parts of one rank can be.

    Raises:
        ShardingError: ranks share a dimension, of heads and their width, that becomes one of heads which they cannot share.
    """
    if (placements := _unflattened(x, shape)) is not None:
        return _Reshape.apply(x, torch.Size(_sizes(x, shape)), placements)
    try:
        y = x.reshape(shape)
    except RuntimeError as e:
        if "unevenly" not in str(e):
            raise
        mesh = x.device_mesh
        cut = ", ".join(f"dimension {p.dim} over {mesh.size(i)} ranks" + (f' of "{mesh.mesh_dim_names[i]}"' if mesh.mesh_dim_names else "") for i, p in enumerate(x.placements) if compat_sharding.is_divided(p))
        raise ShardingError(f"value of shape {tuple(x.shape)} is divided along {cut}, which cannot share it evenly as {tuple(shape)}; choose another number of ranks, or keep it whole (R)") from e
    return _Reshape.apply(x, tuple(shape), None) if sum(map(compat_sharding.is_strided, y.placements)) > 1 else y


def _sizes(x: DTensor, shape: list[int]) -> list[int]:
    """``shape`` without -1."""
    rest = -math.prod(shape)
    return [x.numel() // rest if n == -1 else n for n in shape] if -1 in shape else list(shape)


def _unflattened(x: DTensor, shape: list[int]) -> tuple[Placement, ...] | None:
    """Placements of ``x`` as ``shape`` where that parts one dimension, which several mesh dimensions divide in pieces, into the dimensions that were
    flattened to it; DTensor (2.13) refuses that. None for any other shape."""
    divided = [p.dim for p in x.placements if compat_sharding.is_divided(p)]
    dims = {p.dim for p in x.placements if compat_sharding.is_strided(p)}
    if len(dims) != 1 or divided.count(dim := dims.pop()) < 2 or 0 in x.shape:
        return None
    sizes, more = _sizes(x, shape), len(shape) - x.ndim
    inner = sizes[dim : dim + more + 1]
    if more < 1 or sizes != [*x.shape[:dim], *inner, *x.shape[dim + 1 :]]:
        return None
    found: list[Placement] = []
    for i, p in enumerate(x.placements):
        if not compat_sharding.is_divided(p, dim):
            found.append(Shard(p.dim + more) if compat_sharding.is_divided(p) and p.dim > dim else p)
            continue
        # The pieces are of the dimension before which as many elements lie, counted in what outer mesh dimensions left.
        pieces, n = getattr(p, "split_factor", 1), x.device_mesh.size(i)
        at = next((j for j in range(len(inner)) if math.prod(inner[:j]) == pieces and inner[j] % n == 0), None)
        if at is None:
            return None
        inner[at] //= n
        found.append(Shard(dim + at))
    return tuple(found)


class _Reshape(torch.autograd.Function):
    """``aten.reshape``; with ``placements`` of the result, of each rank's own part."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, shape: tuple[int, ...], placements: tuple[Placement, ...] | None) -> DTensor:
        local = x.to_local()
        if placements is None:
            y = x.reshape(shape)
        else:
            parts = [n // math.prod(x.device_mesh.size(i) for i, p in enumerate(placements) if p == Shard(d)) for d, n in enumerate(shape)]
            stride = torch.empty(shape, device="meta").stride()
            y = DTensor.from_local(local.reshape(parts), x.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
        ctx.x, ctx.placements, ctx.local = (x.placements, x.shape, x.stride()), y.placements, local.shape
        return y

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None, None]:
        placements, shape, stride = ctx.x
        local = grad.redistribute(placements=ctx.placements).to_local().reshape(ctx.local)
        return DTensor.from_local(local, grad.device_mesh, placements, run_check=False, shape=shape, stride=stride), None, None


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
        ShardingError: with the size, the mesh dimensions and the number of ranks.
    """
    over: dict[int, list[int]] = {}
    for i, p in enumerate(placements):
        if isinstance(p, Shard):
            over.setdefault(p.dim, []).append(i)
    for dim, mine in over.items():
        n = math.prod(mesh.size(i) for i in mine)
        if shape[dim] % n:
            names = ", ".join(f'"{mesh.mesh_dim_names[i]}"' for i in mine) if mesh.mesh_dim_names else str(mine)
            raise ShardingError(f"{where}: dimension {dim} has {shape[dim]} elements, which {n} ranks of {names} cannot share evenly; pad it, choose another number of ranks, or keep it whole (R)")
