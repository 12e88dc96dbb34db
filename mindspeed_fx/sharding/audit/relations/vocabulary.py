"""A vocabulary of which ranks hold parts: embedding, the sum over all classes in a loss, and the gradients of both.

Every rank looks up what it has rows for. What it reads of the others is masked, so that over the ranks each id is read
once, of its own row: a partial sum of what the whole program reads. Which ids a rank reads, and from which row, is
tabulated for every id (``lookups.py``), so that a mask that is missing, an offset that is off by one or a row that two
ranks have is seen. The loss that is made of such numbers is recognized by ``losses.py``.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Callable, Iterator, Sequence

import torch
import torch.fx as fx
from torch import Tensor

from mindspeed_fx.sharding.audit.relations import indexing, rules
from mindspeed_fx.sharding.audit.relations.lookups import Lookup, every_id
from mindspeed_fx.sharding.audit.relations.numbers import Numeric, Place, whole_index
from mindspeed_fx.sharding.audit.relations.parts import Fill, Part, Profile, Terms, Unknown, Unproved, profile
from mindspeed_fx.sharding.audit.relations.rows import covered

VIEWS = frozenset("view _unsafe_view reshape".split())


@dataclass(frozen=True, eq=False)
class Fetched:
    """What ranks read of a dimension in parts, right or wrong."""

    part: Part
    """What it is where each rank reads the row of the id."""
    ids: Part
    """As many dimensions as ``part``; those along which all is read of one id have one element."""
    rows: tuple[Tensor, ...]
    """For each rank, for every id: the whole dimension's row that it reads."""
    count: int
    """Rows of the whole dimension."""


@dataclass(frozen=True, eq=False)
class Masked:
    """A part where something holds of its ids, zero elsewhere."""

    part: Part
    ids: Part
    kept: tuple[Tensor, ...]
    """For each rank, for every id."""


@dataclass(frozen=True)
class Largest:
    """Of a dimension in parts, of each rank's part."""

    part: Part
    """That of the whole dimension."""
    over: frozenset[str]


@dataclass
class Context:
    """What a rule is given beside its arguments."""

    terms: Terms
    places: Sequence[Place]
    node: fx.Node
    lookup: Callable[[int], Lookup]
    """Of the argument in a place."""


def concerns(short: str, args: Sequence[Any]) -> bool:
    if short in ("amax", "stack", "unbind", "select"):
        return True
    flat = [a for a in args if isinstance(a, (Part, Fill, Numeric, Fetched, Masked, Largest))]
    numeric = any(isinstance(a, Numeric) for a in flat)
    return any(isinstance(a, (Fetched, Masked, Largest)) for a in flat) or numeric and len(flat) > 1


def apply(c: Context, short: str, args: list) -> Any:
    """The relation of one place of the programs; None where no rule of these speaks of it."""
    own = any(isinstance(a, (Fetched, Masked, Largest)) for a in args)
    try:
        result = _looked_up(c, short, args)
    except Unknown:
        if own:
            raise
        return None  # integers that follow from no ids
    if result is None:
        result = _of_own(c, short, args)
    if result is None and any(isinstance(a, Fetched) for a in args):
        raise Unproved("rows of ids that a rank has no rows for are read, and not masked")
    if result is None and any(isinstance(a, Largest) for a in args):
        raise Unproved("the largest of a rank's own classes is read for that of all")
    if result is None and any(isinstance(a, Masked) for a in args):
        raise Unknown("no rule for what some ids alone have")
    return result


