"""Cross entropy from hidden states: the logits of a chunk of tokens at a time, which no tensor holds.

The whole program has the sum or the mean of all losses and their gradients (``linear_cross_entropy_total``). Ranks that
hold parts of the classes have the log-sum-exp of their own and the target's logit where it is theirs
(``linear_logsumexp``), and put them together: ``sum_r exp(lse_r - t)`` is ``exp(lse - t)`` for every t that all have
alike. Either way the terms are the losses of tokens, and their gradients for one number for each token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Sequence

import torch
from torch import Tensor

from mindspeed_fx.sharding.audit.relations import losses, rules
from mindspeed_fx.sharding.audit.relations.lookups import Lookup, every_id
from mindspeed_fx.sharding.audit.relations.numbers import whole_index
from mindspeed_fx.sharding.audit.relations.parts import Part, Terms, Unknown, Unproved, profile
from mindspeed_fx.sharding.audit.relations.vocabulary import Context, Largest, read_once

TOTAL, PARTS = "linear_cross_entropy_total", "linear_logsumexp"
OPERATORS = frozenset([TOTAL, f"{TOTAL}_backward", PARTS, f"{PARTS}_backward"])


@dataclass(frozen=True, eq=False)
class OwnSum:
    """The log-sum-exp of a rank's own classes, less ``minus``."""

    part: Part
    """Of all classes."""
    over: frozenset[str]
    minus: Part | None = None


@dataclass(frozen=True, eq=False)
class ForOne:
    """A gradient of the losses, for an upstream gradient of one."""

    key: tuple
    weights: bool
    mean: Part | None
    """The number of tokens, where the losses are averaged."""


def concerns(short: str, args: Sequence[Any]) -> bool:
    return short in OPERATORS or any(isinstance(a, (OwnSum, ForOne)) for a in args)


def apply(c: Context, short: str, args: list) -> Any:
    """The relation of one place of the programs."""
    x = args[0]
    if short == TOTAL:
        return _total(c, args)
    if short == f"{TOTAL}_backward":
        return [_scaled(c.terms, x, g) if isinstance(g, ForOne) else None for g in args[1:]]
    if short == PARTS:
        return _of_own(c, args)
    if short == f"{PARTS}_backward":
        return _of_own_backward(c, args)
    if isinstance(x, OwnSum) and tuple(c.node.meta["val"].shape) == x.part.local and short in ("view", "reshape"):
        return x
    if isinstance(x, OwnSum) and short == "sub" and isinstance(args[1], Part) and x.minus is None:
        return replace(x, minus=args[1])
    if isinstance(x, OwnSum) and short == "exp" and x.minus is not None:
        return _exponential(c.terms, x)
    raise Unproved("the log-sum-exp of a rank's own classes is read for that of all")


def largest(terms: Terms, x: Any) -> Any:
    """Of the ranks' own sums, where it is asked for; it need be no more than a number that all ranks have alike."""
    if not isinstance(x, OwnSum) or x.minus is not None:
        return x
    key = ("largest of parts", x.part.arranged)
    return Largest(terms.fresh(key, x.part.whole, [profile(d) for d in x.part.dims], ()), x.over)


def _check_settings(smoothing: float, z_loss: float, bias: Any) -> None:
    if smoothing or z_loss or bias is not None:
        raise Unknown("label smoothing, a loss on the log-sum-exp or a bias")


def _token_losses(
    terms: Terms, x: Part, weight: Part, target: Part, ignored: int, softcap: float
) -> tuple[tuple, Part]:
    """The key that tells them, and their part [tokens]."""
    key = (x.arranged, weight.arranged, target.arranged, ignored, softcap)
    shared = profile(x.dims[0])
    if profile(target.dims[0]) != shared or profile(x.dims[1]) or x.partial or weight.partial:
        raise Unproved("tokens are divided otherwise than their targets")
    return key, terms.fresh(("token losses", *key), [x.whole[0]], [shared], ())


def _count(terms: Terms, target: Part, ignored: int, dtype: torch.dtype) -> Part:
    """The number of tokens that are not ignored, as a program writes it."""
    ne = rules.pointwise(terms, "ne", (repr(["tensor", ignored]), repr([])), [target])
    total = rules.summed(terms, ne, [0], False)
    return rules.pointwise(terms, "_to_copy", (repr(["tensor"]), repr([("dtype", dtype)])), [total])


def _total(c: Context, args: list) -> list:
    x, weight, bias, target, ignored, smoothing, z_loss, softcap, mean, needed = args
    _check_settings(smoothing, z_loss, bias)
    if profile(weight.dims[0]):
        raise Unproved("all classes are read of which ranks hold parts")
    c.terms.note_ids(target.term, weight.whole[0], [ignored])
    key, each = _token_losses(c.terms, x, weight, target, ignored, softcap)
    total, count = rules.summed(c.terms, each, [0], False), None
    if mean:
        if profile(x.dims[0]):
            raise Unproved("a mean over a rank's own tokens")
        count = _count(c.terms, target, ignored, c.node.meta["val"][0].dtype)
        total = rules.pointwise(c.terms, "div", losses.plain_key(2), [total, count])
    hidden, weights = (ForOne((key, x, weight), i, count) if needed[i] else None for i in (0, 1))
    return [total, hidden, weights, None]


