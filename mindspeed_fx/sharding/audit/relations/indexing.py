"""Operators along a dimension that every rank has whole: choices, picks, and their gradients."""

from __future__ import annotations

from typing import Callable, Sequence

import torch.fx as fx

from mindspeed_fx.sharding.audit.relations.parts import Fill, Part, Profile, Terms, Unknown, Unproved, profile


def along(x: Part, dim: int) -> int:
    """``dim``, counted from the front, of which no rank holds a part."""
    dim %= len(x.dims)
    if profile(x.dims[dim]):
        raise Unproved(f"all of a dimension is read of which ranks hold parts ({profile(x.dims[dim])[0][0]})")
    return dim


def changed(terms: Terms, key: tuple, x: Part, dim: int, size: int, linear: bool) -> Part:
    """A new term of the shape of ``x`` but for ``dim``."""
    if x.partial and not linear:
        raise Unproved(f"a partial sum over {sorted(x.partial)[0]} is read by what is not linear in it")
    sizes = [size if i == dim else n for i, n in enumerate(x.whole)]
    return terms.fresh((*key, x.arranged), sizes, [profile(d) for d in x.dims], x.partial)


def _number(args: Sequence, n: fx.Node, at: int, name: str, default: int) -> int:
    return args[at] if len(args) > at else n.kwargs.get(name, default)  # type: ignore[return-value]


def _topk(terms: Terms, args: list, n: fx.Node) -> list[Part]:
    x, k = args[:2]
    dim = along(x, _number(args, n, 2, "dim", -1))
    rest = repr(args[3:])
    values, choices = (changed(terms, ("topk", k, dim, rest, i), x, dim, k, False) for i in (0, 1))
    terms.choices[choices.term] = (choices.whole, dim, x.whole[dim])
    return [values, choices]


def _same(parts: Sequence[Part], but: int | None) -> list[Profile]:
    shared = [[profile(d) for d in p.dims] for p in parts]
    if any(s != shared[0] for s in shared[1:]):
        raise Unproved("what is indexed is divided otherwise than its index")
    return shared[0]


def _gather(terms: Terms, args: list, n: fx.Node) -> Part:
    x, at, index = args[:3]
    dim = along(x, at)
    _same([x, index], dim)
    return changed(terms, ("gather", dim, index.arranged), x, dim, index.whole[along(index, dim)], True)


def _scatter(terms: Terms, args: list, n: fx.Node) -> Part:
    base, at, index, source = args[:4]
    if not isinstance(base, Fill) or isinstance(base.value, Part):
        raise Unknown("no rule")
    dim, size = along(index, at), base.shape[at]
    key = ("scatter", str(n.target), base.value, dim, size, index.arranged)
    if not isinstance(source, Part):
        return changed(terms, (*key, repr(source)), index, dim, size, False)
    _same([source, index], dim)
    if base.value and source.partial:
        raise Unproved("a partial sum is written into what is no zero")
    return changed(terms, key, source, dim, size, True)


def _slice_backward(terms: Terms, args: list, n: fx.Node) -> Part:
    grad, sizes, at, start, end, step = args
    dim = along(grad, at)
    return changed(terms, ("slice_backward", dim, start, end, step, sizes[dim]), grad, dim, sizes[dim], True)


def embedded(terms: Terms, weight: Part, ids: Part) -> Part:
    """Rows of ``weight``, whole, for ids."""
    key = ("embedding", weight.arranged, ids.arranged)
    shared = [*(profile(d) for d in ids.dims), profile(weight.dims[1])]
    result = terms.fresh(key, [*ids.whole, weight.whole[1]], shared, weight.partial)
    terms.defined[result.term] = ("embedding", None, (weight, ids))
    return result


def _embedding(terms: Terms, args: list, n: fx.Node) -> Part:
    weight, ids = args[:2]
    along(weight, 0)
    terms.note_ids(ids.term, weight.whole[0])
    return embedded(terms, weight, ids)


def gradient_key(count: int, rest: Sequence, grad: Part, ids: Part) -> tuple:
    return "embedding_backward", count, repr(list(rest)), grad.arranged, ids.arranged


def embedding_gradient(terms: Terms, grad: Part, ids: Part, count: int, rest: Sequence) -> Part:
    """That of all rows."""
    shared = [profile(d) for d in ids.dims]
    if [profile(d) for d in grad.dims[:-1]] != shared:
        raise Unproved("a gradient is divided otherwise than its tokens")
    over = {m for p in shared for m, _ in p}
    if over & grad.partial:
        raise Unproved(f"a partial sum over {sorted(over & grad.partial)[0]} meets parts over it")
    key = gradient_key(count, rest, grad, ids)
    return terms.fresh(key, [count, grad.whole[-1]], [(), profile(grad.dims[-1])], grad.partial | over)


def _embedding_backward(terms: Terms, args: list, n: fx.Node) -> Part:
    grad, ids, count, *rest = args
    return embedding_gradient(terms, grad, ids, count, rest)


def _expand(terms: Terms, args: list, n: fx.Node) -> Part | Fill:
    """Along dimensions of one element, or new ones; the sizes of those are the same on every rank."""
    x, shape = args[0], tuple(n.meta["val"].shape)
    if not x.dims:
        return Fill(x, shape)
    dims = ((),) * (len(shape) - len(x.dims)) + x.dims
    whole = (1,) * (len(shape) - len(x.dims)) + x.whole
    new = [(i, size) for i, size in enumerate(shape) if whole[i] == 1 and size > 1]
    if not new:
        return Part(x.term, dims, x.partial)
    if len(shape) == len(x.dims) and {getattr(u.target, "_opname", "") for u in n.users} == {"mul"}:
        return Fill(x, shape)  # broadcast by those that read it, whose sizes are those of parts
    sizes = [shape[i] if w == 1 else w for i, w in enumerate(whole)]
    return terms.fresh(("expand", tuple(new), x.arranged), sizes, [profile(d) for d in dims], x.partial)


INDEXING: dict[str, Callable] = {
    "topk": _topk,
    "gather": _gather,
    **dict.fromkeys(["scatter", "scatter_add"], _scatter),
    "slice_backward": _slice_backward,
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "expand": _expand,
}
