"""How a value is cut into chunks, and the nodes that take a chunk out of a value and put chunks together again."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Callable, Sequence

import torch
import torch.fx as fx

from mindspeed_fx.compat import fake
from mindspeed_fx.graph.match import value
from mindspeed_fx.graph.op_sets import may_copy
from mindspeed_fx.graph.rewrite import insert

aten = torch.ops.aten


Parts = int | tuple[int, ...]
"""How many chunks, all alike; or how large each is beside the others: (1, 3, 3, 1)."""


def shares(parts: Parts) -> tuple[int, ...]:
    """How large each chunk is, in units of which ``sum(shares(parts))`` are the whole."""
    return (1,) * parts if isinstance(parts, int) else parts


@dataclass(frozen=True)
class ChunkSpec:
    """Dimension ``dim`` is cut, each of its ``blocks`` equal blocks by itself: chunk i has the i-th part of every
    block.

    What p ranks gathered along a dimension has p blocks there, for a chunk of the gathered is the gathered chunk: the
    same part of every rank's rows.
    """

    dim: int
    blocks: int = 1

    def fits(self, shape: Sequence[Any], parts: Parts) -> bool:
        """Whether a tensor of this shape has such chunks."""
        size = shape[self.dim]
        return isinstance(size, int) and size > 0 and size % (self.blocks * sum(shares(parts))) == 0


@dataclass(frozen=True)
class Sum:
    """Instead of a cut: the whole is the sum over the chunks of what was cut in ``blocks``."""

    blocks: int = 1


def through_view(cut: ChunkSpec, before: Sequence[int], after: Sequence[int]) -> ChunkSpec | None:
    """The cut of a tensor of shape ``before`` as one of shape ``after`` that holds the same elements in order; None
    where there is none.
    """
    if not all(isinstance(n, int) for n in (*before, *after)):
        return None
    outer = cut.blocks
    for n in before[: cut.dim]:
        outer *= n
    rest = 1  # elements behind the cut within a block
    for n in before[cut.dim + 1 :]:
        rest *= n
    inside = before[cut.dim] // cut.blocks * rest
    seen = 1
    for dim, n in enumerate(after):
        blocks = outer // seen
        if outer % seen == 0 and n % blocks == 0 and n > blocks:
            behind = 1
            for m in after[dim + 1 :]:
                behind *= m
            return ChunkSpec(dim, blocks) if n // blocks * behind == inside else None
        seen *= n
    return None


def chunk_size(size: int, parts: Parts, i: int) -> int:
    """Chunk ``i``'s part of a size."""
    each = shares(parts)
    return size // sum(each) * each[i]


def chunk_shape(shape: Sequence[int], cut: ChunkSpec, parts: Parts, i: int) -> list[int]:
    return [chunk_size(n, parts, i) if d == cut.dim else n for d, n in enumerate(shape)]


