"""Where the elements of a gathered value go: followed through operators that only move them.

A value that was gathered is, before anything is computed with it, an arrangement of the elements that each rank gave.
:class:`Layout` is that arrangement as strides into the gathered buffer, a dimension being several (size, stride)
factors, so that a concatenation of parts and a view of it need no copy. What no strides can say is unknown, and then
nothing is claimed.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Iterator, Sequence

import torch
import torch.fx as fx

from mindspeed_fx.graph.collectives import WAIT
from mindspeed_fx.graph.op_sets import IDENTITIES, RESHAPES, UNIT_DIMENSIONS, is_cast, order_of
from mindspeed_fx.graph.schema import argument

aten = torch.ops.aten
Dim = tuple[tuple[int, int], ...]
"""(size, stride) factors of one dimension, outermost first; () for a dimension of size 1."""

PARTS = frozenset((aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int))


@dataclass(frozen=True)
class Layout:
    """Which elements of a buffer a value holds, and in which order."""

    dims: tuple[Dim, ...]
    offset: int = 0

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Layout":
        """The buffer itself, contiguous."""
        dims, stride = [], 1
        for n in reversed(shape):
            dims.append(((n, stride),) if n != 1 else ())
            stride *= n
        return cls(tuple(reversed(dims)))

    def span(self) -> tuple[int, int]:
        """First and last element held."""
        return self.offset, self.offset + sum((n - 1) * s for d in self.dims for n, s in d)

    def reshaped(self, shape: Sequence[int]) -> "Layout | None":
        """None where a factor would be cut at no divisor of it."""
        remaining = [f for d in self.dims for f in d]
        results: list[Dim] = []
        for size in shape:
            taken, need = [], int(size)
            while need > 1:
                if not remaining:
                    return None
                n, s = remaining.pop(0)
                if need % n == 0:
                    taken.append((n, s))
                    need //= n
                elif n % need == 0:
                    taken.append((need, s * (n // need)))
                    remaining.insert(0, (n // need, s))
                    need = 1
                else:
                    return None
            results.append(tuple(taken))
        return Layout(tuple(results), self.offset) if not remaining else None

    def permuted(self, order: Sequence[int]) -> "Layout":
        return Layout(tuple(self.dims[d] for d in order), self.offset)

    def sliced(self, dim: int, start: int, length: int) -> "Layout | None":
        """``length`` elements of a dimension from ``start`` on; None where they are no product of factors."""
        factors, offset, results = self.dims[dim], self.offset, []
        for k, (_n, s) in enumerate(factors):
            inner = 1
            for m, _ in factors[k + 1 :]:
                inner *= m
            if start % inner == 0 and length % inner == 0:
                results.append((length // inner, s))
                offset += start // inner * s
                return Layout(
                    (
                        *self.dims[:dim],
                        tuple(f for f in (*results, *factors[k + 1 :]) if f[0] != 1),
                        *self.dims[dim + 1 :],
                    ),
                    offset,
                )
            if start // inner != (start + length - 1) // inner:
                return None
            offset += start // inner * s
            start %= inner
        return Layout((*self.dims[:dim], (), *self.dims[dim + 1 :]), offset) if length == 1 else None

    @staticmethod
    def joined(parts: Sequence["Layout"], dim: int) -> "Layout | None":
        """The concatenation of equal parts that lie at equal distances."""
        first = parts[0]
        steps = {b.offset - a.offset for a, b in zip(parts, parts[1:])}
        if any(p.dims != first.dims for p in parts) or len(steps) > 1:
            return None
        return (
            Layout(
                (*first.dims[:dim], ((len(parts), steps.pop()), *first.dims[dim]), *first.dims[dim + 1 :]), first.offset
            )
            if steps
            else first
        )


def follow_elements(gathered: fx.Node) -> Iterator[tuple[fx.Node, Layout | None]]:
    """The ends of the ways that the elements of ``gathered`` take: nodes that compute with them (or return them), each
    with the layout of what it reads; None where that is unknown. A part of a value that is read by a computation ends
    there as the part."""
    known: dict[fx.Node, Any] = {gathered: Layout.whole(_shape(gathered))}
    pending = [gathered]
    ends: list[tuple[fx.Node, Layout | None]] = []
    while pending:
        node = min(pending)  # the first of them in the graph
        pending.remove(node)
        for user in node.users:
            if user in known:
                continue
            result = _propagate(user, known)
            if result == "later":
                continue
            if result is None:
                ends.append((user, known[node] if isinstance(known[node], Layout) else None))
            else:
                known[user] = result
                pending.append(user)
    # concatenations that were never complete compute with what they read
    ends += [
        (u, known[n] if isinstance(known[n], Layout) else None)
        for n in known
        for u in n.users
        if u not in known and not any(e is u for e, _ in ends)
    ]
    return iter(ends)


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(int(n) for n in node.meta["val"].shape)


def _propagate(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    """The layout of ``node``'s result, a tuple of them, "later" for a concatenation that misses a part; None where it
    is not known.
    """
    if node.op != "call_function":
        return None
    target, args = node.target, node.args
    x = known.get(args[0]) if args and isinstance(args[0], fx.Node) else None
    if target is aten.cat.default:
        parts, dim = args[0], argument(node, "dim")
        if any(p not in known for p in parts):
            return "later"
        return (
            Layout.joined([known[p] for p in parts], dim % len(known[parts[0]].dims))
            if all(isinstance(known[p], Layout) for p in parts)
            else None
        )
    if target is operator.getitem:
        return x[args[1]] if isinstance(x, tuple) else None
    if not isinstance(x, Layout):
        return None
    rank = len(x.dims)
    if target is WAIT or target in IDENTITIES or is_cast(target):  # every element stays where it is in the order
        return x
    if target in (*RESHAPES, *UNIT_DIMENSIONS):
        return x.reshaped(_shape(node))
    if (order := order_of(node)) is not None:
        return x.permuted(order)
    if len(node.all_input_nodes) > 1:  # a place or a size that another batch has elsewhere
        return None
    if target is aten.slice.Tensor and argument(node, "step") == 1:
        dim, start = argument(node, "dim") % rank, argument(node, "start") or 0
        size = _size(x.dims[dim])
        return x.sliced(dim, start + size if start < 0 else start, _shape(node)[dim])
    if target is aten.select.int:
        dim = args[1] % rank
        part = x.sliced(dim, args[2] % _size(x.dims[dim]), 1)
        return None if part is None else Layout((*part.dims[:dim], *part.dims[dim + 1 :]), part.offset)
    if target in PARTS:
        return _parts(node, x, rank)
    return None


def _parts(node: fx.Node, x: Layout, rank: int) -> tuple | None:
    unbind = node.target is aten.unbind.int
    dim, start, results = argument(node, "dim") % rank, 0, []
    for value in node.meta["val"]:
        length = 1 if unbind else int(value.shape[dim])
        part = x.sliced(dim, start, length)
        results.append(
            part if part is None or not unbind else Layout((*part.dims[:dim], *part.dims[dim + 1 :]), part.offset)
        )
        start += length
    return tuple(results)


def _size(dim: Dim) -> int:
    n = 1
    for size, _ in dim:
        n *= size
    return n
