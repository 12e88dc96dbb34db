"""Values of a size that ranks cannot share evenly: stored with padding behind it, so that all ranks have parts of one
size.

A :class:`Padded` value is a DTensor of the padded sizes and what is true of them. A dimension is padded only while it
is divided; what is gathered is cut to its size::

    17 positions, 2 ranks      rank 0: 0 1 2 ... 8      rank 1: 9 10 ... 16 (16)      stored 18

What stands in the padding is never read by an element of the model: operators that work element by element, row by row
or along other dimensions leave it where it is (what may be divided may be padded, :mod:`padded_rules`), sums leave it
out, and every other operator gets the whole in its true size. Padding of activations repeats the last element, so that
it can make no number that is not finite; that of parameters is zero. Gradients of padding are zero, or dropped.

A dimension that was flattened of several has an :class:`Axis` for each: tokens of [batch, sequence] are padded inside.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Any, Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils import _pytree as pytree

from mindspeed_fx.compat import dtensor
from mindspeed_fx.sharding.patterns import of_operator
from mindspeed_fx.sharding.plan import Plan, ShardingError
from mindspeed_fx.sharding.spmd import kept_whole
from mindspeed_fx.sharding.spmd.padded_axes import Axes, Axis, is_padded_axes, plain, regrouped, stored_size
from mindspeed_fx.sharding.spmd.parts import from_parts
from mindspeed_fx.sharding.spmd.redistribute import moved_to, placed_at, redistribute, reshape, wanted_placements

aten = torch.ops.aten


Called = Callable[[Any, tuple, dict], Any]
"""Runs an operator on DTensors."""


@dataclass(eq=False)
class Padded:
    """A value of which some dimensions are padded."""

    stored: DTensor
    dims: tuple[Axes, ...]
    zero: bool = False
    """Whether all padding is zero."""

    @property
    def shape(self) -> torch.Size:
        return torch.Size(math.prod(a.size for a in axes) for axes in self.dims)

    @property
    def ndim(self) -> int:
        return len(self.dims)

    @property
    def dtype(self) -> torch.dtype:
        return self.stored.dtype

    @property
    def device_mesh(self) -> DeviceMesh:
        return self.stored.device_mesh

    @property
    def padded_dims(self) -> list[int]:
        return [d for d, axes in enumerate(self.dims) if is_padded_axes(axes)]

    def dim(self) -> int:
        return len(self.dims)

    def is_floating_point(self) -> bool:
        return self.stored.is_floating_point()


def dims_of(x: DTensor | Padded) -> tuple[Axes, ...]:
    return x.dims if isinstance(x, Padded) else tuple(plain(n) for n in x.shape)


def stored_of(x: Any) -> Any:
    return x.stored if isinstance(x, Padded) else x


def same_padding(x: Any) -> Callable[[Any], Any]:
    """What makes ``x`` of what it is stored as again."""
    return lambda stored: Padded(stored, x.dims, x.zero) if isinstance(x, Padded) else stored


def is_padded(*values: Any) -> bool:
    """Whether one of ``values``, or of what they hold, is padded."""
    return any(isinstance(x, Padded) for x in pytree.tree_leaves(values))


# ------------------------------------------------------------------ into padding and out of it


def stretch(x: DTensor, dim: int, axes: Axes, fill: float | None = None) -> DTensor:
    """``x``, whole along ``dim``, with padding there: its last element again, or ``fill``."""
    return _Resized.apply(x, dim, axes, fill, True)


def shrink(x: DTensor, dim: int, axes: Axes) -> DTensor:
    """``x``, whole along ``dim``, without its padding there."""
    return _Resized.apply(x, dim, axes, 0, False)


class _Resized(torch.autograd.Function):
    """Padding that comes or goes along a dimension that is not divided; the gradient of what comes is dropped. On each
    rank's part, also of sums over ranks that are not yet made: a gradient stays such a sum, and is scattered later."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, dim: int, axes: Axes, fill: float | None, grows: bool) -> DTensor:
        ctx.set_materialize_grads(False)
        ctx.dim, ctx.axes, ctx.grows = dim, axes, grows
        local = (_longer if grows else _shorter)(x.to_local(), dim, axes, fill)
        return from_parts(local, x.device_mesh, x.placements)

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> tuple[DTensor | None, None, None, None, None]:
        if grad is None:
            return None, None, None, None, None
        sums = ("sum", None)
        whole = [
            Replicate() if dtensor.is_divided(p, ctx.dim) or getattr(p, "reduce_op", None) not in sums else p
            for p in grad.placements
        ]
        grad = grad if whole == list(grad.placements) else grad.redistribute(placements=whole)
        local = (_shorter if ctx.grows else _longer)(grad.to_local(), ctx.dim, ctx.axes, 0)
        return from_parts(local, grad.device_mesh, whole), None, None, None, None