def _looked_up(c: Context, short: str, args: list) -> Any:
    """Where ids that ranks have made their own decide."""
    if short == "embedding" and _in_parts(args, 0, 0):
        return _embedding(c, args[0], c.lookup(1))
    if short == "gather" and _in_parts(args, 0, args[1]) and isinstance(args[2], Numeric):
        return _gather(c, args[0], args[1] % len(args[0].dims), c.lookup(2))
    if short in ("mul", "where"):
        at = next((i for i, a in enumerate(args) if isinstance(a, Numeric)), None)
        others = [a for a in args if not isinstance(a, Numeric)]
        last = others[-1] if others else None
        zero = short == "mul" or at == 0 and isinstance(last, Fill) and last.value == 0
        if at is not None and others and zero and isinstance(others[0], (Fetched, Part)):
            return _masked(c, others[0], c.lookup(at))
    if short == "embedding_dense_backward" and isinstance(args[0], Masked):
        return _embedding_backward(c, args[0], c.lookup(1), *args[2:])
    if short in ("scatter_add", "scatter") and isinstance(args[3], Masked) and args[0] == Fill(0.0, args[0].shape):
        return _scatter(c, args[0].shape, args[1] % len(args[0].shape), c.lookup(2), args[3])
    return None


def _of_own(c: Context, short: str, args: list) -> Any:
    x = args[0]
    if short == "amax" and isinstance(x, Part) and len(args) > 1 and len(args[1]) == 1:
        return _largest(c.terms, x, args[1][0] % len(x.dims))
    if short == "stack" and all(isinstance(a, Part) for a in x) and not any(args[1:]):
        return stacked(c.terms, x)
    if short in ("unbind", "select") and isinstance(x, Part) and args[1:2] in ([], [0]):
        pieces = _unstacked(c.terms, x)
        return pieces if pieces is None or short == "unbind" else pieces[args[2]]
    if short == "sub" and isinstance(x, Fetched) and isinstance(args[1], Part):
        return replace(x, part=rules.pointwise(c.terms, "sub", plain_key(2), [x.part, args[1]]))
    if isinstance(x, (Fetched, Masked, Largest)):
        return _viewed(c.node, short, x, args)
    return None


def plain_key(count: int) -> tuple[str, str]:
    """That of an operator whose arguments are tensors alone."""
    return repr(["tensor"] * count), repr([])


def _in_parts(args: list, at: int, dim: Any) -> bool:
    x = args[at]
    return isinstance(x, Part) and isinstance(dim, int) and bool(profile(x.dims[dim % len(x.dims)]))


def _viewed(node: fx.Node, short: str, x: Any, args: list) -> Any:
    """Dimensions of one element come and go."""
    shape = tuple(node.meta["val"].shape)
    parts = [x.part] if isinstance(x, Largest) else [x.part, x.ids]
    rank = len(x.part.dims)
    if short in VIEWS and shape == x.part.local:
        return x
    if short == "unsqueeze":
        dim = args[1] % (rank + 1)
        parts = [replace(p, dims=(*p.dims[:dim], (), *p.dims[dim:])) for p in parts]
    elif short == "squeeze" and len(args) > 1 and x.part.whole[args[1] % rank] == 1:
        dim = args[1] % rank
        parts = [replace(p, dims=(*p.dims[:dim], *p.dims[dim + 1 :])) for p in parts]
    else:
        return None
    return replace(x, **dict(zip(("part", "ids"), parts)))


def stacked(terms: Terms, pieces: Sequence[Part]) -> Part:
    """Along a new first dimension; taken apart again by ``unbind`` and ``select``."""
    first = pieces[0]
    shared = [profile(d) for d in first.dims]
    if any([profile(d) for d in p.dims] != shared or p.whole != first.whole for p in pieces):
        raise Unproved("what is stacked is divided in different ways")
    if any(p.partial != first.partial for p in pieces):
        raise Unproved("a partial sum is stacked with what is none")
    key = ("stack", *(p.arranged for p in pieces))
    result = terms.fresh(key, [len(pieces), *first.whole], [(), *shared], first.partial)
    terms.stacks[result.arranged] = tuple(pieces)
    return result


def _unstacked(terms: Terms, x: Part) -> list[Part] | None:
    pieces = terms.stacks.get(x.arranged)
    if pieces is None or [profile(d) for d in x.dims] != [(), *(profile(d) for d in pieces[0].dims)]:
        return None
    return [replace(p, partial=x.partial) for p in pieces]