def is_packed(x: torch.Tensor) -> bool:
    """Whether the elements lie side by side, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


Put = Callable[..., fx.Node]
"""``put(before, target, args, kwargs)`` adds a call to the graph."""


_ORIGIN = ("nn_module_stack", "stack_trace", "source_fn_stack")


class Draft:
    """A :data:`Put` for graphs that are only priced, or large and of fixed sizes: calls of equal inputs share one fake
    value, which costs the most to compute.
    """

    def __init__(self, gm: fx.GraphModule, values: dict[Any, Any]):
        self.gm, self.values = gm, values

    def __call__(self, before: fx.Node, target: Any, args: tuple, kwargs: dict | None = None) -> fx.Node:
        if may_copy(target):  # whether it is a view says the memory of its own input
            return insert(self.gm, before, target, args, kwargs)
        if target is operator.getitem:
            known = args[0].meta["val"][args[1]]
        else:
            inputs: list[Any] = []
            plain = fx.map_arg((args, kwargs or {}), lambda n: inputs.append(_key(n.meta.get("val"))) or n)
            key = (target, repr(fx.map_arg(plain, lambda n: ())), tuple(inputs))
            known = self.values.get(key)
            if known is None:
                new = insert(self.gm, before, target, args, kwargs)
                self.values[key] = new.meta["val"]
                return new
        with self.gm.graph.inserting_before(before):
            new = self.gm.graph.call_function(target, args, kwargs or {})
        new.meta = {**{k: before.meta[k] for k in _ORIGIN if k in before.meta}, "val": known}
        return new


def _key(value: Any) -> Any:
    return (
        fake.layout_key(value)
        if isinstance(value, torch.Tensor)
        else tuple(map(_key, value))
        if isinstance(value, (list, tuple))
        else str(value)
    )


def take(put: Put, before: fx.Node, x: fx.Node, cut: ChunkSpec, i: int, parts: Parts) -> fx.Node:
    """Chunk ``i`` of ``x``, which is contiguous where it has several blocks; a view where it has one."""
    shape, each = list(value(x).shape), shares(parts)
    block = shape[cut.dim] // cut.blocks
    first, end = (block // sum(each) * sum(each[:n]) for n in (i, i + 1))
    if cut.blocks == 1:
        return put(before, aten.slice.Tensor, (x, cut.dim, first, end))
    apart = put(before, aten.view.default, (x, shape[: cut.dim] + [cut.blocks, block] + shape[cut.dim + 1 :]))
    part = put(before, aten.slice.Tensor, (apart, cut.dim + 1, first, end))
    return put(before, aten.view.default, (dense(put, before, part), chunk_shape(shape, cut, parts, i)))


def together(
    put: Put, before: fx.Node, chunks: Sequence[fx.Node], cut: "ChunkSpec | Sum", like: torch.Tensor
) -> fx.Node:
    """The whole, of the shape, type and layout of ``like``."""
    if isinstance(cut, Sum):
        return _sum_chunks(put, before, chunks)
    if cut.blocks == 1:
        whole = put(before, aten.cat.default, (list(chunks), cut.dim))
    else:
        unfolded = lambda shape: [*shape[: cut.dim], cut.blocks, shape[cut.dim] // cut.blocks, *shape[cut.dim + 1 :]]
        pieces = [put(before, aten.view.default, (dense(put, before, c), unfolded(value(c).shape))) for c in chunks]
        whole = put(before, aten.view.default, (put(before, aten.cat.default, (pieces, cut.dim + 1)), list(like.shape)))
    return stored_like(put, before, whole, like)


def _sum_chunks(put: Put, before: fx.Node, chunks: Sequence[fx.Node]) -> fx.Node:
    """chunk 0 + chunk 1 + ..., in float32 for sixteen-bit types."""
    dtype = value(chunks[0]).dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    parts = [c if wide == dtype else put(before, aten._to_copy.default, (c,), {"dtype": wide}) for c in chunks]
    total = parts[0]
    for p in parts[1:]:
        total = put(before, aten.add.Tensor, (total, p))
    return total if wide == dtype else put(before, aten._to_copy.default, (total,), {"dtype": dtype})


def dense(put: Put, before: fx.Node, x: fx.Node) -> fx.Node:
    """``x``, copied where it is not contiguous."""
    return (
        x
        if value(x).is_contiguous()
        else put(before, aten.clone.default, (x,), {"memory_format": torch.contiguous_format})
    )


def stored_like(put: Put, before: fx.Node, x: fx.Node, like: torch.Tensor) -> fx.Node:
    """``x`` stored in the order of dimensions that ``like`` is stored in."""
    if fake.layout(value(x)) == fake.layout(like):
        return x
    order = sorted(range(like.dim()), key=lambda d: (-like.stride(d), d))
    inner = dense(put, before, put(before, aten.permute.default, (x, order)))
    return put(before, aten.permute.default, (inner, sorted(range(like.dim()), key=order.__getitem__)))
