"""Products and sums of products, read as factors whose dimensions are labelled: what einsum says, in any spelling.

Casts between floating types are seen through: who computes the form does so in at least the precision of the model.

``einsum("bcln,bcsn->bcls", C, B) * L`` is [C bcln, B bcsn, L bcls], and so is the same with ``matmul``, or broadcast
products that are summed over a dimension, in any association. A label stands for one dimension of the whole; labels
that the result does not have are summed over.
"""

from __future__ import annotations

import itertools
from typing import Any, Callable, NamedTuple, Sequence

import torch.fx as fx

from mindspeed_fx.compat import symbols
from mindspeed_fx.graph import match
from mindspeed_fx.graph.match import aten

SAME = (aten.contiguous.default, aten.clone.default)
"""Calls that change no value and no dimension."""


class Factor(NamedTuple):
    node: fx.Node
    labels: tuple[Any, ...]
    """One for each dimension; None where it is broadcast."""


class Form(NamedTuple):
    """number * sum over the labels that are not in ``labels`` of the product of ``factors``."""

    number: float
    factors: list[Factor]
    labels: tuple[Any, ...]


def read(n: fx.Node, is_leaf: Callable[[fx.Node], bool] = lambda _: False) -> Form:
    """``n`` as a form; what is no product, and what ``is_leaf`` says, is a factor."""
    labels = tuple(object() for _ in match.value(n).shape)
    factors: list[Factor] = []
    number = _collect(n, labels, is_leaf, factors)
    return Form(number, factors, labels)


def named(form: Form, kinds: Sequence[str], pattern: str) -> list[fx.Node] | None:
    """The nodes of the form's factors in the order of ``pattern``, when it is that; else None.

    Args:
        kinds: for each factor of the form, what it is.
        pattern: as "row bcln, row bcsn, pairs bcls -> bcls": the kind and the letters of each factor, then the
            result's. Letters stand for labels, one to one.
    """
    left, result = pattern.split("->")
    wanted = [tuple(entry.split()) for entry in left.split(",")]
    if len(wanted) != len(form.factors) or form.number != 1:
        return None
    for order in itertools.permutations(range(len(wanted))):
        if all(kinds[i] == kind for i, (kind, _) in zip(order, wanted)):
            pairs = [(form.factors[i].labels, letters) for i, (_, letters) in zip(order, wanted)]
            if _one_to_one([*pairs, (form.labels, result.strip())]):
                return [form.factors[i].node for i in order]
    return None


def lettered(form: Form, result: str, summed: str = "") -> list[tuple[fx.Node, str]] | None:
    """Each factor with the letters of its dimensions, where ``result`` are those of the form's, and ``summed`` the one
    that is summed over, if any; None where another is, where one is broadcast, or with a number before them."""
    letters = dict(zip(form.labels, result))
    names = []
    for factor in form.factors:
        others = [label for label in factor.labels if label not in letters]
        if None in others or (others and not summed):
            return None
        letters.update(dict.fromkeys(others, summed))
        names.append((factor.node, "".join(letters[label] for label in factor.labels)))
    ones = list(letters.values()).count(summed) <= 1 and all(len(set(own)) == len(own) for _, own in names)
    return names if form.number == 1 and ones and len(form.labels) == len(result) else None


def _one_to_one(pairs: list[tuple[tuple[Any, ...], str]]) -> bool:
    letters: dict[Any, str] = {}
    for labels, names in pairs:
        if len(labels) != len(names) or None in labels:
            return False
        for label, name in zip(labels, names):
            if letters.setdefault(label, name) != name:
                return False
    return len(set(letters.values())) == len(letters)


def _collect(n: Any, labels: tuple[Any, ...], is_leaf: Callable, factors: list[Factor]) -> float:
    """Add the factors of ``n``, whose dimensions are ``labels``; the number before them."""
    if is_leaf(n):
        factors.append(Factor(n, labels))
        return 1.0
    inner = _operands(n, labels)
    if inner is None:
        factors.append(Factor(n, labels))
        return 1.0
    number, operands = inner
    for node, own in operands:
        number *= _collect(node, own, is_leaf, factors)
    return number


