"""What DTensor (2.13) does wrong or slowly with strided shards, put right: their sizes, costs and redistribution."""

from __future__ import annotations

import functools
import math
from typing import Any, Sequence

from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from mindspeed_fx.compat import tracing
from mindspeed_fx.compat.dtensor import is_divided, is_strided, local_tensor_mode


@functools.cache
def views_make_strided_shards() -> bool:
    """Whether DTensor views a dimension that ranks share as the inner part of another one. Before torch 2.12 it refuses
    to, and with it operators that view what they multiply."""
    from torch.distributed.tensor._ops import _view_ops

    try:
        _view_ops.propagate_shape_and_sharding([Shard(1)], (2, 2), _view_ops.dim_flatten(2), (2,), strict_view=True)
    except RuntimeError:
        return False
    return True


def correct() -> None:
    """Every correction below."""
    count_strided_shards_for_real()
    price_strided_shards_plainly()
    redistribute_strided_shards_in_order()
    part_strided_shards_of_changing_sizes()


def count_strided_shards_for_real() -> None:
    """How many elements a rank has of a strided shard, and the first of them, is computed by DTensor (2.13) on an index
    tensor that it reads back, which fails while tracing: the tensor is fake there. From here on it is computed outside
    of any trace; nothing else changes."""
    own = _StridedShard.local_shard_size_and_offset
    if getattr(own, "_real", False):
        return

    @functools.wraps(own)
    def real(self: Any, *args: Any, **kwargs: Any) -> Any:
        if all(isinstance(a, int) for a in args[:3]) and local_tensor_mode() is None:
            with tracing.outside_tracing():
                return own(self, *args, **kwargs)
        return own(self, *args, **kwargs)

    real._real = True  # type: ignore[attr-defined]
    _StridedShard.local_shard_size_and_offset = real


