"""What the elements along the last dimensions of a value are made of.

A value that is cut, joined, rolled, flipped, negated, multiplied and added element by element is read as one short sum
of products per element of its last dimensions (a *lane*): ``x[..., 3] * cos[..., 3] - x[..., 7] * sin[..., 3]``. Two
spellings of one meaning give the same sums, so that a matcher compares what is computed. What cannot be read is a
tensor of its own. The way back, a node for any list of lanes: :mod:`mindspeed_fx.passes.fusion.emit.element_exprs`.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
import torch.fx as fx

from mindspeed_fx.compat import symbols
from mindspeed_fx.graph import match
from mindspeed_fx.graph.match import aten
from mindspeed_fx.graph.new_call import NewCall

WIDEST = 2048
"""ElementExprs of one value at most; a head has up to 1024."""
TERMS, FACTORS = 2, 4
"""Of a sum and of a product that is read."""

SUMS = (aten.add.Tensor, aten.sub.Tensor, aten.rsub.Tensor, aten.addcmul.default)
NESTED = 4
"""Sums within sums that are read, more than any two terms need: the state of a recurrence is a sum of all before it,
and who looked for a rotation in each of them would read its line once for every token."""

SPLITS = ("none", "pairs", "parts", "any")
"""Which views that cut the last dimension of a tensor, or of a part of one, are looked through: none, those into pairs,
those of parts, or any. What is cut into heads is read head by head where that is enough, a joint projection, too.
"""

Factor = tuple[int, int]
"""(tensor, lane of its last dimensions)"""
Sum = tuple[tuple[float, tuple[Factor, ...]], ...]
"""(weight, factors) of each term."""


class TooWide(Exception):
    """A value has more than :data:`WIDEST` lanes, or a number of them that is not known."""


class ElementExprs:
    """Reads one value at a time; ``split``, of :data:`SPLITS`, also looks through views that cut the last dimension of
    a tensor in two.
    """

    def __init__(self, root: fx.Node, split: str = "none"):
        self.root, self.split = root, split
        self.tensors: list[tuple[fx.Node | NewCall, int]] = []
        """Each tensor that is not read further, and how many of its last dimensions its lanes run over."""
        self.sums: list[Sum] = []
        self._number: dict[Sum, int] = {}
        self.read: dict[fx.Node, torch.Tensor] = {}
        """Node -> number of the sum of each lane."""
        self._whole: set[fx.Node] = set()
        """Nodes whose lanes are those of a tensor, one by one."""
        self._sums = 0
        """Sums that the value being read is part of."""
        self.of(root)

    def exprs(self, n: fx.Node | None = None) -> list[Sum]:
        """The sums of ``n``'s lanes, of the root's without ``n``, in order."""
        return [self.sums[i] for i in self.of(n or self.root).flatten().tolist()]

    def of(self, n: fx.Node) -> torch.Tensor:
        if n not in self.read:
            handler = _HANDLERS.get(n.target) if n.op == "call_function" else None
            known = None
            is_sum = n.op == "call_function" and n.target in SUMS
            if (
                handler
                and not (is_sum and self._sums == NESTED)
                and match.is_float(n)
                and not n.meta["mutated"]
                and n.meta["grad_enabled"] == self.root.meta["grad_enabled"]
            ):
                self._sums += is_sum
                try:
                    known = handler(self, n)
                except TooWide:
                    known = None  # heads of one wide projection: what they are views of is not read, they are
                self._sums -= is_sum
            if known is None or known.numel() > WIDEST:
                self._whole.add(n)
                known = self.leaf(n, 1)
            self.read[n] = known
        return self.read[n]

    def is_leaf(self, n: fx.Node) -> bool:
        self.of(n)
        return n in self._whole

    def is_part(self, n: fx.Node) -> bool:
        """Whether the lanes of ``n`` are neighbours among those of one tensor, in order."""
        return self.of(n).dim() == 1 and self._begin(n) is not None and all(s[0][0] == 1 for s in self.exprs(n))

    def leaf(self, n: fx.Node | NewCall, dims: int) -> torch.Tensor:
        """``n`` as a tensor that is not read further, with lanes over its last ``dims`` dimensions."""
        dims = min(dims, match.value(n).dim())
        shape = match.value(n).shape[match.value(n).dim() - dims :]
        if not all(isinstance(s, int) for s in shape) or math.prod(shape) > WIDEST:
            raise TooWide
        index = next((i for i, (t, d) in enumerate(self.tensors) if d == dims and match.same(t, n)), None)
        if index is None:
            index = len(self.tensors)
            self.tensors.append((n, dims))
        count = math.prod(shape)
        return torch.tensor(
            [self.number(((1.0, ((index, lane),)),)) for lane in range(count)], dtype=torch.long
        ).reshape(shape)

    def number(self, total: Sum) -> int:
        if total not in self._number:
            self._number[total] = len(self.sums)
            self.sums.append(total)
        return self._number[total]

    def each(self, f, *codes: torch.Tensor) -> torch.Tensor | None:
        """``f`` of the sums, lane by lane; None where it gives None."""
        codes = torch.broadcast_tensors(*codes)
        known: dict[tuple[int, ...], int | None] = {}
        results = []
        for key in zip(*(c.flatten().tolist() for c in codes)):
            if key not in known:
                total = f(*(self.sums[i] for i in key))
                known[key] = None if total is None else self.number(total)
            if known[key] is None:
                return None
            results.append(known[key])
        return torch.tensor(results, dtype=torch.long).reshape(codes[0].shape)

    def both(self, a: fx.Node, b: fx.Node) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The lanes of two operands over as many dimensions. One that runs over a dimension of one more than the other
        (angles, laid beside the heads) is a tensor of its own: the other, whose elements may be moved, is read."""
        ca, cb = self.of(a), self.of(b)
        few, dims = sorted((ca.dim(), cb.dim()))
        wide, moved, narrow = (ca, a, b) if ca.dim() == dims else (cb, b, a)
        # Where there is one head whose elements are moved, angles can run over that dimension too.
        alone = (
            not self._plain(moved)
            and self._plain(narrow)
            and list(match.value(narrow).shape[-dims:-few]) == [1] * (dims - few)
        )
        dims = few if few and all(size == 1 for size in wide.shape[: dims - few]) and not alone else dims
        ca, cb = (c if c.dim() == dims else self.leaf(n, dims) for c, n in ((ca, a), (cb, b)))
        try:
            shape = torch.broadcast_shapes(ca.shape, cb.shape)
        except RuntimeError:
            return None
        return (ca, cb) if math.prod(shape) <= WIDEST else None

    def _plain(self, n: fx.Node) -> bool:
        """Whether the lanes of ``n`` are those of one tensor, none of them moved."""
        return self._begin(n) == 0

    def _begin(self, n: fx.Node) -> int | None:
        """The lane of one tensor from which on ``n`` has its lanes, one by one, each with some weight."""
        exprs = self.exprs(n)
        if not exprs or not exprs[0] or not exprs[0][0][1]:
            return None
        tensor, first = exprs[0][0][1][0]
        in_turn = all(len(s) == 1 and s[0][1] == ((tensor, first + i),) for i, s in enumerate(exprs))
        return first if in_turn else None


