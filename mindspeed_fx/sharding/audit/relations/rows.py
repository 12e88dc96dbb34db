"""Rows on their way to experts: every row is told by the pair of token and choice that it is of.

``moe_permute`` copies a token once for each of its choices. Of a tensor of such rows the whole program has a term with
one row for each pair, in the order of pairs; what a rank holds is that term's rows, in an order that is data: a number
for each of its rows (:class:`Rows`). The numbers follow from drawn choices (``numbers.py``), so that what is said of
rows holds for those choices; what is in a row is a term as everywhere.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any, Callable, Iterator, Sequence

import torch
from torch import Tensor

from mindspeed_fx.sharding.audit.relations import rules
from mindspeed_fx.sharding.audit.relations.numbers import Place, whole_index
from mindspeed_fx.sharding.audit.relations.parts import Part, Profile, Terms, Unknown, Unproved, profile

ZERO, ANYTHING = -1, -2
"""In place of a pair: a row of zeros; a row of which nothing is known."""

KEEPS_ZERO = frozenset("swiglu swiglu_backward mul add sub neg _to_copy silu gelu relu".split())


@dataclass(frozen=True, eq=False)
class Rows:
    part: Part
    """[pairs, ...], whole."""
    pairs: tuple[Tensor, ...]
    """For each rank int64 [rows]: the pair of each row, :data:`ZERO` or :data:`ANYTHING`."""
    experts: Tensor
    """int64 [pairs]: the expert that each pair chose."""

    def moved(self, pairs: Sequence[Tensor]) -> Rows:
        return replace(self, pairs=tuple(pairs))


@dataclass(frozen=True, eq=False)
class Order:
    """Where ``moe_permute`` put each of a rank's pairs."""

    tokens: Part
    positions: tuple[Tensor, ...]
    """For each rank int64 [own pairs]."""
    pairs: tuple[Tensor, ...]
    """For each rank int64 [own pairs]: which they are."""
    count: int
    experts: Tensor
    picked: tuple[int, tuple[int, ...]] | None = None
    """Of several equal pieces along the pairs, how many there are and which one each rank has; ``tokens`` is of all."""

    def piece(self, count: int, index: Sequence[int]) -> Order:
        """Piece ``index`` (of each rank) of ``count``."""
        positions = tuple(p.chunk(count)[i] for p, i in zip(self.positions, index))
        pairs = tuple(p.chunk(count)[i] for p, i in zip(self.pairs, index))
        return replace(self, positions=positions, pairs=pairs, picked=(count, tuple(index)))


def piece_of_each(orders: Sequence[Order]) -> Order:
    """For each rank the piece that it has of one order.

    Raises:
        Unknown: they are of several.
    """
    first = orders[0]
    if any(o.tokens != first.tokens or not o.picked or o.picked[0] != first.picked[0] for o in orders):  # type: ignore[index]
        raise Unknown("ranks read pieces of different orders")
    each = list(enumerate(orders))
    index = tuple(o.picked[1][r] for r, o in each)  # type: ignore[index]
    positions, pairs = tuple(o.positions[r] for r, o in each), tuple(o.pairs[r] for r, o in each)
    return replace(first, positions=positions, pairs=pairs, picked=(first.picked[0], index))  # type: ignore[index]


def rows_of_each(each: Sequence[Rows]) -> Rows:
    """For each rank the rows that it has, in several pieces of one tensor.

    Raises:
        Unknown: they are of several.
    """
    if any(x.part != each[0].part or x.experts is not each[0].experts for x in each):
        raise Unknown("ranks read rows of different tensors")
    return each[0].moved([x.pairs[r] for r, x in enumerate(each)])


@dataclass
class Context:
    """What a rule about rows is given beside its arguments."""

    terms: Terms
    places: Sequence[Place]
    key: tuple
    numbers: Callable[[int], list[Tensor]]
    """Of the argument in a place."""
    members: Callable[[int], list[int]]
    """Of a collective: the ranks that share a group with a rank."""
    mesh: Callable[[], str] = str
    """Of a collective: its mesh dimension."""


# ----------------------------------------------------------------------- moves


def permuted(c: Context, x: Part, ids: Part, k: int | None = None) -> tuple[Rows, Order]:
    if x.partial or profile(x.dims[1]):
        raise Unknown("rows of partial or divided tokens are permuted")
    chosen = [n.flatten() for n in c.numbers(1)]
    tokens = [whole_index(x.dims[0], p.at) for p in c.places]
    k = len(chosen[0]) // len(tokens[0])
    pairs = tuple((t[:, None] * k + torch.arange(k)).flatten() for t in tokens)
    count = x.whole[0] * k
    if len(c.places) == 1:
        c.terms.routings[ids.term] = chosen[0]
    experts = c.terms.routings[ids.term]
    if any(not torch.equal(experts[p], e) for p, e in zip(pairs, chosen)):
        raise Unproved("tokens are sorted by the choices of others")
    positions = tuple(torch.ops.mindspeed.moe_permute(torch.zeros(len(t), 1), e)[1] for t, e in zip(tokens, chosen))
    part = c.terms.fresh(("copies", k, x.arranged), [count, x.whole[1]], [(), ()], ())
    own = []
    for p, at in zip(pairs, positions):
        own.append(torch.empty_like(p).scatter_(0, at.long(), p))
    return Rows(part, tuple(own), experts), Order(x, positions, pairs, count, experts)