def _longer(local: torch.Tensor, dim: int, axes: Axes, fill: float | None) -> torch.Tensor:
    def change(local: torch.Tensor, at: int, axis: Axis) -> torch.Tensor:
        count = axis.stored - axis.size
        if not count:
            return local
        last = local.narrow(at, axis.size - 1, 1)
        shape = [count if d == at else n for d, n in enumerate(local.shape)]
        return torch.cat((local, last.expand(shape) if fill is None else last.new_full(shape, fill)), at)

    return _each_axis(local, dim, axes, [a.size for a in axes], change)


def _shorter(local: torch.Tensor, dim: int, axes: Axes, _fill: float | None) -> torch.Tensor:
    def change(local: torch.Tensor, at: int, axis: Axis) -> torch.Tensor:
        return local if axis.size == axis.stored else local.narrow(at, 0, axis.size).clone()  # dense: views fit it

    return _each_axis(local, dim, axes, [a.stored for a in axes], change)


def _each_axis(local: torch.Tensor, dim: int, axes: Axes, sizes: list[int], change: Callable) -> torch.Tensor:
    if len(axes) > 1:
        local = local.unflatten(dim, sizes)
    for i, axis in enumerate(axes):
        local = change(local, dim + i, axis)
    return local.flatten(dim, dim + len(axes) - 1) if len(axes) > 1 else local


def undivided(x: DTensor | Padded, dims: Iterable[int]) -> DTensor | Padded:
    """``x`` gathered along ``dims``, in its true size there."""
    stored, axes = stored_of(x), list(dims_of(x))
    dims = set(dims)
    wanted = [Replicate() if dtensor.is_divided(p) and p.dim in dims else p for p in stored.placements]
    stored = placed_at(stored, wanted)
    for d in dims:
        if is_padded_axes(axes[d]):
            stored, axes[d] = shrink(stored, d, axes[d]), plain(math.prod(a.size for a in axes[d]))
    return wrap(stored, axes, isinstance(x, Padded) and x.zero)


def whole(x: Any) -> Any:
    """``x`` in its true size, gathered where it is padded."""
    return undivided(x, x.padded_dims) if isinstance(x, Padded) else x


def wrap(stored: DTensor, dims: Sequence[Axes], zero: bool = False) -> DTensor | Padded:
    """The value that is stored so; cut to its size where no rank has a part of it."""
    dims = list(dims)
    for d, axes in enumerate(dims):
        if is_padded_axes(axes) and not any(dtensor.is_divided(p, d) for p in stored.placements):
            stored, dims[d] = shrink(stored, d, axes), plain(math.prod(a.size for a in axes))
    return Padded(stored, tuple(dims), zero) if any(map(is_padded_axes, dims)) else stored


def as_stored(x: DTensor | Padded, dims: Mapping[int, Axes], fill: float | None = None) -> DTensor:
    """``x`` stored with this padding in some of its dimensions, and without any in the others."""
    own = dims_of(x)
    other = [d for d, axes in enumerate(own) if dims.get(d, plain(x.shape[d])) != axes and is_padded_axes(axes)]
    missing = [d for d, axes in dims.items() if is_padded_axes(axes) and (own[d] != axes)]
    if other or missing:
        x = undivided(x, {*other, *missing})
    stored = stored_of(x)
    for d in missing:
        stored = stretch(stored, d, dims[d], fill)
    return stored


def mask_of(dims: Sequence[Axes], like: DTensor) -> DTensor:
    """bool, True for elements and False for padding; of one element where a dimension has none."""
    ndim, result = len(dims), None
    for d, axes in enumerate(dims):
        if not is_padded_axes(axes):
            continue
        line = torch.ones((), dtype=torch.bool, device=like.device)
        for a in axes:
            line = line.unsqueeze(-1) & (torch.arange(a.stored, device=like.device) < a.size)
        line = line.reshape([-1 if i == d else 1 for i in range(ndim)])
        result = line if result is None else result & line
    return DTensor.from_local(result, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)