# --------------------------------------------------------------------------- what is read


def _same_lanes(exprs: ElementExprs, n: fx.Node) -> torch.Tensor | None:
    if not match.is_float(n.args[0]):
        return None
    if exprs.is_leaf(n.args[0]):
        exprs._whole.add(n)
    return exprs.of(n.args[0])


def _inner(exprs: ElementExprs, n: fx.Node, dim: int, source: fx.Node) -> tuple[torch.Tensor, int] | None:
    """(lanes of ``source``, ``dim`` among them) when ``dim`` is one of the dimensions that its lanes run over."""
    codes, ndim = exprs.of(source), match.value(source).dim()
    position = dim % ndim - (ndim - codes.dim())
    return (codes, position) if position >= 0 else None


def _view(exprs: ElementExprs, n: fx.Node) -> torch.Tensor | None:
    source = n.args[0]
    old, new, codes = list(match.value(source).shape), list(match.value(n).shape), exprs.of(source)
    if not _looks_through(exprs, source, pairs=new[-1:] == [2]):
        return None
    lead = len(old) - codes.dim()
    if (
        len(new) <= lead
        or not symbols.are_known_equal(old[:lead], new[:lead])
        or not all(isinstance(s, int) for s in new[lead:])
    ):
        return None
    return codes.reshape(new[lead:]) if codes.numel() == math.prod(new[lead:]) else None


def _looks_through(exprs: ElementExprs, source: fx.Node, pairs: bool) -> bool:
    """Whether a view of ``source``, into ``pairs`` or else, is read as far as :data:`SPLITS` says."""
    if exprs.split == "any" or (exprs.split == "pairs" and pairs):
        return True
    return not exprs.is_leaf(source) and (exprs.split == "parts" or not exprs.is_part(source))


