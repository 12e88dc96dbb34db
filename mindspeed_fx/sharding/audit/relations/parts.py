"""A tensor of one rank as part of a whole one.

A whole tensor is a *term* (an operator and the terms that it reads, by number), and how its elements are arranged.
Every dimension is a list of *digits*, the outermost first, as the digits of a number in mixed bases: views split and
join digits, transpositions move them, and what was split and joined again is what it was. A digit that a mesh dimension
shares among its ranks carries that dimension's name, and the tensor of a rank is the rest. A term may further be a sum
over mesh dimensions which is not yet made (``partial``).

Example: x [4, 16] whose rows two ranks of "tp" share is ``(((root, 2, 2, "tp"), (root, 1, 2, "")), ((other, 1, 16,
""),))``: row number = 2 * rank + local row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Hashable, Iterable, Iterator, NamedTuple, Sequence

import torch
from torch import Tensor


class Unproved(Exception):
    """The local programs were not shown to be the whole one."""

    wrong = True
    """False: nothing is known, because there is no rule."""


class Unknown(Unproved):
    wrong = False


class Digit(NamedTuple):
    root: int
    """The dimension of a term that it is a digit of."""
    stride: int
    size: int
    mesh: str = ""
    """Mesh dimension whose ranks share it; "" on every rank."""

    def split(self, inner: int) -> tuple[Digit, Digit]:
        outer = self._replace(stride=self.stride * inner, size=self.size // inner)
        return outer, self._replace(size=inner)


Dim = tuple[Digit, ...]
Profile = tuple[tuple[str, Fraction], ...]
"""How mesh dimensions share a dimension: name and stride, as part of the size."""


@dataclass(frozen=True)
class Part:
    """What a rank holds of a term."""

    term: int
    dims: tuple[Dim, ...]
    partial: frozenset[str] = frozenset()
    """Mesh dimensions whose ranks' values add up to the term."""
    picked: tuple[tuple[Digit, tuple[int, ...], int], ...] = ()
    """Digits of which only one value is left: which, for each rank, and the dimension that it stood first in."""

    @property
    def local(self) -> tuple[int, ...]:
        return tuple(math.prod(d.size for d in dim if not d.mesh) for dim in self.dims)

    @property
    def whole(self) -> tuple[int, ...]:
        return tuple(math.prod(d.size for d in dim) for dim in self.dims)

    @property
    def arranged(self) -> tuple[int, tuple[Dim, ...]]:
        """The whole tensor: term and digits without names of mesh dimensions."""
        return self.term, tuple(merged(d._replace(mesh="") for d in dim) for dim in self.dims)

    def meshes(self) -> Iterator[str]:
        return (d.mesh for dim in self.dims for d in dim if d.mesh)


@dataclass(frozen=True)
class Fill:
    """The same number everywhere."""

    value: float | Part
    """A Part: of a tensor without dimensions."""
    shape: tuple[int, ...]
    """A rank's."""


def merged(digits: Iterable[Digit]) -> Dim:
    """Neighbours that are one digit joined; digits of one value dropped."""
    result: list[Digit] = []
    for d in digits:
        if d.size == 1 and not d.mesh:
            continue
        last = result[-1] if result else None
        if last and last.root == d.root and last.mesh == d.mesh == "" and last.stride == d.stride * d.size:
            result[-1] = d._replace(size=d.size * last.size)
        else:
            result.append(d)
    return tuple(result)


def profile(dim: Dim) -> Profile:
    size = math.prod(d.size for d in dim)
    result, stride = [], size
    for d in dim:
        stride //= d.size
        if d.mesh:
            result.append((d.mesh, Fraction(stride, size)))
    return tuple(result)