def masked(x: Padded, fill: float, dims: Iterable[int] | None = None) -> DTensor:
    """``x`` as it is stored, with ``fill`` in the padding (of ``dims``)."""
    if x.zero and fill == 0:
        return x.stored
    chosen = [axes if dims is None or d in dims else plain(1) for d, axes in enumerate(x.dims)]
    if not any(map(is_padded_axes, chosen)):
        return x.stored
    stored = placed_at(x.stored, [Replicate() if p.is_partial() else p for p in x.stored.placements])
    number = fill if x.is_floating_point() else bool(fill) if x.dtype == torch.bool else int(fill)
    return aten.where.ScalarOther(mask_of(chosen, stored), stored, number)


def aligned(tensors: Iterable[Any], shape: Sequence[int]) -> list[Axes]:
    """The dimensions of what padded and other tensors are broadcast to."""
    result = [plain(n) for n in shape]
    for x in tensors:
        for d, axes in enumerate(dims_of(x), len(shape) - x.ndim):
            if is_padded_axes(axes) and not is_padded_axes(result[d]):
                result[d] = axes
    return result


def broadcast(x: Any, dims: Sequence[Axes], fill: float | None = None) -> DTensor:
    """``x`` as an operand of a result of these dimensions."""
    shift = len(dims) - x.ndim
    own = {d - shift: axes for d, axes in enumerate(dims) if d >= shift and x.shape[d - shift] > 1}
    return as_stored(x, own, fill)


def tensors_of(*values: Any) -> list[Any]:
    return [x for x in pytree.tree_leaves(values) if isinstance(x, (DTensor, Padded))]


def reshaped(x: DTensor | Padded, shape: Sequence[int]) -> DTensor | Padded | None:
    """A view of the same elements, whose true size is ``shape``; None: it would part a padded axis."""
    dims = regrouped([a for axes in dims_of(x) for a in axes], shape)
    if dims is None:
        return None
    zero = isinstance(x, Padded) and x.zero
    return wrap(reshape(stored_of(x), [stored_size(axes) for axes in dims]), dims, zero)