def _part(exprs: ElementExprs, n: fx.Node) -> torch.Tensor | None:
    if match.is_call(n, operator.getitem) and match.is_call(n.args[0], aten.unbind.int):
        return _read_select(exprs, n, n.args[0].args[0], match.argument(n.args[0], "dim", 0), n.args[1])
    piece = match.part(n)
    inner = piece and _inner(exprs, n, piece.dim, piece.source)
    if not inner:
        return None
    codes, dim = inner
    return codes.index_select(
        dim, torch.arange(piece.start, max(piece.start, min(piece.stop, codes.shape[dim])), piece.step)
    )


def _select(exprs: ElementExprs, n: fx.Node) -> torch.Tensor | None:
    return _read_select(exprs, n, *n.args) if isinstance(n.args[2], int) else None


def _read_select(exprs: ElementExprs, n: fx.Node, source: fx.Node, dim: int, index: int) -> torch.Tensor | None:
    inner = _inner(exprs, n, dim, source)
    # A leaf's only dimension must stay: a value without lanes of its own says nothing.
    return inner[0].select(inner[1], index) if inner and inner[0].dim() > 1 else None


def _read_cat(exprs: ElementExprs, n: fx.Node) -> torch.Tensor | None:
    parts, ndim = n.args[0], match.value(n.args[0][0]).dim()
    if not all(match.is_float(p) and match.value(p).dim() == ndim for p in parts):
        return None
    codes = [exprs.of(p) for p in parts]
    dims = codes[0].dim()
    if any(c.dim() != dims for c in codes):
        return None
    stacked = n.target is aten.stack.default
    dim = match.argument(n, "dim", 0) % (ndim + stacked) - (ndim - dims)
    if dim < 0:
        return None
    return torch.stack(codes, dim) if stacked else torch.cat(codes, dim)


def _read_unsqueeze(exprs: ElementExprs, n: fx.Node) -> torch.Tensor | None:
    source = n.args[0]
    codes, ndim = exprs.of(source), match.value(source).dim()
    dim = n.args[1] % (ndim + 1) - (ndim - codes.dim())
    return codes.unsqueeze(dim) if dim >= 0 and not (exprs.is_leaf(source) and dim == 0) else None


def _read_flip(exprs: ElementExprs, n: fx.Node) -> torch.Tensor | None:
    inner = [_inner(exprs, n, d, n.args[0]) for d in n.args[1]]
    return inner[0][0].flip([d for _, d in inner]) if inner and all(inner) else None


def _read_roll(exprs: ElementExprs, n: fx.Node) -> torch.Tensor | None:
    shifts, dims = n.args[1], match.argument(n, "dims", [])
    inner = [_inner(exprs, n, d, n.args[0]) for d in dims]
    return (
        inner[0][0].roll(list(shifts), [d for _, d in inner])
        if inner and all(inner) and all(isinstance(s, int) for s in shifts)
        else None
    )


def _read_transpose(exprs: ElementExprs, n: fx.Node) -> torch.Tensor | None:
    inner = [_inner(exprs, n, d, n.args[0]) for d in n.args[1:]]
    return inner[0][0].transpose(inner[0][1], inner[1][1]) if all(inner) else None


def _read_neg(exprs: ElementExprs, n: fx.Node) -> torch.Tensor | None:
    return exprs.each(lambda a: tuple((-w, f) for w, f in a), exprs.of(n.args[0]))


def _read_mul(exprs: ElementExprs, a: fx.Node, factor: float) -> torch.Tensor | None:
    return exprs.each(lambda s: tuple((w * factor, f) for w, f in s), exprs.of(a))


def _product(exprs: ElementExprs, n: fx.Node) -> torch.Tensor | None:
    a, b = n.args[:2]
    if n.target in match.DIV:
        return _read_mul(exprs, a, 1 / b) if isinstance(b, (int, float)) and b and not n.kwargs else None
    for x, c in ((a, b), (b, a)):
        if isinstance(c, (int, float)) and match.is_float(x):
            return _read_mul(exprs, x, c)
    return _times(exprs, a, b)


def _times(exprs: ElementExprs, a: Any, b: Any) -> torch.Tensor | None:
    codes = exprs.both(a, b) if match.is_float(a) and match.is_float(b) else None
    return _multiply(exprs, *codes) if codes else None


