"""From the placements that a plan names to DTensor's, and from one placement of a value to another."""

from __future__ import annotations

import math
from typing import Any, Mapping, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from mindspeed_fx.compat import dtensor, packed_shards, symbols
from mindspeed_fx.sharding.plan import ShardingError, parse_placement
from mindspeed_fx.sharding.spmd import many_ranks
from mindspeed_fx.sharding.spmd.kept_whole import evenly_divided, keep_whole


def placements_of(placed: Mapping[str, str], mesh: DeviceMesh, ndim: int, where: str) -> tuple[Placement, ...]:
    """DTensor placements on every dimension of ``mesh``; what ``placed`` does not name is whole.

    Raises:
        ShardingError: a dimension that the mesh or a tensor of ``ndim`` dimensions does not have.
    """
    results: list[Placement] = [Replicate()] * mesh.ndim
    for name, word in placed.items():
        dim = parse_placement(word, where)
        if dim is not None:
            if not -ndim <= dim < ndim:
                raise ShardingError(f"{where}: placement {word} of a tensor of {ndim} dimensions")
            sizes = [int(n) for n in word.rstrip(")").partition(":")[2].split("+") if n]
            results[mesh.mesh_dim_names.index(name)] = packed_shards.packed(dim % ndim, sizes or (1,))
    return tuple(results)


def redistribute(x: DTensor, placed: Mapping[str, str]) -> DTensor:
    """``x`` at ``placed``; mesh dimensions that it does not name stay. The gradient comes back as ``x`` is."""
    wanted = wanted_placements(x, placed)
    try:
        even(x.shape, wanted, x.device_mesh, f"value of shape {tuple(x.shape)}")
    except ShardingError as error:
        keep_whole(error)
        wanted = list(evenly_divided(x.shape, wanted, x.device_mesh))
    return moved_to(x, wanted)


def wanted_placements(x: DTensor, placed: Mapping[str, str]) -> list[Placement]:
    """Those of ``x``, but for the mesh dimensions that ``placed`` names."""
    wanted = list(x.placements)
    where = f"value of shape {tuple(x.shape)}"
    for name, word in placed.items():
        i = x.device_mesh.mesh_dim_names.index(name)
        try:
            wanted[i] = placements_of({name: word}, x.device_mesh, x.ndim, where)[i]
        except ShardingError as error:  # of a dimension that it does not have
            keep_whole(error)
            wanted[i] = Replicate()
    return wanted


def moved_to(x: DTensor, placements: Sequence[Placement]) -> DTensor:
    """``x`` at ``placements``, and its gradient back to where ``x`` is, also where nothing moves forward."""
    return _Redistribute.apply(x, tuple(placements))


def placed_at(x: DTensor, placements: Any) -> DTensor:
    """``x`` at ``placements``, one for every mesh dimension; as it is where it is there. The gradient comes back as
    ``x`` is.
    """
    return x if list(x.placements) == list(placements) else _Redistribute.apply(x, tuple(placements))


def summed_at(x: DTensor, placements: Sequence[Placement]) -> DTensor:
    """``x`` at ``placements``, where sums that were not yet made are made. DTensor (2.13) refuses the gradient of a
    mean that is not yet made, if it is such a sum."""
    is_mean = any(p.is_partial() and p.reduce_op != "sum" for p in x.placements)
    return moved_to(x, placements) if is_mean else x.redistribute(placements=placements)