def taken(x: Rows, index: Sequence[Tensor]) -> Rows:
    return x.moved([p[i] for p, i in zip(x.pairs, index)])


def masked(x: Rows, mask: Sequence[Tensor]) -> Rows:
    """Rows where ``mask`` [rows, 1 ...] is true, zeros elsewhere."""
    flat = [m.reshape(m.shape[0], -1)[:, 0] for m in mask]
    return x.moved([torch.where(m, p, ZERO) for p, m in zip(x.pairs, flat)])


def exchanged(c: Context, x: Rows, size: int, messages: Sequence[Tensor], receives: Sequence[Tensor]) -> Rows:
    """Runs of rows to every rank of a group, zeros behind what comes."""
    runs = [p.split([*sent.tolist(), len(p) - int(sent.sum())]) for p, sent in zip(x.pairs, messages)]
    result = []
    for place in c.places:
        ranks = c.members(place.rank)
        mine = ranks.index(place.rank)
        come = [runs[r][mine] for r in ranks]
        if [len(run) for run in come] != receives[place.rank].tolist()[: len(ranks)]:
            raise Unproved("a rank sends another number of rows than is received")
        got = torch.cat(come)
        if len(got) > size:
            raise Unproved("more rows come than there is room for")
        result.append(torch.cat([got, torch.full((size - len(got),), ZERO)]))
    return x.moved(result)


def gathered(c: Context, x: Rows) -> Rows:
    return x.moved([torch.cat([x.pairs[r] for r in c.members(p.rank)]) for p in c.places])


def added(c: Context, x: Rows, scattered: bool) -> Rows:
    """The sum over ranks, where no two have something in one place; ``scattered``: of which each keeps one piece."""
    result = []
    for place in c.places:
        ranks = c.members(place.rank)
        every = torch.stack([x.pairs[r] for r in ranks])
        if bool(((every != ZERO).sum(0) > 1).any()) or bool((every == ANYTHING).any()):
            raise Unproved("a sum over ranks adds two rows of one place")
        whole = every.max(0).values
        result.append(whole.chunk(len(ranks))[ranks.index(place.rank)] if scattered else whole)
    return x.moved(result)


def alike(rows: Sequence[Rows]) -> None:
    """All have the same pair in every place."""
    first = rows[0]
    for other in rows[1:]:
        if any(not torch.equal(a, b) for a, b in zip(first.pairs, other.pairs)):
            raise Unproved("rows of different pairs meet")


def each(c: Context, name: str, short: str, rows: Sequence[Rows], commutes: bool) -> list[Rows]:
    """What works row by row."""
    alike(rows)
    parts = [r.part for r in rows]
    if name in rules.RULES:
        results = [p for p in rules.apply(c.terms, name, c.key, parts) if p is not None]
    else:
        results = [rules.pointwise(c.terms, short, c.key, parts, commutes)]
    pairs = rows[0].pairs
    if short not in KEEPS_ZERO:
        pairs = tuple(torch.where(p == ZERO, ANYTHING, p) for p in pairs)
    return [replace(rows[0], part=p, pairs=pairs) for p in results]


# ----------------------------------------------------------------------- experts


def _groups(c: Context, rows: Rows, ends: Sequence[Tensor], weight: Part) -> Iterator[tuple[Tensor, Tensor]]:
    """For each rank: its experts, and for each row the expert that it meets, -1 behind the last one's."""
    if weight.partial or any(profile(d) for d in weight.dims[1:]):
        raise Unknown("experts that are divided inside")
    if any(profile(d) for d in rows.part.dims[1:]):
        raise Unknown("rows whose columns are divided meet experts")
    for place, pairs, end in zip(c.places, rows.pairs, ends):
        own = whole_index(weight.dims[0], place.at)
        group = torch.searchsorted(end.long(), torch.arange(len(pairs)), right=True)
        met = torch.cat([own, torch.tensor([-1])])[group.clamp(max=len(own))]
        known = pairs >= 0
        if bool((known & (met < 0)).any()):
            raise Unproved("a row is in no expert's part")
        if bool((rows.experts[pairs.clamp(min=0)] != met)[known].any()):
            raise Unproved("a row meets another expert than it chose")
        if bool(((pairs == ANYTHING) & (met >= 0)).any()):
            raise Unproved("an expert's rows hold one that is no pair's")
        yield own, met


def product(c: Context, x: Rows, weight: Part, ends: Sequence[Tensor], what: str = "grouped_matmul") -> Rows:
    """Every row times the matrix of its expert."""
    list(_groups(c, x, ends, weight))
    wide = weight.whole[2] if what == "grouped_matmul" else weight.whole[1]
    key = (what, c.key, x.part.arranged, weight.arranged)
    return replace(x, part=c.terms.fresh(key, [x.part.whole[0], wide], [(), ()], ()))