def _multiply(exprs: ElementExprs, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | None:
    def multiply(p: Sum, q: Sum) -> Sum | None:
        results = tuple((v * w, tuple(sorted((*f, *g)))) for v, f in p for w, g in q)
        return results if len(results) <= TERMS and all(len(f) <= FACTORS for _, f in results) else None

    return exprs.each(multiply, a, b)


def _add(exprs: ElementExprs, a: torch.Tensor | None, b: torch.Tensor | None, factor: float) -> torch.Tensor | None:
    if a is None or b is None or a.shape != b.shape:
        return None

    def add(p: Sum, q: Sum) -> Sum | None:
        results = tuple(sorted((*p, *((w * factor, f) for w, f in q)), key=lambda term: term[1]))
        return results if len(results) <= TERMS else None

    return exprs.each(add, a, b)


def _sum(exprs: ElementExprs, n: fx.Node) -> torch.Tensor | None:
    a, b = n.args[:2]
    alpha = match.argument(n, "alpha", 1)
    if not (match.is_float(a) and match.is_float(b) and isinstance(alpha, (int, float))):
        return None
    if n.target is aten.rsub.Tensor:
        a, b = b, a
    codes = exprs.both(a, b)
    return _add(exprs, *codes, alpha if n.target is aten.add.Tensor else -alpha) if codes else None


def _added_product(exprs: ElementExprs, n: fx.Node) -> torch.Tensor | None:
    factor = match.argument(n, "value", 1)
    return (
        _add(exprs, exprs.of(n.args[0]), _times(exprs, *n.args[1:3]), factor)
        if isinstance(factor, (int, float))
        else None
    )


def _read_complex(exprs: ElementExprs, n: fx.Node) -> torch.Tensor | None:
    """The real and the imaginary parts of a product of complex numbers; one that is made of no two real parts has them
    as a tensor of its own.
    """
    return _complex_lanes(exprs, n.args[0])


def _complex_lanes(exprs: ElementExprs, n: Any) -> torch.Tensor | None:
    """[..., 2]: the lanes of both parts of the complex ``n``."""
    if not isinstance(n, (fx.Node, NewCall)) or n.op != "call_function" or n.meta["mutated"]:
        return None
    if n.meta["grad_enabled"] != exprs.root.meta["grad_enabled"]:
        return None
    lanes = None
    if match.is_call(n, aten.view_as_complex.default):
        lanes = exprs.of(n.args[0])
        lanes = lanes if lanes.dim() > 1 else None
    elif match.is_call(n, aten.mul.Tensor):
        lanes = _complex_product(exprs, *n.args)
    if lanes is not None:
        exprs.read[n] = lanes
    return lanes


def _complex_product(exprs: ElementExprs, a: Any, b: Any) -> torch.Tensor | None:
    """(a + ib)(c + id) = ac - bd + i(ad + bc)"""
    lanes = [_complex_lanes(exprs, x) for x in (a, b)]
    known = next((c for c in lanes if c is not None), None)
    if known is None:
        return None
    for i, x in enumerate((a, b)):
        if lanes[i] is None:
            if not isinstance(x, fx.Node) or not match.value(x).is_complex():
                return None
            x = NewCall(exprs.root, aten.resolve_conj.default, x) if match.value(x).is_conj() else x
            lanes[i] = exprs.leaf(NewCall(exprs.root, aten.view_as_real.default, x), known.dim())
    (ar, ai), (br, bi) = (c.unbind(-1) for c in lanes)
    try:
        products = [_multiply(exprs, x, y) for x, y in ((ar, br), (ai, bi), (ar, bi), (ai, br))]
    except RuntimeError:  # of shapes that do not broadcast
        return None
    real, imaginary = _add(exprs, *products[:2], -1), _add(exprs, *products[2:], 1)
    return None if real is None or imaginary is None else torch.stack((real, imaginary), -1)


_HANDLERS = {
    **dict.fromkeys((aten.to.dtype, aten.clone.default, aten.contiguous.default, aten.alias.default), _same_lanes),
    **dict.fromkeys((*match.RESHAPES, aten.squeeze.dim), _view),
    **dict.fromkeys((operator.getitem, aten.slice.Tensor, aten.narrow.default), _part),
    **dict.fromkeys((aten.cat.default, aten.stack.default), _read_cat),
    **dict.fromkeys((*match.MUL, *match.DIV), _product),
    **dict.fromkeys(SUMS[:3], _sum),
    aten.select.int: _select,
    aten.unsqueeze.default: _read_unsqueeze,
    aten.flip.default: _read_flip,
    aten.roll.default: _read_roll,
    aten.transpose.int: _read_transpose,
    aten.neg.default: _read_neg,
    aten.addcmul.default: _added_product,
    aten.view_as_real.default: _read_complex,
}