def viewed_parts(parts: Sequence[Any], dim: int, after: Sequence[int]) -> tuple[list[Any], int] | None:
    """Tensors that lie one behind the other along ``dim`` in the view of them all as ``after``, and along which
    dimension they do there; None: it is no view of each."""
    sizes = [p.shape[dim] for p in parts]
    outer = math.prod(parts[0].shape[:dim])
    for j, size in enumerate(after):
        unit, rest = divmod(sum(sizes), size)
        if math.prod(after[:j]) != outer or size == 1 != sum(sizes) or rest or any(n % unit for n in sizes):
            continue
        results = [reshaped(p, [*after[:j], n // unit, *after[j + 1 :]]) for p, n in zip(parts, sizes)]
        return None if any(r is None for r in results) else (results, j)
    return None


# ------------------------------------------------------------------ placements


def place(
    x: DTensor | Padded,
    wanted: Sequence[Placement],
    move: Callable[[DTensor, Sequence[Placement]], DTensor] = placed_at,
    twice: Collection[int] = (),
    parted: Mapping[int, int] | None = None,
) -> DTensor | Padded:
    """``x`` at ``wanted``, one placement for every mesh dimension, padded where the ranks cannot share it evenly.

    Args:
        twice: mesh dimensions whose ranks need two chunks each, of one size (a causal ring).
        parted: dimension -> the outer one of those that it will be viewed as, which is then padded.

    Raises:
        ShardingError: a dimension of one element, or a padded one that was flattened of several, to be divided.
    """
    mesh, over = x.device_mesh, [[i for i, p in enumerate(wanted) if dtensor.is_divided(p, d)] for d in range(x.ndim)]
    ranks = [math.prod(mesh.size(i) for i in own) for own in over]
    halves = [2 * math.prod(mesh.size(i) for i in own if i in twice) for own in over]
    chunks = [math.lcm(n, half) if set(own) & set(twice) else n for n, half, own in zip(ranks, halves, over)]
    uneven = [d for d, axes in enumerate(dims_of(x)) if stored_size(axes) % chunks[d]]
    for d in uneven:
        if len(dims_of(x)[d]) > 1 or x.shape[d] < 2 or any(dtensor.is_strided(wanted[i]) for i in over[d]):
            raise ShardingError(f"value of shape {tuple(x.shape)}: dimension {d} cannot be padded for {ranks[d]} ranks")
    x, parted = undivided(x, uneven), parted or {}
    stored, dims, zero = stored_of(x), list(dims_of(x)), isinstance(x, Padded) and x.zero and not uneven
    for d in uneven:
        size = parted.get(d, x.shape[d])
        axis, inner = Axis(size, -(-size // chunks[d]) * chunks[d]), x.shape[d] // size
        kept_whole.note_padding(size, axis.stored, ranks[d], [mesh.mesh_dim_names[i] for i in over[d]])
        dims[d] = (axis,) if inner == 1 else (axis, Axis(inner, inner))
        stored = stretch(stored, d, dims[d])
    return wrap(move(stored, wanted), dims, zero)


def input_at(x: DTensor, wanted: Sequence[Placement], plan: Plan) -> DTensor | Padded:
    """An input of the model at ``wanted``; its gradient comes back as a sum."""
    if not kept_whole.may_pad():
        return x.redistribute(placements=kept_whole.evenly_divided(x.shape, wanted, x.device_mesh))
    return place(x, wanted, lambda t, p: t.redistribute(placements=p), dims_in_chunks(plan, x.device_mesh))


def dims_in_chunks(plan: Plan, mesh: DeviceMesh) -> list[int]:
    """Mesh dimensions over which keys go round, so that a sequence is padded to two chunks for each rank."""
    edges = [edge for p, edge in plan.operators.items() if "attention" in of_operator(p)[1] and plan.keep_whole]
    keys = [placed for edge in edges for name, placed in edge.arguments.items() if "key" in name]
    return [mesh.mesh_dim_names.index(dim) for placed in keys for dim, word in placed.items() if word == "S(2)"]


def constrain(
    x: Any, placed: Sequence[tuple[str, str]], stays_whole: bool = False, parted: Mapping[int, int] | None = None
) -> Any:
    """An edge of the plan: ``x`` at ``placed``; other mesh dimensions stay. Padded where the plan allows it.

    Args:
        stays_whole: what has fewer elements than there are ranks is not padded.
        parted: see :func:`place`.
    """
    if not placed or not isinstance(x, (DTensor, Padded)):
        return x
    if isinstance(x, Padded) or kept_whole.may_pad():
        wanted = wanted_placements(stored_of(x), dict(placed))
        for i, p in enumerate(wanted):
            if stays_whole and dtensor.is_divided(p) and x.shape[p.dim] < x.device_mesh.size(i):
                over = f'{x.device_mesh.size(i)} ranks of "{x.device_mesh.mesh_dim_names[i]}"'
                kept_whole.note(
                    f"value of shape {tuple(x.shape)}: dimension {p.dim} has {x.shape[p.dim]} elements, which {over} "
                    "cannot share evenly"
                )
                wanted[i] = Replicate()
        with contextlib.suppress(ShardingError):
            return place(x, wanted, moved_to, parted=parted)
    return redistribute(whole(x), dict(placed))


# ------------------------------------------------------------------ parameters


def is_uneven(shape: Sequence[int], placements: Sequence[Placement], mesh: DeviceMesh) -> bool:
    return any(
        isinstance(p, Shard) and not dtensor.is_strided(p) and shape[p.dim] % mesh.size(i)
        for i, p in enumerate(placements)
    )


def parameter(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, name: str
) -> DTensor | Padded:
    """A parameter of which ranks hold parts of unequal sizes, the first ones the longest: their parts with zeros
    behind."""
    dims = [plain(n) for n in shape]
    for i, p in enumerate(placements):
        if not isinstance(p, Shard) or shape[p.dim] % mesh.size(i) == 0:
            continue
        n = mesh.size(i)
        length = math.ceil(shape[p.dim] / n)
        dims[p.dim] = (Axis(shape[p.dim], length * n, blank=True),)
        own = [min(length, max(0, shape[p.dim] - place * length)) for place in range(n)]
        count = dtensor.by_coordinate(mesh, i, [length - size for size in own].__getitem__)
        kept_whole.note_padding(shape[p.dim], length * n, n, [mesh.mesh_dim_names[i]], name)
        if not isinstance(count, int) or count:
            local = torch.nn.functional.pad(local, [0, 0] * (local.ndim - 1 - p.dim) + [0, count])
    return Padded(from_parts(local, mesh, placements), tuple(dims), zero=True)


def can_be_padded(shape: Sequence[int], placements: Sequence[Placement]) -> bool:
    """Whether an input of the model may be padded as it is divided: channels of images may not, nor one element."""
    divided = [p.dim for p in placements if dtensor.is_divided(p)]
    return all(shape[d] > 1 and (d == 0 or len(shape) < 4) for d in divided)