def _largest(terms: Terms, x: Part, dim: int) -> Part | Largest:
    if x.partial:
        raise Unproved("the largest of partial sums is taken")
    rest = [i for i in range(len(x.dims)) if i != dim]
    part = terms.fresh(("amax", dim, x.arranged), [x.whole[i] for i in rest], [profile(x.dims[i]) for i in rest], ())
    over = frozenset(m for m, _ in profile(x.dims[dim]))
    return Largest(part, over) if over else part


def reduced(x: Largest, mesh: str) -> Part | Largest:
    """``all_reduce`` with "max"."""
    over = x.over - {mesh}
    return replace(x, over=over) if over else x.part


# ----------------------------------------------------------------------- forward


def _embedding(c: Context, weight: Part, look: Lookup) -> Fetched:
    part = indexing.embedded(c.terms, weight, look.ids)
    ids = replace(look.ids, dims=(*look.ids.dims, ()))
    return Fetched(part, ids, _rows(c, weight, 0, look), weight.whole[0])


def _gather(c: Context, x: Part, dim: int, look: Lookup) -> Fetched:
    if x.partial:
        raise Unproved("a partial sum is read by what is not linear in it")
    sizes = [1 if i == dim else n for i, n in enumerate(x.whole)]
    shared = [() if i == dim else profile(d) for i, d in enumerate(x.dims)]
    if [profile(d) for d in look.ids.dims] != shared or look.ids.whole != tuple(sizes):
        raise Unknown("what is picked is divided otherwise than its index")
    part = c.terms.fresh(("picked", dim, x.arranged, look.ids.arranged), sizes, shared, ())
    c.terms.defined[part.term] = ("picked", dim, (x, look.ids))
    return Fetched(part, look.ids, _rows(c, x, dim, look), x.whole[dim])


def _rows(c: Context, x: Part, dim: int, look: Lookup) -> tuple[Tensor, ...]:
    rows = []
    for place, table in zip(c.places, look.tables):
        own = whole_index(x.dims[dim], place.at)
        if int(table.min()) < 0 or int(table.max()) >= len(own):
            raise Unproved("a row is read that is none of a rank's")
        rows.append(own[table])
    return tuple(rows)


def _masked(c: Context, x: Fetched | Part, mask: Lookup) -> Part | Masked:
    if any(t.dtype != torch.bool for t in mask.tables):
        raise Unknown("no mask")
    if isinstance(x, Part):
        return Masked(x, mask.ids, mask.tables)
    if mask.ids != x.ids:
        raise Unproved("what is looked up is masked by other ids")
    counted = _counted(c.terms, x)
    ids = every_id(c.terms, x.ids.term)[counted]
    kept = [t[counted] for t in mask.tables]
    if any(bool((k & (r[counted] != ids)).any()) for k, r in zip(kept, x.rows)):
        raise Unproved("the row of another id is read")
    over = read_once(c, kept)
    name, *rest = c.terms.defined.get(x.part.term, ("", None))
    if name == "embedding":
        return replace(x.part, partial=x.part.partial | over)
    shared = [profile(d) for d in x.part.dims]
    result = c.terms.fresh(("kept", x.part.arranged), x.part.whole, shared, x.part.partial | over)
    c.terms.defined[result.term] = ("kept", None, (x.part,))
    return result


def _counted(terms: Terms, x: Fetched) -> Tensor:
    """bool: of every id, whether it is a row that counts."""
    ids = every_id(terms, x.ids.term)
    _, ignored = terms.vocabularies[x.ids.term]
    rows = (ids >= 0) & (ids < x.count)
    embedded = terms.defined.get(x.part.term, ("",))[0] == "embedding"
    return rows if embedded or not ignored else rows & ~torch.isin(ids, torch.tensor(sorted(ignored)))