def part_strided_shards_of_changing_sizes() -> None:
    """Pieces whose number is a symbol, as of tokens [batch * sequence] whose sequence is divided, DTensor (2.13) takes
    apart and joins one by one, as many as there were in the step that was traced, and tells no guard. From here on they
    are parted and joined by views, [pieces, ranks, elements of a rank's part of a piece]; where ranks cannot share each
    piece evenly, the program is one of this number of pieces. Others stay as they are."""
    from torch.distributed._functional_collectives import all_gather_tensor

    if getattr(_StridedShard._select_split_tensor, "_by_views", False):
        return
    split, join, size = (
        getattr(_StridedShard, name)
        for name in ("_select_split_tensor", "_to_replicate_tensor", "local_shard_size_and_offset")
    )

    def is_even(self: Any, whole: Any, ranks: int) -> bool:
        pieces = self.split_factor
        if isinstance(pieces, int) or local_tensor_mode() is not None:
            return False
        if whole % (pieces * ranks) == 0:
            return True
        int(pieces)  # a guard
        return False

    @functools.wraps(split)
    def part(self: Any, tensor: Any, num_chunks: int, index: Any, **kwargs: Any) -> Any:
        if not is_even(self, tensor.shape[self.dim], num_chunks):
            return split(self, tensor, num_chunks, index, **kwargs)
        pieces = _pieces_of(tensor, self.dim, (self.split_factor, num_chunks))
        return pieces.select(self.dim + 1, index).flatten(self.dim, self.dim + 1).clone()

    @functools.wraps(join)
    def whole(self: Any, local: Any, mesh: Any, mesh_dim: int, shape: Any) -> Any:
        ranks = mesh.size(mesh_dim)
        if not is_even(self, shape[self.dim], ranks):
            return join(self, local, mesh, mesh_dim, shape)
        parts = all_gather_tensor(local.contiguous(), 0, (mesh, mesh_dim)).unflatten(0, (ranks, local.shape[0]))
        parts = _pieces_of(parts, self.dim + 1, (self.split_factor,))
        return parts.movedim(0, self.dim + 1).flatten(self.dim, self.dim + 2)

    @functools.wraps(size)
    def own_size(self: Any, whole: Any, ranks: int, rank: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_even(self, whole, ranks) or args or kwargs:
            return size(self, whole, ranks, rank, *args, **kwargs)
        return whole // ranks, rank * (whole // (self.split_factor * ranks))

    part._by_views = True  # type: ignore[attr-defined]
    _StridedShard._select_split_tensor = part
    _StridedShard._to_replicate_tensor = whole
    _StridedShard.local_shard_size_and_offset = own_size


def _pieces_of(x: Any, dim: int, sizes: Sequence[Any]) -> Any:
    """``x`` with ``dim`` as dimensions of ``sizes``, and one behind them of what is left."""
    return x.unflatten(dim, (*sizes, x.shape[dim] // math.prod(sizes)))


def price_strided_shards_plainly() -> None:
    """What it costs to bring a strided shard to where a way of an operator wants it DTensor (2.13) asks the cheapest
    path through all placements of the mesh, for every way of every operator: 0.3 s each on three mesh dimensions,
    minutes for a layer, and gathering one is free on that path. From here on it is what a shard of one piece costs, one
    mesh dimension after the other; costs without strided shards stay."""
    from torch.distributed.tensor import _collective_utils as costs
    from torch.distributed.tensor._ops import utils

    own = getattr(utils, "redistribute_cost", None)
    if (
        own is None
        or getattr(own, "_plain", False)
        or not all(hasattr(costs, n) for n in ("_compute_placement_transition_cost", "MeshTopoInfo", "spec_to_bytes"))
    ):
        return

    def plain(current: Any, target: Any) -> float:
        if (
            current.mesh != target.mesh
            or current.is_replicated()
            or not any(map(is_strided, (*current.placements, *target.placements)))
        ):
            return own(current, target)
        topology, cost = costs.MeshTopoInfo.build_from_mesh(current.mesh), 0.0
        sent = (
            costs.spec_to_bytes(current)
            / math.prod(n for n, p in zip(current.mesh.shape, current.placements) if is_divided(p))
            / 2**30
        )
        for dim, (p, q) in enumerate(zip(current.placements, target.placements)):
            if p == q:
                continue
            p, q = (Shard(x.dim) if is_strided(x) else x for x in (p, q))
            for a, b in ((p, Replicate()), (Replicate(), q)) if p == q else ((p, q),):
                more, sent = costs._compute_placement_transition_cost(a, b, topology, dim, sent)
                cost += more
        return cost

    plain._plain = True  # type: ignore[attr-defined]
    utils.redistribute_cost = plain


def redistribute_strided_shards_in_order() -> None:
    """Where two mesh dimensions divide one tensor dimension and one of them is a strided shard, DTensor (2.13) gathers
    one of the two with the size of the whole: rows come in another order, and memory behind them is read. From here on
    parts are undone from the innermost mesh dimension outwards and recomputed inwards, each with the size that it is a
    part of (:func:`_steps_in_order`); redistributions without strided shards stay."""
    from torch.distributed.tensor import _redistribute

    def replace(name: str) -> None:
        own = getattr(_redistribute, name)
        if getattr(own, "_in_order", False):
            return

        def plan(source: Any, target: Any, *args: Any) -> list[Any]:
            if any(map(is_strided, (*source.placements, *target.placements))):
                steps = _steps_in_order(source.shape, source.mesh, source.placements, target.placements)
                return [_redistribute._TransformInfo(*step) for step in steps]
            return own(source, target, *args)

        plan._in_order = True  # type: ignore[attr-defined]
        plan.cache_clear = getattr(own, "cache_clear", None)  # type: ignore[attr-defined]
        setattr(_redistribute, name, plan)

    for name in ("_gen_transform_infos", "_gen_transform_infos_non_cached"):
        replace(name)


def _steps_in_order(
    shape: Sequence[int], mesh: Any, source: Sequence[Placement], target: Sequence[Placement]
) -> list[tuple]:
    """(mesh dimension, (from, to), shape that it is a part of) of each step."""
    changed = {i for i, (p, q) in enumerate(zip(source, target)) if p != q}
    for i in range(
        mesh.ndim
    ):  # what an inner mesh dimension divides is undone before an outer one changes, and recomputed
        inside = {p.dim for j in changed if j < i for p in (source[j], target[j]) if is_divided(p)}
        if any(is_divided(p) and p.dim in inside for p in (source[i], target[i])):
            changed.add(i)
    now, steps = list(source), []

    def step(i: int, to: Placement) -> None:
        if now[i].is_partial() and is_strided(to):
            step(i, Replicate())  # as torch does, but 2.11, which refuses
        whole = list(shape)
        for j, p in enumerate(now):
            if j != i and is_divided(p):
                whole[p.dim] = _size_of_part(whole[p.dim], p, mesh, j)
        if is_strided(now[i]) and local_tensor_mode() is not None and not isinstance(whole[now[i].dim], int):
            raise RuntimeError(
                f"all ranks in one process cannot gather {now[i]} over mesh dimension {i}: dimension {now[i].dim} of "
                f"{tuple(shape)} as {tuple(source)} leaves ranks parts of different sizes; choose a size that they can "
                "share evenly"
            )
        steps.append((i, (now[i], to), tuple(whole)))
        now[i] = to

    for i in sorted(changed, reverse=True):
        if is_divided(now[i]):
            step(i, Replicate())
    for i in sorted(changed):
        if now[i] != target[i]:
            step(i, target[i])
    return steps


def _size_of_part(size: Any, placement: Any, mesh: Any, i: int) -> Any:
    """How much of ``size`` elements this rank has along mesh dimension ``i``; ranks differ where it is uneven."""
    pieces = placement.split_factor if is_strided(placement) else 1
    # where all ranks are one process, a size that differs is a SymInt with an integer for each of them
    if (isinstance(size, int) or local_tensor_mode() is None) and size % (pieces * mesh.size(i)) == 0:
        return size // mesh.size(i)
    return placement.local_shard_size_and_offset(size, mesh.size(i), mesh._sym_get_coordinate(i))[0]
