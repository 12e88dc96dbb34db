"""Cross entropy that a rank writes out over its own classes: recognized in terms, by its formula.

log sum_v exp(x_v - t) - (x_target - t)  =  cross_entropy(x, target)    for every t that all ranks have alike
g (exp(x_v - t) / sum_w exp(x_w - t) - [v = target])                    its gradient for g
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Sequence

import torch.fx as fx

from mindspeed_fx.sharding.audit.relations.parts import Part, Terms, profile
from mindspeed_fx.sharding.audit.relations.vocabulary import plain_key

LOSS, GRADIENT = "mindspeed.cross_entropy", "mindspeed.cross_entropy_backward"


def note(terms: Terms, name: str, key: tuple, n: fx.Node, parts: Sequence[Part]) -> None:
    """What a program has of losses, so that the same is known where it is written out; ids of which vocabulary."""
    if name == LOSS and not n.args[3]:
        x, target = parts[:2]
        terms.note_ids(target.term, x.whole[1], [n.args[2]])
        terms.losses[x.arranged, target.arranged, n.args[2]] = (name, key, x.arranged, target.arranged, 0)
    if name == GRADIENT and len(parts) == 4 and not n.args[5]:
        g, x, target, lse = parts
        entry = (g, (name, key, g.arranged, x.arranged, target.arranged, lse.arranged, 0))
        terms.loss_gradients.setdefault((x.arranged, target.arranged, n.args[4]), []).append(entry)


def recognized(terms: Terms, x: Any) -> Any:
    """The loss or the gradient that ``x`` is, where it is one; else ``x``."""
    if not isinstance(x, Part) or x.term not in terms.defined:
        return x
    name = terms.defined[x.term][0]
    lse = _lse(terms, x) if name == "add" else None
    if lse is not None:
        return lse
    key = None
    if name == "where of numbers":
        key = _loss(terms, x) or _linear_loss(terms, x)
    elif name == "add":
        key = _gradient(terms, x)
    return x if key is None else terms.fresh(key, x.whole, [profile(d) for d in x.dims], x.partial)


def _calls(terms: Terms, x: Part, name: str) -> tuple[Any, tuple[Part, ...]] | None:
    """Key and arguments of the term, if it is one of that operator."""
    entry = terms.defined.get(x.term)
    return entry[1:] if entry and entry[0] == name else None


def _thin(x: Part) -> Part:
    """Without dimensions of one element."""
    return replace(x, dims=tuple(d for d in x.dims if d))


def _same(x: Part, y: Part) -> bool:
    return _thin(x).arranged == _thin(y).arranged


def _below(terms: Terms, x: Part) -> tuple[Part, Part] | None:
    """y and t of ``exp(y - t)``."""
    exp = _calls(terms, x, "exp")
    sub = _calls(terms, exp[1][0], "sub") if exp else None
    return (sub[1][0], sub[1][1]) if sub and sub[0] == plain_key(2) else None


def _exponentials(terms: Terms, x: Part) -> tuple[Part, Part] | None:
    """y [tokens, classes] and t of ``exp(y - t).sum(-1)``."""
    total = _calls(terms, x, "sum")
    if not total or len(total[1][0].dims) != 2 or total[0] != (1,):
        return None
    return _below(terms, total[1][0])


def _counts(terms: Terms, x: Part) -> tuple[Part, int] | None:
    """target and number of ``target != number``."""
    ne = _calls(terms, x, "ne")
    if not ne or len(ne[1]) != 1:
        return None
    _, ignored = terms.vocabularies.get(ne[1][0].term, (0, frozenset()))
    return next(((ne[1][0], i) for i in ignored if ne[0] == (repr(["tensor", i]), repr([]))), None)


def _masked(terms: Terms, x: Part) -> tuple[Part, Part, int] | None:
    """y, target and number of ``where(target != number, y, 0)``."""
    where = _calls(terms, x, "where of numbers")
    if not where or len(where[1]) != 2 or where[0][1] != ((2, 0.0),):
        return None
    counts = _counts(terms, where[1][0])
    return (where[1][1], *counts) if counts else None


def _loss(terms: Terms, x: Part) -> tuple | None:
    masked = _masked(terms, x)
    if masked is None:
        return None
    loss, target, ignored = masked
    sub = _calls(terms, loss, "sub")
    log = _calls(terms, sub[1][0], "log") if sub and sub[0] == plain_key(2) else None
    total = _exponentials(terms, log[1][0]) if log else None
    own = _calls(terms, sub[1][1], "kept") if total else None
    picked = _calls(terms, own[1][0], "sub") if own else None
    first = _calls(terms, picked[1][0], "picked") if picked and picked[0] == plain_key(2) else None
    if first is None or first[0] != 1:
        return None
    logits, top = total
    of, ids = first[1]
    alike = _same(picked[1][1], top) and of.arranged == logits.arranged and _same(ids, target)
    return terms.losses.get((logits.arranged, _thin(target).arranged, ignored)) if alike else None


def _gradient(terms: Terms, x: Part) -> tuple | None:
    both = _calls(terms, x, "add")
    if both is None or both[0] != plain_key(2) or len(both[1]) != 2:
        return None
    return next(filter(None, (_parts(terms, a, b) for a, b in (both[1], both[1][::-1]))), None)


def _parts(terms: Terms, share: Part, own: Part) -> tuple | None:
    """``exp(y - t) * (g / sum)`` and ``-g`` at the target."""
    scattered, product = _calls(terms, own, "scattered"), _calls(terms, share, "mul")
    if not scattered or scattered[0] != 1 or not product or len(product[1]) != 2:
        return None
    minus = _calls(terms, scattered[1][0], "neg")
    for exp, quotient in (product[1], product[1][::-1]):
        div, below = _calls(terms, quotient, "div"), _below(terms, exp)
        total = _exponentials(terms, div[1][1]) if div and below and len(div[1]) == 2 else None
        if not total or not minus or div[0] != plain_key(2):
            continue
        masked = _masked(terms, div[1][0])
        if masked is None or not _same(minus[1][0], div[1][0]) or not _same(scattered[1][1], masked[1]):
            continue
        if total[0].arranged != below[0].arranged or not _same(total[1], below[1]):
            continue
        g, target, ignored = masked
        entries = terms.loss_gradients.get((below[0].arranged, _thin(target).arranged, ignored), [])
        return next((key for wanted, key in entries if _spreads(terms, wanted, g)), None)
    return None


def _spreads(terms: Terms, whole: Part, g: Part) -> bool:
    """Whether ``whole`` is ``g`` in every place."""
    spread = _calls(terms, whole, "spread")
    return _same(spread[1][0], g) if spread else _same(whole, g)


# ----------------------------------------------------------------------- from hidden states


def _lse(terms: Terms, x: Part) -> Part | None:
    """The log-sum-exp of all classes: ``t + log(sum_r exp(lse_r - t))``."""
    both = _calls(terms, x, "add")
    if both is None or both[0] != plain_key(2) or len(both[1]) != 2:
        return None
    for top, log in (both[1], both[1][::-1]):
        of = _calls(terms, log, "log")
        below = _calls(terms, of[1][0], "exp below") if of else None
        if below and not of[1][0].partial and _same(below[1][1], top):  # type: ignore[index]
            return below[1][0]
    return None


def _linear_loss(terms: Terms, x: Part) -> tuple | None:
    masked = _masked(terms, x)
    sub = _calls(terms, masked[0], "sub") if masked else None
    if masked is None or sub is None or sub[0] != plain_key(2) or len(sub[1]) != 2:
        return None
    lse, picked = _calls(terms, sub[1][0], "lse"), _calls(terms, sub[1][1], "picked logits")
    if not lse or not picked or lse[0] != picked[0] or lse[1] != picked[1][:2]:
        return None
    hidden, weight, ids = picked[1]
    _, target, ignored = masked
    if target.arranged != ids.arranged:
        return None
    return ("token losses", hidden.arranged, weight.arranged, target.arranged, ignored, picked[0])


def shares_of_sum(terms: Terms, share: Part, own: Part) -> tuple[Part, Part, int, Part] | None:
    """g, target, the ignored one and the log-sum-exp where ``share`` is ``g / sum_r exp(lse_r - t) * exp(lse_r - t)``,
    and ``own`` is ``-g``; g is zero for tokens that are ignored."""
    product, minus = _calls(terms, share, "mul"), _calls(terms, own, "neg")
    if not product or not minus or len(product[1]) != 2:
        return None
    for quotient, exp in (product[1], product[1][::-1]):
        div, below = _calls(terms, quotient, "div"), _calls(terms, exp, "exp below")
        if not div or not below or div[0] != plain_key(2) or len(div[1]) != 2:
            continue
        total, masked = div[1][1], _masked(terms, div[1][0])
        if masked and total.arranged == exp.arranged and not total.partial and _same(minus[1][0], div[1][0]):
            return (*masked, below[1][0])
    return None