@dataclass
class Terms:
    """Numbers of terms and roots: equal ones have one number, in the whole program and in the local ones."""

    ranks: dict[str, int]
    """Mesh dimension -> ranks."""
    numbers: dict[Hashable, int] = field(default_factory=dict)
    known: set[tuple[int, tuple[Dim, ...]]] = field(default_factory=set)
    """Arrangements that the whole program has: they tell apart what a local view might be."""

    quotients: dict[int, tuple[Part, float]] = field(default_factory=dict)
    """Term -> the part that was divided by a number to make it, and the number."""

    choices: dict[int, tuple[tuple[int, ...], int, int]] = field(default_factory=dict)
    """Term of integers -> its shape, and among how many those of a dimension are chosen, each another one."""

    routings: dict[int, Tensor] = field(default_factory=dict)
    """Term of choices -> all of them, as they were drawn."""

    vocabularies: dict[int, tuple[int, frozenset[int]]] = field(default_factory=dict)
    """Term of ids -> how many rows they choose from, and ids that a loss ignores."""

    addends: dict[tuple[int, tuple[Dim, ...]], tuple] = field(default_factory=dict)
    """A whole tensor that is a sum -> those whose sum it is."""

    stacks: dict[tuple[int, tuple[Dim, ...]], tuple[Part, ...]] = field(default_factory=dict)
    """A whole tensor -> the parts that were stacked to make it."""

    defined: dict[int, tuple[str, Any, tuple[Part, ...]]] = field(default_factory=dict)
    """Term -> the operator that made it, what decides its function beside tensors, and the parts that it read."""

    losses: dict[tuple, tuple] = field(default_factory=dict)
    """Logits, targets and the ignored one -> the key of the loss's term."""

    loss_gradients: dict[tuple, list[tuple[Part, tuple]]] = field(default_factory=dict)
    """The same -> the gradient of the loss, and the key of that of the logits."""

    def note_ids(self, term: int, count: int, ignored: Iterable[int] = ()) -> None:
        before, others = self.vocabularies.get(term, (0, frozenset()))
        self.vocabularies[term] = (max(count, before), others | frozenset(ignored))

    def draw(self, term: int) -> tuple[list[int], Tensor]:
        """The roots of a term of ``choices``, and values for all of it: at random, the same at every call."""
        shape, dim, among = self.choices[term]
        scores = torch.rand(
            [among if i == dim else n for i, n in enumerate(shape)], generator=torch.Generator().manual_seed(term)
        )
        roots = [self.number("root", term, i) for i in range(len(shape))]
        return roots, scores.topk(shape[dim], dim).indices

    def number(self, *key: Hashable) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    def spread(self, value: Part, like: Part) -> Part:
        """A tensor without dimensions, in every place of one like ``like``."""
        shared = [profile(d) for d in like.dims]
        result = self.fresh(("spread", value.arranged, like.whole), like.whole, shared, value.partial)
        self.defined[result.term] = ("spread", None, (value,))
        return result

    def fresh(self, key: Hashable, sizes: Sequence[int], profiles: Sequence[Profile], partial: Iterable[str]) -> Part:
        """A term of its own, divided by ``profiles``."""
        term = self.number(key)
        names = [m for shared in profiles for m, _ in shared]
        if len(names) > len(set(names)):
            raise Unproved(f"two dimensions are divided over {next(m for m in names if names.count(m) > 1)}")
        dims = []
        for i, (size, shared) in enumerate(zip(sizes, profiles, strict=True)):
            dims.append(self._divided(Digit(self.number("root", term, i), 1, size), shared))
        return Part(term, tuple(dims), frozenset(partial))

    def _divided(self, rest: Digit, shared: Profile) -> Dim:
        """``rest`` cut where mesh dimensions share it."""
        digits: list[Digit] = []
        size = rest.size
        for mesh, part in shared:
            stride, count = int(part * size), self.ranks[mesh]
            if stride < 1 or part * size != stride or rest.size % (stride * count):
                raise Unknown(f"{size} is divided unevenly by {mesh}")
            if rest.size > stride * count:
                digits.append(Digit(rest.root, stride * count, rest.size // (stride * count)))
            digits.append(Digit(rest.root, stride, count, mesh))
            rest = Digit(rest.root, 1, stride)
        return merged([*digits, rest])


def regrouped(part: Part, shape: Sequence[int], known: set) -> Part:
    """``part`` viewed with another local shape.

    Where a rank's size is 1 a digit that ranks share may stand in either of two dimensions; the arrangement that the
    whole program has decides.
    """
    if part.local == tuple(shape):
        return part
    if 0 in shape:
        raise Unknown("a view of nothing")
    flat = [d for dim in part.dims for d in merged(dim)]
    options = list(_groups(flat, list(shape)))
    if not options:
        raise Unknown(f"a view of {part.local} as {tuple(shape)} cuts between parts")
    results = [replace(part, dims=dims) for dims in options]
    return next((r for r in results if r.arranged in known), results[0])


def _groups(flat: list[Digit], shape: list[int]) -> Iterator[tuple[Dim, ...]]:
    if not shape:
        if all(d.size == 1 for d in flat):
            yield ()
        return
    want, taken, rest = shape[0], [], list(flat)
    while rest and want > 1:
        d = rest.pop(0)
        if d.mesh:
            taken.append(d)
        elif want % d.size == 0:
            taken.append(d)
            want //= d.size
        elif d.size % want == 0:
            outer, inner = d.split(d.size // want)
            taken.append(outer)
            rest.insert(0, inner)
            want = 1
        else:
            return
    if want > 1:
        return
    if shape[0] == 1 and len(shape) > 1:  # here, or with what follows
        shared = next((i for i, d in enumerate(rest) if not d.mesh), len(rest))
        for count in range(1, shared + 1):
            for others in _groups(rest[count:], shape[1:]):
                yield (merged([*taken, *rest[:count]]), *others)
    if len(shape) == 1:
        taken, rest = [*taken, *rest], []
        if math.prod(d.size for d in taken if not d.mesh) != shape[0]:
            return
    for others in _groups(rest, shape[1:]):
        yield (merged(taken), *others)


def in_front(x: Part, dim: int, *digits: Digit) -> Part:
    """``digits`` before all that a rank has of a dimension; shared digits before what they divide."""
    own = x.dims[dim]
    at = next((i for i, d in enumerate(own) if not d.mesh), len(own))
    result = [*own[:at], *digits, *own[at:]]
    if len({d.root for d in result}) == 1:
        shared = [d for d in result if d.mesh]
        result = [d for d in result if not d.mesh]
        for d in shared:
            result.insert(next((i for i, e in enumerate(result) if e.stride < d.stride), len(result)), d)
    return replace(x, dims=(*x.dims[:dim], tuple(result), *x.dims[dim + 1 :]))


def settled(x: Part, digit: Digit) -> Part:
    """``digit``, which is shared now and stood first in the first dimension, before what it divides."""

    def is_next(e: Digit) -> bool:
        return e.root == digit.root and e.stride * e.size == digit.stride

    dim = next((i for i in range(len(x.dims)) if any(is_next(e) for e in x.dims[i])), 0)
    if dim == 0:
        return in_front(x, 0, digit)
    own = x.dims[dim]
    at = next(i for i, e in enumerate(own) if is_next(e))
    return replace(x, dims=(*x.dims[:dim], (*own[:at], digit, *own[at:]), *x.dims[dim + 1 :]))


def describe(part: Part) -> str:
    """For messages."""
    shared = [f"{d.mesh} along {i}" for i, dim in enumerate(part.dims) for d in dim if d.mesh]
    sums = [f"a partial sum over {m}" for m in sorted(part.partial)]
    return ", ".join(shared + sums) or "whole"