def _gradient(terms: Terms, key: tuple, x: Part, weight: Part, g: Part, weights: bool, over: frozenset[str]) -> Part:
    """That of all losses, each for ``g`` [], with respect to the weights or the hidden states.

    Args:
        over: mesh dimensions whose ranks have parts of the classes.
    """
    if g.dims or g.partial:
        raise Unknown("a gradient for each token")
    name = ("gradient of token losses", weights, key, g.arranged)
    if weights:
        tokens = frozenset(m for m, _ in profile(x.dims[0]))
        return terms.fresh(name, weight.whole, [profile(d) for d in weight.dims], tokens)
    return terms.fresh(name, x.whole, [profile(d) for d in x.dims], over)


def _scaled(terms: Terms, grad: Any, one: ForOne) -> Part:
    if not isinstance(grad, Part):
        raise Unknown("no rule")
    if one.mean is not None:
        grad = rules.pointwise(terms, "div", losses.plain_key(2), [grad, one.mean])
    return _gradient(terms, *one.key, grad, one.weights, frozenset())


# ----------------------------------------------------------------------- parts of the classes


def _targets(c: Context, weight: Part, look: Lookup) -> frozenset[str]:
    """Mesh dimensions over which the targets' classes are read once each."""
    ids, ignored = every_id(c.terms, look.ids.term), c.terms.vocabularies[look.ids.term][1]
    counted = (ids >= 0) & (ids < weight.whole[0]) & ~torch.isin(ids, torch.tensor(sorted(ignored), dtype=torch.int64))
    present: list[Tensor] = []
    for place, table in zip(c.places, look.tables):
        own, at = whole_index(weight.dims[0], place.at), table[counted]
        if int(at.min()) < -1 or int(at.max()) >= len(own):
            raise Unproved("a target that counts is taken for none, or for a class that a rank does not have")
        mine = at >= 0
        if bool((own[at.clamp(min=0)] != ids[counted])[mine].any()):
            raise Unproved("the class of another target is read")
        present.append(mine)
    return read_once(c, present)


def _of_own(c: Context, args: list) -> list:
    x, weight, bias, _, softcap, sums = args
    if sums or bias is not None:
        raise Unknown("label smoothing or a bias")
    if x.partial or weight.partial or profile(x.dims[1]):
        raise Unproved("partial sums or parts of hidden states are read")
    look, shared = c.lookup(3), [profile(x.dims[0])]
    over = frozenset(m for m, _ in profile(weight.dims[0]))
    if [profile(d) for d in look.ids.dims] != shared:
        raise Unproved("tokens are divided otherwise than their targets")
    if _targets(c, weight, look) != over:
        raise Unproved("targets are shared otherwise than classes")
    settings = (x.arranged, weight.arranged, softcap)
    lse = c.terms.fresh(("lse", *settings), [x.whole[0]], shared, ())
    c.terms.defined[lse.term] = ("lse", softcap, (x, weight))
    picked = c.terms.fresh(("picked logits", *settings, look.ids.arranged), [x.whole[0]], shared, over)
    c.terms.defined[picked.term] = ("picked logits", softcap, (x, weight, look.ids))
    return [OwnSum(lse, over), picked, None]


def _exponential(terms: Terms, x: OwnSum) -> Part:
    assert x.minus is not None
    if x.minus.partial or [profile(d) for d in x.minus.dims] != [profile(d) for d in x.part.dims]:
        raise Unproved("what is taken from a log-sum-exp is divided otherwise")
    key = ("exp below", x.part.arranged, x.minus.arranged)
    result = terms.fresh(key, x.part.whole, [profile(d) for d in x.part.dims], x.over)
    terms.defined[result.term] = ("exp below", None, (x.part, x.minus))
    return result


def _of_own_backward(c: Context, args: list) -> list:
    """Where every rank is given ``g / sum * exp(lse_r - t)`` and ``-g``, ``sum`` being that of the exponentials."""
    share, own, _, x, weight, bias, _, lse, softcap, needed = args
    look, terms = c.lookup(6), c.terms
    if bias is not None or not isinstance(lse, OwnSum) or not isinstance(share, Part) or not isinstance(own, Part):
        raise Unknown("no rule")
    if _targets(c, weight, look) != lse.over or lse.minus is not None:
        raise Unproved("targets are shared otherwise than classes")
    entry = losses.shares_of_sum(terms, share, own)
    if entry is None or terms.defined.get(lse.part.term) != ("lse", softcap, (x, weight)):
        raise Unknown("the gradient of another loss")
    g, target, ignored, of = entry
    if of != lse.part or target.arranged != look.ids.arranged:
        raise Unproved("the gradient of the loss of other tokens")
    key, _ = _token_losses(terms, x, weight, target, ignored, softcap)
    wanted = zip((False, True), needed)
    return [_gradient(terms, key, x, weight, g, w, lse.over) if need else None for w, need in wanted] + [None]
