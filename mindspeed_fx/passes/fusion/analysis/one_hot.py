"""Tensors that are zero but for a few places per token: one-hot vectors, their products and sums, by meaning.

Such a tensor [tokens ..., sizes ...] is a list of terms; each says at which place of every size a token has its value.
One-hot vectors are ``one_hot`` or a comparison with ``arange``; they stay sparse through casts, products with anything,
``einsum``, outer products and sums, also over choices that a token has ([tokens, choices] places). Source: Lepikhin et
al. 2020, "GShard".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx

from mindspeed_fx.graph import match
from mindspeed_fx.graph.match import aten
from mindspeed_fx.graph.new_call import NewCall
from mindspeed_fx.passes.fusion.analysis import positions
from mindspeed_fx.passes.fusion.analysis.bands import Index


@dataclass(frozen=True)
class Term:
    """For every token the value ``weight`` at ``places``, zero elsewhere."""

    places: tuple[fx.Node | None, ...]
    """Per size an index shaped like the tokens, then like their choices if there are any; None for a size of one."""
    weight: fx.Node | None = None
    """Shaped like a place; None: one."""


@dataclass(frozen=True)
class Sparse:
    """The sum of ``terms``."""

    tokens: int
    """Leading dimensions that are tokens."""
    terms: tuple[Term, ...]
    chosen: bool = False
    """The places have one more dimension, choices, over which is summed."""


class Reader:
    """Reads tensors for a root, before which the calls are to stand that combine weights."""

    def __init__(self, root: fx.Node):
        self.root = root
        self.region: list[fx.Node] = []
        self._known: dict[fx.Node, Sparse | None] = {}

    def make(self, target: Any, *args: Any, **kwargs: Any) -> NewCall:
        return NewCall(self.root, target, *args, **kwargs)

    def of(self, n: Any) -> Sparse | None:
        if not isinstance(n, fx.Node) or n.op != "call_function" or n.target not in _HANDLERS or n.meta["mutated"]:
            return None
        if match.is_float(n) and n.meta["grad_enabled"] != self.root.meta["grad_enabled"]:
            return None
        if n not in self._known:
            self._known[n] = _HANDLERS[n.target](self, n)
            if self._known[n] is not None:
                self.region.append(n)
        return self._known[n]

    def times(self, a: fx.Node | None, b: fx.Node | None) -> fx.Node | None:
        return b if a is None else a if b is None else self.make(aten.mul.Tensor, a, b)

    def stacked(self, sparse: Sparse) -> tuple[list[fx.Node], fx.Node | None]:
        """Places, one per size, and weights, [tokens ..., choices] of all terms together."""
        terms = sparse.terms

        def joined(parts: list[fx.Node]) -> fx.Node:
            if len(parts) == 1:
                return parts[0] if sparse.chosen else self.make(aten.unsqueeze.default, parts[0], -1)
            return self.make(aten.cat.default if sparse.chosen else aten.stack.default, parts, -1)

        places = [joined([t.places[d] for t in terms]) for d in range(len(terms[0].places))]
        if all(t.weight is None for t in terms):
            return places, None
        return places, joined(
            [t.weight if t.weight is not None else self.make(aten.ones_like.default, t.places[0]) for t in terms]
        )


# --------------------------------------------------------------------------- one-hot vectors


def _one_hot(r: Reader, n: fx.Node) -> Sparse | None:
    return (
        Sparse(match.value(n.args[0]).dim(), (Term((n.args[0],)),))
        if match.argument(n, "num_classes", -1) != -1
        else None
    )


def _equal(r: Reader, n: fx.Node) -> Sparse | None:
    """i[..., None] == arange(size): a place that is out of range has no one."""
    for index, places in ((n.args[0], n.args[1]), (n.args[1], n.args[0])):
        if (
            not (isinstance(index, fx.Node) and isinstance(places, fx.Node))
            or match.value(index).is_floating_point()
            or positions.meaning(places) != Index(1, 0)
        ):
            continue
        shape, size = match.value(index).shape, match.value(n).shape[-1]
        if (
            len(shape) == match.value(n).dim()
            and isinstance(shape[-1], int)
            and shape[-1] == 1
            and match.value(places).shape[-1] == size
        ):
            index = r.make(aten.squeeze.dim, index, -1)
            inside = r.make(
                aten.logical_and.default, r.make(aten.ge.Scalar, index, 0), r.make(aten.lt.Scalar, index, size)
            )
            return Sparse(len(shape) - 1, (Term((r.make(aten.clamp.default, index, 0, size - 1),), inside),))
    return None


# --------------------------------------------------------------------------- what keeps them sparse


def _cast(r: Reader, n: fx.Node) -> Sparse | None:
    sparse, to = r.of(n.args[0]), match.value(n).dtype
    if sparse is None:
        return None
    if to == torch.bool and match.value(n.args[0]).dtype != torch.bool:
        return _nonzero(r, sparse)
    if match.is_float(n.args[0]) and not to.is_floating_point:
        return None
    return replace(
        sparse,
        terms=tuple(
            t
            if t.weight is None or match.value(t.weight).dtype == to
            else replace(t, weight=r.make(aten.to.dtype, t.weight, to))
            for t in sparse.terms
        ),
    )


def _nonzero(r: Reader, sparse: Sparse) -> Sparse | None:
    """One where the sum is not zero: of terms that meet in one place, the first stands for all."""
    if any(p is None for t in sparse.terms for p in t.places):
        return None
    if len(sparse.terms) == 1 and not sparse.chosen:
        (term,) = sparse.terms
        return replace(
            sparse,
            terms=(replace(term, weight=None if term.weight is None else r.make(aten.ne.Scalar, term.weight, 0)),),
        )
    places, weight = r.stacked(sparse)
    meets = None
    for p in places:
        here = r.make(aten.eq.Tensor, r.make(aten.unsqueeze.default, p, -1), r.make(aten.unsqueeze.default, p, -2))
        meets = here if meets is None else r.make(aten.logical_and.default, meets, here)
    earlier = r.make(aten.any.dim, r.make(aten.tril.default, meets, -1), -1)
    kept = r.make(aten.logical_not.default, earlier)
    if weight is not None:
        total = r.make(
            aten.sum.dim_IntList, r.make(aten.mul.Tensor, meets, r.make(aten.unsqueeze.default, weight, -2)), [-1]
        )
        kept = r.make(aten.logical_and.default, kept, r.make(aten.ne.Scalar, total, 0))
    return Sparse(sparse.tokens, (Term(tuple(places), kept),), True)


def _read_unsqueeze(r: Reader, n: fx.Node) -> Sparse | None:
    sparse = r.of(n.args[0])
    at = n.args[1] % match.rank(n) - (sparse.tokens if sparse else 0)
    if sparse is None or at < 0:
        return None
    return replace(sparse, terms=tuple(replace(t, places=(*t.places[:at], None, *t.places[at:])) for t in sparse.terms))


def _read_mul(r: Reader, n: fx.Node) -> Sparse | None:
    a, b = n.args[:2]
    divided = n.target in match.DIV
    for x, other in ((a, b),) if divided else ((a, b), (b, a)):
        sparse = r.of(x)
        if sparse is None:
            continue
        if not divided and (factor := r.of(other)) is not None:
            return _intersect(r, sparse, factor)
        dims = match.value(n).dim()
        if match.value(x).dim() != dims:
            return None
        terms = [
            _with(r, sparse, t, other, dims, aten.div.Tensor if divided else aten.mul.Tensor) for t in sparse.terms
        ]
        return replace(sparse, terms=tuple(terms)) if None not in terms else None
    return None


def _read_and(r: Reader, n: fx.Node) -> Sparse | None:
    """Of booleans the product."""
    booleans = all(isinstance(x, fx.Node) and match.value(x).dtype == torch.bool for x in n.args)
    return _read_mul(r, n) if booleans else None


def _with(r: Reader, sparse: Sparse, term: Term, other: Any, dims: int, target: Any) -> Term | None:
    """``term`` times (or divided by) a number or a dense tensor."""
    if match.number(other) is not None:
        if term.weight is None:
            return (
                None
                if target is aten.div.Tensor
                else replace(
                    term,
                    weight=r.make(
                        aten.full_like.default,
                        term.places[0],
                        match.number(other),
                        dtype=torch.float64 if isinstance(other, float) else None,
                    ),
                )
            )
        return replace(term, weight=r.make(target, term.weight, other))
    if sparse.chosen or not isinstance(other, fx.Node):
        return None
    missing = dims - match.value(other).dim()
    shape = [1] * missing + list(match.value(other).shape)
    if missing:
        other = r.make(aten.reshape.default, other, shape)
    for i in reversed(range(len(term.places))):
        place, size = term.places[i], shape[sparse.tokens + i]
        alone = isinstance(size, int) and size == 1
        if not alone and (place is None or i != len(term.places) - 1):
            return None
        if alone:
            other = r.make(aten.squeeze.dim, other, sparse.tokens + i)
        else:
            lead = list(match.value(place).shape)
            other = (
                r.make(aten.expand.default, other, [*lead, *shape[sparse.tokens : sparse.tokens + i + 1]])
                if len(term.places) == 1
                else None
            )
            if other is None:
                return None
            other = r.make(
                aten.squeeze.dim, r.make(aten.gather.default, other, -1, r.make(aten.unsqueeze.default, place, -1)), -1
            )
    if term.weight is None:
        if target is aten.div.Tensor:
            other = r.make(aten.reciprocal.default, other)
        shape = next(p for p in term.places if p is not None)
        return replace(term, weight=r.make(aten.expand.default, other, list(match.value(shape).shape)))
    return replace(term, weight=r.make(target, term.weight, other))


def _intersect(r: Reader, a: Sparse, b: Sparse) -> Sparse | None:
    """The product of two: one at a place only where both are."""
    if (
        a.tokens != b.tokens
        or a.chosen
        or b.chosen
        or any(len(s.terms) != 1 for s in (a, b))
        or len(a.terms[0].places) != len(b.terms[0].places)
    ):
        return None
    (x,), (y,) = a.terms, b.terms
    weight, places = r.times(x.weight, y.weight), []
    for p, q in zip(x.places, y.places):
        if p is not None and q is not None and not match.same(p, q):
            weight = r.times(weight, r.make(aten.eq.Tensor, p, q))
        places.append(p if p is not None else q)
    return Sparse(a.tokens, (Term(tuple(places), weight),))


def _read_add(r: Reader, n: fx.Node) -> Sparse | None:
    a, b = (r.of(x) for x in n.args[:2])
    if (a or b) and not n.kwargs and 0 in [match.number(x) for x in n.args[:2]]:
        return a or b  # Python's sum() begins with 0
    if (
        a is None
        or b is None
        or n.kwargs
        or a.tokens != b.tokens
        or a.chosen != b.chosen
        or match.value(n.args[0]).shape != match.value(n.args[1]).shape
    ):
        return None
    return (
        replace(a, terms=(*a.terms, *b.terms))
        if all(p is not None for t in (*a.terms, *b.terms) for p in t.places)
        else None
    )


def _read_sum(r: Reader, n: fx.Node) -> Sparse | None:
    """A sum over the last dimension of the tokens: what is left are choices."""
    sparse, dims = r.of(n.args[0]), [d % match.rank(n.args[0]) for d in n.args[1]]
    if (
        sparse is None
        or sparse.chosen
        or dims != [sparse.tokens - 1]
        or sparse.tokens < 2
        or match.argument(n, "keepdim", False)
    ):
        return None
    return Sparse(sparse.tokens - 1, sparse.terms, True)


def parse_einsum(n: fx.Node) -> tuple[list[str], str] | None:
    """(letters of each operand, letters of the result) of an einsum; None for ellipses and results that are left
    unsaid.
    """
    equation = n.args[0].replace(" ", "")
    if "->" not in equation or "." in equation:
        return None
    left, right = equation.split("->")
    return left.split(","), right


def _einsum(r: Reader, n: fx.Node) -> Sparse | None:
    """A product of one-hot vectors, and of weights of the tokens, without a sum over places."""
    words = parse_einsum(n)
    if words is None:
        return None
    letters, result = words
    results = [(word, r.of(x), x) for word, x in zip(letters, n.args[1])]
    sparse = [(word, s) for word, s, _ in results if s is not None]
    if (
        not sparse
        or any(s.chosen or len(s.terms) != 1 for _, s in sparse)
        or len({(s.tokens, w[: s.tokens]) for w, s in sparse}) != 1
    ):
        return None
    count = sparse[0][1].tokens
    tokens, places, weight = sparse[0][0][:count], {}, None
    for word, s in sparse:
        weight = r.times(weight, s.terms[0].weight)
        for letter, place in zip(word[count:], s.terms[0].places):
            if letter in places and not match.same(places[letter], place):
                weight = r.times(weight, r.make(aten.eq.Tensor, places[letter], place))
            places.setdefault(letter, place)
    for word, s, x in results:
        if s is None and word == tokens:
            weight = r.times(weight, x)
        elif s is None and word[:-1] == tokens and word[-1:] in places:
            weight = r.times(
                weight,
                r.make(
                    aten.squeeze.dim,
                    r.make(aten.gather.default, x, -1, r.make(aten.unsqueeze.default, places[word[-1]], -1)),
                    -1,
                ),
            )
        elif s is None:
            return None
    chosen = result[: count - 1] == tokens[:-1] and tokens[-1] not in result
    lead = tokens[:-1] if chosen else tokens
    order = result[len(lead) :]
    if result[: len(lead)] != lead or sorted(order) != sorted(places) or None in places.values():
        return None
    return Sparse(len(lead), (Term(tuple(places[letter] for letter in order), weight),), chosen)


_HANDLERS = {
    aten.one_hot.default: _one_hot,
    aten.eq.Tensor: _equal,
    **dict.fromkeys((aten.to.dtype, aten._to_copy.default), _cast),
    aten.unsqueeze.default: _read_unsqueeze,
    **dict.fromkeys((*match.MUL, *match.DIV), _read_mul),
    **dict.fromkeys((aten.__and__.Tensor, aten.bitwise_and.Tensor, aten.logical_and.default), _read_and),
    aten.add.Tensor: _read_add,
    aten.sum.dim_IntList: _read_sum,
    aten.einsum.default: _einsum,
}