def product_backward(c: Context, grad: Rows, x: Rows, weight: Part, ends: Sequence[Tensor]) -> tuple[Rows, Part]:
    groups = list(_groups(c, grad, ends, weight))
    if any(profile(d) for d in x.part.dims[1:]):
        raise Unknown("rows whose columns are divided meet experts")
    dx = product(c, grad, weight, ends, "grouped_matmul_dx")
    required, present = [], []
    for (own, met), a, b in zip(groups, grad.pairs, x.pairs):
        counted = (a >= 0) & (b >= 0) & (met >= 0)
        if bool((counted & (a != b)).any()):
            raise Unproved("rows of different pairs meet")
        required.append(torch.isin(x.experts, own))
        present.append(_counted(a[counted], len(x.experts)))
    partial = covered(c, required, present)
    key = ("grouped_matmul_dw", c.key, grad.part.arranged, x.part.arranged)
    return dx, c.terms.fresh(key, weight.whole, [profile(d) for d in weight.dims], partial)


def _counted(pairs: Tensor, count: int) -> Tensor:
    return torch.bincount(pairs, minlength=count)


def covered(c: Context, required: Sequence[Tensor], present: Sequence[Tensor]) -> frozenset[str]:
    """Mesh dimensions over which what ranks have adds up to what is required, each pair once.

    Raises:
        Unproved: there are none.
    """
    if all(torch.equal(p, r.to(p.dtype)) for r, p in zip(required, present)):
        return frozenset()
    names = list(c.places[0].at)
    for n in range(1, len(names) + 1):
        for over in itertools.combinations(names, n):
            if _adds_up(c.places, required, present, over):
                return frozenset(over)
    raise Unproved("a pair's row is missing, or counted twice")


def _adds_up(places: Sequence[Place], required: Any, present: Any, over: tuple[str, ...]) -> bool:
    sums: dict[tuple, Tensor] = {}
    needs: dict[tuple, Tensor] = {}
    for place, r, p in zip(places, required, present):
        group = tuple(at for m, at in place.at.items() if m not in over)
        sums[group] = sums[group] + p if group in sums else p
        if not torch.equal(needs.setdefault(group, r), r):
            return False
    return all(torch.equal(sums[g], needs[g].to(sums[g].dtype)) for g in sums)


# ----------------------------------------------------------------------- back to tokens


def _returned(c: Context, rows: Rows, order: Order) -> frozenset[str]:
    required, present = [], []
    for pairs, at, own in zip(rows.pairs, order.positions, order.pairs):
        back = pairs[at.long()]
        if bool(((back != own) & (back != ZERO)).any()):
            raise Unproved("a token gets a row that is not its own")
        present.append(_counted(back[back >= 0], order.count))
        required.append(_counted(own, order.count))
    return covered(c, required, present)


def _columns(rows: Rows, partial: frozenset[str]) -> Profile:
    """How ranks share the columns, none of those over which rows are added up."""
    shared = profile(rows.part.dims[1])
    if any(m in partial for m, _ in shared):
        raise Unproved("rows are added up over ranks that hold other columns")
    return shared


def unpermuted(c: Context, name: str, rows: Rows, order: Order, probs: Part | None) -> Part:
    """A token's rows added up, each times its share."""
    shared = profile(order.tokens.dims[0])
    if probs is not None and (probs.partial or profile(probs.dims[0]) != shared):
        raise Unproved("shares of experts are divided otherwise than tokens")
    key = (name, c.key, rows.part.arranged, None if probs is None else probs.arranged)
    sizes, partial = [order.tokens.whole[0], rows.part.whole[1]], _returned(c, rows, order)
    return c.terms.fresh(key, sizes, [shared, _columns(rows, partial)], partial)


def unpermuted_backward(c: Context, grad: Part, rows: Rows, order: Order, probs: Part) -> tuple[Rows, Part]:
    shared = profile(order.tokens.dims[0])
    partial = _returned(c, rows, order)
    across = _columns(rows, partial)
    if grad.partial or profile(grad.dims[0]) != shared or profile(grad.dims[1]) != across:
        raise Unproved("a gradient is divided otherwise than tokens")
    if probs.partial or profile(probs.dims[0]) != shared:
        raise Unproved("shares of experts are divided otherwise than tokens")
    partial |= {m for m, _ in across}  # the gradient of a share is a sum over columns
    key = (c.key, grad.arranged, probs.arranged)
    part = c.terms.fresh(("moe_unpermute_dx", *key), [order.count, grad.whole[1]], [(), across], ())
    own = []
    for p, at in zip(order.pairs, order.positions):
        own.append(torch.empty_like(p).scatter_(0, at.long(), p))
    shares = ("moe_unpermute_dp", *key, rows.part.arranged)
    return Rows(part, tuple(own), order.experts), c.terms.fresh(
        shares, probs.whole, [profile(d) for d in probs.dims], partial
    )