def _operands(n: Any, labels: tuple[Any, ...]) -> tuple[float, list[tuple[Any, tuple[Any, ...]]]] | None:
    """(number, operands with their labels) of a call that moves dimensions, multiplies or sums."""
    if n.meta.get("mutated"):
        return None
    if match.is_call(n, *SAME):
        return 1.0, [(n.args[0], labels)]
    if match.is_call(n, aten.to.dtype) and match.is_float(n) and match.is_float(n.args[0]):
        return 1.0, [(n.args[0], labels)]
    if (scaled := match.unscale(n))[1] != 1.0:
        return scaled[1], [(scaled[0], labels)]
    moved = _moved(n, labels)
    if moved is not None:
        return 1.0, [moved]
    if match.is_call(n, aten.mul.Tensor) and all(match.is_float(x) for x in n.args):
        return 1.0, [(x, _broadcast(x, n, labels)) for x in n.args]
    if match.is_call(n, aten.matmul.default, aten.bmm.default):
        return _product(n, labels)
    if match.is_call(n, aten.sum.dim_IntList):
        return _sum(n, labels)
    return _einsum(n, labels) if match.is_call(n, aten.einsum.default) else None


def _moved(n: Any, labels: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]] | None:
    """The operand of a call that only moves dimensions, adds some of size one or repeats these, and its labels."""
    rank = len(labels)
    if match.is_call(n, aten.permute.default):
        own = [None] * rank
        for at, source in enumerate(n.args[1]):
            own[source % rank] = labels[at]
        return n.args[0], tuple(own)
    if match.is_call(n, aten.transpose.int):
        own, (a, b) = list(labels), (d % rank for d in n.args[1:3])
        own[a], own[b] = own[b], own[a]
        return n.args[0], tuple(own)
    if match.is_call(n, aten.unsqueeze.default):
        at = n.args[1] % rank
        return n.args[0], (*labels[:at], *labels[at + 1 :])
    if match.is_call(n, aten.expand.default):
        return n.args[0], _broadcast(n.args[0], n, labels)
    if match.is_call(n, aten.squeeze.dim, aten.select.int):
        at = n.args[1] % match.rank(n.args[0])
        if symbols.statically_known_true(match.value(n.args[0]).shape[at] == 1):
            return n.args[0], (*labels[:at], object(), *labels[at:])
    return None


def _broadcast(x: fx.Node, n: fx.Node, labels: tuple[Any, ...]) -> tuple[Any, ...]:
    """Labels of ``x``, broadcast to ``n``."""
    shape, whole = match.value(x).shape, match.value(n).shape
    ahead = len(whole) - len(shape)
    return tuple(
        label if symbols.statically_known_true(size == full) else None
        for label, size, full in zip(labels[ahead:], shape, whole[ahead:])
    )


def _product(n: fx.Node, labels: tuple[Any, ...]):
    a, b = n.args
    if min(match.value(a).dim(), match.value(b).dim()) < 2:
        return None
    inner, results = object(), []
    for x, last in ((a, (labels[-2], inner)), (b, (inner, labels[-1]))):
        batch, whole = match.value(x).shape[:-2], match.value(n).shape[:-2]
        ahead = len(whole) - len(batch)
        own = [
            label if symbols.statically_known_true(size == full) else None
            for label, size, full in zip(labels[ahead:], batch, whole[ahead:])
        ]
        results.append((x, (*own, *last)))
    return 1.0, results


def _sum(n: fx.Node, labels: tuple[Any, ...]):
    x, rank = n.args[0], match.rank(n.args[0])
    dims = [d % rank for d in (match.argument(n, "dim") or range(rank))]
    if match.argument(n, "keepdim"):
        labels = tuple(label for at, label in enumerate(labels) if at not in dims)
    left = iter(labels)
    return 1.0, [(x, tuple(object() if at in dims else next(left) for at in range(match.value(x).dim())))]


def _einsum(n: fx.Node, labels: tuple[Any, ...]):
    equation, tensors = n.args[:2]
    if "->" not in equation or "." in equation:
        return None
    left, result = equation.replace(" ", "").split("->")
    own: dict[str, Any] = dict(zip(result, labels))
    names = left.split(",")
    if any(len(set(letters)) != len(letters) for letters in names):
        return None
    for letter in left.replace(",", ""):
        own.setdefault(letter, object())
    return 1.0, [(x, tuple(own[letter] for letter in letters)) for x, letters in zip(tensors, names)]