class _Redistribute(torch.autograd.Function):
    """DTensor's ``redistribute`` whose local results are stored in the order of dimensions that the whole has: what
    collectives return is contiguous, and a view that is right for the whole would fail on it. Parts of one dimension
    become parts of another by :func:`exchange_shards`."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, placements: tuple[Placement, ...]) -> DTensor:
        ctx.placements = tuple(Replicate() if p.is_partial() else p for p in x.placements)
        ctx.set_materialize_grads(False)  # zeros would be made as a plain tensor
        return _stored_alike(_redistribute(x, placements))

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> tuple[DTensor | None, None]:
        return None if grad is None else _stored_alike(_redistribute(grad, ctx.placements)), None


def _redistribute(x: DTensor, placements: tuple[Placement, ...]) -> DTensor:
    changed = [i for i, (p, q) in enumerate(zip(x.placements, placements)) if p != q]
    if len(changed) == 1 and _exchangeable(x, placements, changed[0]):
        return exchange_shards(x, changed[0], placements)
    if len(changed) == 1 and many_ranks.applies(x, placements, changed[0]):
        return many_ranks.move(x, placements, changed[0])
    return x.redistribute(placements=placements)


def _exchangeable(x: DTensor, placements: tuple[Placement, ...], i: int) -> bool:
    """Parts of one dimension to parts of another, each of one piece: no inner mesh dimension divides either of them."""
    old, new, mesh = x.placements[i], placements[i], x.device_mesh
    if type(old) is not Shard or type(new) is not Shard or any(map(dtensor.is_strided, placements)):
        return False
    if any(j > i and p.is_shard() and p.dim in (old.dim, new.dim) for j, p in enumerate(placements)):
        return False
    parts = {d: mesh.size(i) for d in (old.dim, new.dim)}
    for j, p in enumerate(placements):
        if j != i and isinstance(p, Shard) and p.dim in parts:
            parts[p.dim] *= mesh.size(j)
    return all(x.shape[d] % n == 0 for d, n in parts.items())


def exchange_shards(x: DTensor, i: int, placements: tuple[Placement, ...]) -> DTensor:
    """One all-to-all over mesh dimension ``i``. DTensor (2.13) has an operator of its own for it, which ends where it
    starts and so hides behind nothing, and on CPU gathers everything to keep a part: n times the bytes."""
    old, new, mesh = x.placements[i].dim, placements[i].dim, x.device_mesh
    n = mesh.size(i)
    arg = x.to_local().unflatten(new, (n, -1)).movedim(new, 0)
    taken = dtensor.wait_for(dtensor.all_to_all(arg, [1] * n, [1] * n, mesh, i))
    local = taken.movedim(0, old).flatten(old, old + 1)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=x.shape, stride=x.stride())


def reshape(x: DTensor, shape: Sequence[int]) -> DTensor:
    """``aten.view`` and ``aten.reshape``. :func:`placements_as` says what a rank's part is of the view: where strided
    shards or several mesh dimensions divide a dimension, before, after, or in the gradient alone, DTensor (2.13) cannot
    part it, takes other pieces for a rank's, or views the gradient as parts of another size.

    Raises:
        ShardingError: ranks share a dimension, of heads and their width, that becomes one of heads which they cannot
            share.
    """
    whole = torch.empty(x.shape, device="meta").reshape(shape).shape
    placements = placements_as(x, whole)
    if placements is not None:
        return _Reshape.apply(x, whole, placements)
    strided = [i for i, p in enumerate(x.placements) if dtensor.is_strided(p) or 0 in x.shape]
    if strided:
        gathered = [Replicate() if i >= strided[0] else p for i, p in enumerate(x.placements)]
        return reshape(x.redistribute(placements=gathered), shape)
    try:
        return x.reshape(shape)
    except RuntimeError as e:
        mesh = x.device_mesh
        cut = ", ".join(
            f"dimension {p.dim} over {mesh.size(i)} ranks"
            + (f' of "{mesh.mesh_dim_names[i]}"' if mesh.mesh_dim_names else "")
            for i, p in enumerate(x.placements)
            if dtensor.is_divided(p)
        )
        error = ShardingError(
            f"value of shape {tuple(x.shape)} is divided along {cut}, which cannot share it evenly as {tuple(shape)}; "
            "choose another number of ranks, or keep it whole (R)"
        )
        error.__cause__ = e
        keep_whole(error)
        return reshape(placed_at(x, _placements_that_fit(x, whole)), shape)


def _placements_that_fit(x: DTensor, shape: Sequence[int]) -> list[Placement]:
    """Of ``x``, whole over as few mesh dimensions as a view as ``shape`` needs, inner ones first: those that do not fit
    alone, and where that is not enough, more."""
    placements = list(x.placements)
    for alone in (True, False):
        for i in reversed(range(len(placements))):
            tried = [p if j == i or not alone else Replicate() for j, p in enumerate(placements)]
            if dtensor.is_divided(placements[i]) and _parts_as(x.shape, tried, x.device_mesh, shape) is None:
                placements[i] = Replicate()
    return placements


def is_divided_twice(placements: Sequence[Placement]) -> bool:
    """Whether several mesh dimensions divide one dimension, or one divides it in several pieces."""
    dims = [p.dim for p in placements if dtensor.is_divided(p)]
    return len(set(dims)) < len(dims) or any(map(dtensor.is_strided, placements))


def placements_as(x: DTensor, shape: Sequence[int]) -> tuple[Placement, ...] | None:
    """Placements of ``x`` viewed as ``shape`` when each rank keeps its elements; None where a rank's part is none of
    the view's.

    A rank has a part of each of so many pieces: as many as there are elements before the divided dimension, times those
    of a strided shard. Of the dimensions after the view, the one is divided before which there are as many elements, or
    a
    divisor: then its parts are strided again. Tokens [batch * sequence] whose sequence is divided are so many pieces as
    a rank has sequences.
    """
    return _parts_as(x.shape, x.placements, x.device_mesh, shape)


def _parts_as(
    sizes: Sequence[int], divided: Sequence[Placement], mesh: DeviceMesh, shape: Sequence[int]
) -> tuple[Placement, ...] | None:
    placements = list(divided)
    if 0 in sizes:  # DTensor's own views of no elements do not end (2.13)
        return None if any(map(dtensor.is_divided, placements)) else tuple(placements)
    for old, new in groups(sizes, shape):
        before, after = [sizes[d] for d in old], [shape[d] for d in new]
        for i, p in enumerate(divided):
            if not dtensor.is_divided(p) or p.dim not in old:
                continue
            n, at = mesh.size(i), p.dim - old.start
            pieces = math.prod(before[:at]) * (p.split_factor if dtensor.is_strided(p) else 1)
            result = _divided_dims(after, pieces, n)
            if result is None or before[at] % n:
                return None
            before[at] //= n
            after[result[0]] //= n
            placements[i] = dtensor.shard(new[result[0]], result[1])
    return tuple(placements)


def _divided_dims(sizes: Sequence[int], pieces: int, n: int) -> tuple[int, int] | None:
    """(dimension, pieces of it): of which n ranks have parts when each has a part of every one of ``pieces``."""
    for at, size in enumerate(sizes):
        outer = math.prod(sizes[:at])
        if pieces % outer == 0 and size % (pieces // outer * n) == 0:
            return at, pieces // outer
    return None


@symbols.untraced
def groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[range, range]]:
    """Runs of dimensions, before and after a view, that hold the same elements; as short as they can be, and one where
    there are none."""
    if 0 in before:
        return [(range(len(before)), range(len(after)))]
    groups, i, j = [], 0, 0
    while i < len(before) or j < len(after):
        start, a, b = (i, j), 1, 1
        if i < len(before):
            a, i = before[i], i + 1
        if j < len(after):
            b, j = after[j], j + 1
        while a != b:
            if a < b:
                a, i = a * before[i], i + 1
            else:
                b, j = b * after[j], j + 1
        groups.append((range(start[0], i), range(start[1], j)))
    return groups


def reshape_as(x: DTensor, other: DTensor) -> DTensor:
    """``aten.view_as`` and ``aten.reshape_as``; see :func:`reshape`."""
    return reshape(x, other.shape)


def flatten(x: DTensor, start_dim: int = 0, end_dim: int = -1) -> DTensor:
    """``aten.flatten``; see :func:`reshape`."""
    if not x.ndim:
        return reshape(x, [1])
    start, end = start_dim % x.ndim, end_dim % x.ndim
    return (
        x if start == end else reshape(x, [*x.shape[:start], math.prod(x.shape[start : end + 1]), *x.shape[end + 1 :]])
    )


def unflatten(x: DTensor, dim: int, sizes: list[int]) -> DTensor:
    """``aten.unflatten``; see :func:`reshape`."""
    dim %= x.ndim
    known = math.prod(n for n in sizes if n != -1)
    parts = [x.shape[dim] // known if n == -1 else n for n in sizes]
    return reshape(x, [*x.shape[:dim], *parts, *x.shape[dim + 1 :]])


class _Reshape(torch.autograd.Function):
    """A view of each rank's part."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, shape: torch.Size, placements: tuple[Placement, ...]) -> DTensor:
        ctx.set_materialize_grads(False)
        ctx.x, ctx.placements = (_without_sums(x.placements), x.shape), _without_sums(placements)
        return _as_view(x, placements, shape)

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> tuple[DTensor | None, None, None]:
        if grad is None:
            return None, None, None
        placements, shape = ctx.x
        if grad.placements != ctx.placements:
            twice = any(is_divided_twice(p) for p in (grad.placements, ctx.placements, placements))
            fitting = None if twice else placements_as(grad, shape)
            if fitting is None:
                grad = grad.redistribute(placements=ctx.placements)
            placements = fitting or placements
        return _as_view(grad, placements, shape), None, None