def read_once(c: Context, present: Sequence[Tensor]) -> frozenset[str]:
    """Mesh dimensions over which each id is read once.

    Args:
        present: for each rank, for every id that counts, whether it reads it.

    Raises:
        Unproved: there are none.
    """
    try:
        return covered(c, [torch.ones_like(p, dtype=torch.int64) for p in present], [p.long() for p in present])
    except Unproved:
        raise Unproved("the row of an id is read by no rank, or by two whose sum is made") from None


# ----------------------------------------------------------------------- backward


def _homes(
    c: Context, masked: Masked, look: Lookup, count: int, size: int, ignored: frozenset[int] = frozenset()
) -> Profile:
    """How ``size`` rows are divided, of which every rank has ``count`` and adds to each what is of its own id.

    Args:
        ignored: ids whose gradient is zero, so that it does not matter where it goes.
    """
    ids = every_id(c.terms, look.ids.term)
    free = torch.isin(ids, torch.tensor(sorted(ignored), dtype=torch.int64))
    counted = (ids >= 0) & (ids < size) & ~free
    divisions = list(_divisions(c.terms.ranks, size, count))
    if not divisions:
        raise Unknown(f"{size} rows, of which a rank has {count}")
    for shared in divisions:
        part = c.terms.fresh(("rows", size), [size], [shared], ())
        own = [whole_index(part.dims[0], p.at) for p in c.places]
        each = zip(own, masked.kept, look.tables)
        if all(_is_home(o, ids[free], ids[k & counted], t[k & counted]) for o, k, t in each):
            return shared
    raise Unproved("a gradient is added to the row of another id, or an id's row gets none")


def _is_home(own: Tensor, free: Tensor, ids: Tensor, at: Tensor) -> bool:
    """Whether each of ``ids`` is the rank's row ``at``, and no row gets nothing but those that are ``free``."""
    if at.numel() and (int(at.min()) < 0 or int(at.max()) >= len(own)):
        return False
    return torch.equal(own[at], ids) and bool(torch.isin(own, torch.cat([ids, free])).all())


def _divisions(ranks: dict[str, int], size: int, count: int) -> Iterator[Profile]:
    for n in range(len(ranks) + 1):
        for names in itertools.permutations(ranks, n):
            parts = list(itertools.accumulate((ranks[m] for m in names), lambda a, b: a * b))
            if count * (parts[-1] if parts else 1) == size:
                yield tuple((m, Fraction(1, k)) for m, k in zip(names, parts))


def _embedding_backward(c: Context, grad: Masked, look: Lookup, count: int, *rest: Any) -> Part:
    if grad.ids != replace(look.ids, dims=(*look.ids.dims, ())):
        raise Unproved("a gradient is masked by other ids than it is of")
    size, _ = c.terms.vocabularies[look.ids.term]
    shared = _homes(c, grad, look, count, size)
    whole = indexing.embedding_gradient(c.terms, grad.part, look.ids, size, rest)
    if {m for m, _ in shared} & whole.partial:
        raise Unproved("a partial sum meets parts over the same ranks")
    key = indexing.gradient_key(size, rest, grad.part, look.ids)
    return c.terms.fresh(key, whole.whole, [shared, profile(whole.dims[1])], whole.partial)


def _scatter(c: Context, shape: Sequence[int], dim: int, look: Lookup, grad: Masked) -> Part:
    if grad.ids != look.ids:
        raise Unproved("what is scattered is masked by other ids than it is of")
    size, ignored = c.terms.vocabularies[look.ids.term]
    shared = [profile(d) for d in grad.part.dims]
    shared[dim] = _homes(c, grad, look, shape[dim], size, ignored)
    sizes = [size if i == dim else n for i, n in enumerate(grad.part.whole)]
    key = ("scattered", dim, size, grad.part.arranged, look.ids.arranged)
    result = c.terms.fresh(key, sizes, shared, grad.part.partial)
    c.terms.defined[result.term] = ("scattered", dim, (grad.part, look.ids))
    return result