def _as_view(x: DTensor, placements: Sequence[Placement], shape: torch.Size) -> DTensor:
    """``x`` as ``shape``, stored as a view of the whole is: another view would be right for the whole alone, or for the
    parts alone. Of one head that is expanded, for one, the parts are a view where the whole is a copy."""
    whole = torch.empty_strided(x.shape, x.stride(), device="meta").reshape(shape)
    sizes = list(shape)
    for i, p in enumerate(placements):
        if dtensor.is_divided(p):
            sizes[p.dim] //= x.device_mesh.size(i)
    local = x.to_local().reshape(sizes)
    return DTensor.from_local(
        local.contiguous() if whole.is_contiguous() else local,
        x.device_mesh,
        placements,
        run_check=False,
        shape=shape,
        stride=whole.stride(),
    )


def _without_sums(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    return tuple(Replicate() if p.is_partial() else p for p in placements)


def _stored_alike(x: DTensor) -> DTensor:
    order = sorted(range(x.ndim), key=lambda d: -x.stride(d))
    own = dtensor.local_part(x)  # of which a trace has no node
    if 0 in x.stride() or (order == list(range(x.ndim)) and own.is_contiguous()):
        return x
    local = x.to_local()
    if local.permute(order).is_contiguous():
        return x
    back = sorted(range(x.ndim), key=order.__getitem__)
    return DTensor.from_local(
        local.permute(order).contiguous().permute(back),
        x.device_mesh,
        x.placements,
        run_check=False,
        shape=x.shape,
        stride=x.stride(),
    )


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
            raise ShardingError(
                f"{where}: dimension {dim} has {shape[dim]} elements, which {n} ranks of {names} cannot share evenly; "
                "let the plan pad it (keep_whole: true; named plans do without strict=True), choose another number of "
                "ranks, or keep it whole (R)"
            )


def even_pieces(shape: torch.Size, placements: Any, mesh: DeviceMesh, where: str) -> None:
    """Refuse parts of different sizes of what is packed in one dimension, and pieces that are not all of it.

    Raises:
        ShardingError: with the sizes, the mesh dimension and the number of ranks.
    """
    for i, p in enumerate(placements):
        sizes = packed_shards.pieces_of(p, shape[p.dim]) if dtensor.is_divided(p) else ()
        if sizes and sum(sizes) != shape[p.dim]:
            raise ShardingError(
                f"{where}: dimension {p.dim} has {shape[p.dim]} elements, not {' + '.join(map(str, sizes))}"
            )
        if any(size % mesh.size(i) for size in sizes):
            names = f'"{mesh.mesh_dim_names[i]}"' if mesh.mesh_dim_names else str(i)
            raise ShardingError(
                f"{where}: dimension {p.dim} has pieces of {', '.join(map(str, sizes))} elements, which {mesh.size(i)} "
                f"ranks of {names} cannot share evenly; choose another number of ranks, or keep it whole (R)"
            )
