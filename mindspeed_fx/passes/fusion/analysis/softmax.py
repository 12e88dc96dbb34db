"""Softmax, its logarithm and its log-sum-exp as they are written out: exponentials over their sum, in any spelling."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.fx as fx

from mindspeed_fx.compat import symbols
from mindspeed_fx.graph import match
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.fusion.analysis import mask

SOFTMAX, LOG_SOFTMAX, LOG_SUM_EXP = aten.softmax.int, aten.log_softmax.int, aten.logsumexp.default


COLUMNS = (aten.squeeze.dim, aten.unsqueeze.default, aten.select.int, aten.expand.default, *match.RESHAPES)


PRODUCTS = (aten.matmul.default, aten.bmm.default)


PICKS = (
    aten.gather.default,
    aten.index.Tensor,
    aten.take_along_dim.default,
    aten.squeeze.dim,
    aten.squeeze.default,
    aten.unsqueeze.default,
    aten.select.int,
    *match.RESHAPES,
)


class Found(NamedTuple):
    """``target`` of ``x`` over ``dim``, where ``hidden`` is nowhere True; then the calls of ``after`` again."""

    target: Any
    x: fx.Node
    dim: int
    region: list[fx.Node]
    hidden: tuple[tuple[str, fx.Node], ...] = ()
    """("keep" | "drop", mask): what is left of the elements, or what is not."""
    after: tuple[fx.Node, ...] = ()


class Exponential(NamedTuple):
    """exp(x - m), or a softmax, which differs from it by a factor for each row; without what ``hidden`` takes away."""

    x: fx.Node
    dim: int | None
    """The dimension that a softmax is over."""
    hidden: tuple[tuple[str, fx.Node], ...]
    region: list[fx.Node]


# --------------------------------------------------------------------------- what values are


def match_shift(n: Any, dim: int) -> tuple[fx.Node, fx.Node] | None:
    """(x, m) when ``n`` is x - m, m is one number for all of ``dim``, and no gradient of m is lost with it."""
    if (
        not match.is_call(n, aten.sub.Tensor)
        or n.kwargs
        or not match.is_float(n.args[0])
        or not match.is_float(n.args[1])
    ):
        return None
    x, m = n.args
    behind, shape = match.value(n).dim() - dim % match.rank(n), match.value(m).shape
    one = len(shape) < behind or symbols.statically_known_true(shape[-behind] == 1)
    cancels = not m.meta["needs_grad"] or match.same(_greatest(m), x)
    return (x, m) if one and cancels and match.value(x).shape == match.value(n).shape else None


def _greatest(n: Any) -> fx.Node | None:
    """x when ``n`` is a maximum of x."""
    while match.is_call(n, *COLUMNS):
        n = n.args[0]
    if match.is_call(n, match.operator.getitem) and n.args[1] == 0 and match.is_call(n.args[0], aten.max.dim):
        n = n.args[0]
    return n.args[0] if match.is_call(n, aten.max.dim, aten.amax.default, aten.max.default) else None


def _skip_shift(n: fx.Node, dim: int) -> fx.Node:
    result = match_shift(n, dim)
    return result[0] if result else n


def _column_of(n: Any, target: Any) -> tuple[fx.Node, int] | None:
    """(x, dim) when ``n`` is x reduced by ``target`` over one dimension, which is kept as 1 or added again."""
    n, added = match.uncast(n), None
    while match.is_call(n, aten.expand.default):
        n = match.uncast(n.args[0])
    if match.is_call(n, aten.unsqueeze.default):
        n, added = match.uncast(n.args[0]), n.args[1] % match.rank(n)
    dim = _one_dimension(n, target)
    return (
        (n.args[0], dim)
        if dim is not None and match.argument(n, "keepdim", False) == (added is None) and added in (None, dim)
        else None
    )


def _total(n: Any) -> tuple[fx.Node, int] | None:
    return _column_of(n, aten.sum.dim_IntList)


def _one_dimension(n: Any, target: Any) -> int | None:
    """The dimension over which the reduction ``n`` is, when it is ``target`` over one."""
    dims = match.argument(n, "dim") if match.is_call(n, target) else None
    dims = dims if isinstance(dims, (list, tuple)) else [dims]
    return (
        dims[0] % match.rank(n.args[0])
        if len(dims) == 1 and isinstance(dims[0], int) and match.value(n.args[0]).dim()
        else None
    )


def _exponential(n: Any) -> Exponential | str | None:
    """What ``n`` is the exponential of; why it is none that is read; None for anything else."""
    n = match.uncast(n)
    if match.is_call(n, aten.exp.default):
        return Exponential(n.args[0], None, (), [n])
    if match.is_call(n, SOFTMAX):
        return Exponential(n.args[0], n.args[1] % match.rank(n), (), [n])
    for inner, hidden in hiding(n):
        result = _exponential(inner)
        if isinstance(result, Exponential):
            if hidden is None:
                return (
                    f"exponentials are multiplied by a tensor ({n.name}) before they are summed, which is no mask "
                    "unless it is made of a boolean one"
                )
            return result._replace(hidden=(*result.hidden, hidden), region=[*result.region, n])
    return None


def hiding(n: Any) -> list[tuple[fx.Node, tuple[str, fx.Node] | None]]:
    """(x, ("keep" | "drop", mask)) for each way in which ``n`` is x with elements set to zero; None for a mask that is
    only a factor.
    """
    if match.is_call(n, aten.masked_fill.Scalar, aten.masked_fill.Tensor) and match.number(n.args[2]) == 0:
        return [(n.args[0], ("drop", n.args[1]))]
    if match.is_call(n, aten.where.self, aten.where.ScalarOther) and match.number(n.args[2]) == 0:
        return [(n.args[1], ("keep", n.args[0]))]
    if match.is_call(n, aten.where.self, aten.where.ScalarSelf) and match.number(n.args[1]) == 0:
        return [(n.args[2], ("drop", n.args[0]))]
    return [
        (x, ("keep", m) if mask.binary(m) else None)
        for x, m in match.operands(n, aten.mul.Tensor)
        if match.is_float(x) and isinstance(m, fx.Node) and match.number(m) is None
    ]


def _same_exponential(a: Any, b: Any) -> bool:
    return match.same(match.uncast(a), match.uncast(b))


# --------------------------------------------------------------------------- quotients


def _quotient(n: fx.Node) -> Found | str | None:
    """e / e.sum(dim), or (e @ v) / e.sum(dim)."""
    if n.kwargs.get("rounding_mode") or not isinstance(n.args[1], fx.Node):
        return None
    return _match_quotient(n, n.args[0], n.args[1])


def _product(n: fx.Node) -> Found | str | None:
    """e * (1 / e.sum(dim))."""
    for e, inverse in match.operands(n, aten.mul.Tensor):
        total = _reciprocal(inverse)
        result = _match_quotient(n, e, total) if total is not None else None
        if result is not None:
            return result
    return None


def _reciprocal(n: Any) -> fx.Node | None:
    """x when ``n`` is 1 / x."""
    if match.is_call(n, aten.mul.Tensor) and match.number(n.args[1]) == 1:
        n = n.args[0]  # how `1 / tensor` is traced
    if (x := match.reciprocal(n)) is not None:
        return x
    return (
        n.args[1]
        if match.is_call(n, *match.DIV) and match.number(n.args[0]) == 1 and isinstance(n.args[1], fx.Node)
        else None
    )


def _match_quotient(n: fx.Node, upper: Any, lower: fx.Node) -> Found | str | None:
    total = _total(lower)
    if total is None:
        return _almost(upper, lower)
    e, dim = total
    result, after, inner = _exponential(e), (), match.uncast(upper)
    if result is None or (isinstance(result, Exponential) and result.dim not in (None, dim)):
        return None
    if not _same_exponential(upper, e):
        weighted = (
            match.is_call(inner, *PRODUCTS) and dim == match.value(e).dim() - 1 and _same_exponential(inner.args[0], e)
        )
        if not weighted:
            return None
        after = (inner,)
    if isinstance(result, str) or not after and match.value(n).shape != match.value(e).shape:
        return result if isinstance(result, str) else None
    return Found(SOFTMAX, _skip_shift(result.x, dim), dim, [*result.region, *after], result.hidden, after)


def _almost(upper: Any, lower: fx.Node) -> str | None:
    """Why a quotient of exponentials is no softmax."""
    inner = match.uncast(lower)
    other = (
        inner.args[0]
        if match.is_call(inner, *match.ADD, aten.clamp_min.default, aten.clamp.default, aten.maximum.default)
        else None
    )
    other = (
        other
        if isinstance(other, fx.Node) and _total(other)
        else next((a for a in inner.all_input_nodes if _total(a)), None)
    )
    if (
        other is None
        or not _same_exponential(upper, _total(other)[0])
        or not isinstance(_exponential(upper), Exponential)
        or match.is_call(match.uncast(upper), SOFTMAX)
    ):
        return None
    return (
        f"exponentials are divided by more than their sum ({inner.name}, {inner.target}), which is no softmax; "
        "divide by the sum alone, whose greatest term is 1 where the maximum was subtracted"
    )


# --------------------------------------------------------------------------- logarithms


def _exp(n: fx.Node) -> Found | str | None:
    inner = match.uncast(n.args[0])
    if not match.is_call(inner, LOG_SOFTMAX):
        return None
    if any(u not in (n, n.args[0]) for u in inner.users):
        return (
            f"the logarithm of the softmax ({inner.name}) is read by others, too, so that its exponential costs "
            "less than a second softmax"
        )
    return Found(SOFTMAX, inner.args[0], inner.args[1], [inner])


def _log(n: fx.Node) -> Found | str | None:
    inner, path = match.uncast(n.args[0]), []
    total = _total(inner) or (
        (inner.args[0], _one_dimension(inner, aten.sum.dim_IntList))
        if _one_dimension(inner, aten.sum.dim_IntList) is not None
        else None
    )
    if total is not None:
        result = _exponential(total[0])
        return (
            Found(LOG_SUM_EXP, result.x, total[1], [inner, *result.region], result.hidden)
            if isinstance(result, Exponential) and result.dim is None
            else None
        )
    number = match.plus_number(inner)
    kept = (
        number[0]
        if number
        else inner.args[0]
        if match.is_call(inner, aten.clamp_min.default, aten.clamp.default)
        else inner
    )
    while match.is_call(kept, aten.to.dtype, *PICKS) and match.is_float(kept.args[0]):
        path.append(kept)
        kept = kept.args[0]
    if not match.is_call(kept, SOFTMAX):
        return None
    if kept is not inner and (number or match.is_call(inner, aten.clamp_min.default, aten.clamp.default)):
        return (
            f"the logarithm is of probabilities that were bounded or moved first ({inner.name}, {inner.target}); "
            "log_softmax needs neither"
        )
    return Found(
        LOG_SOFTMAX,
        _skip_shift(kept.args[0], kept.args[1]),
        kept.args[1],
        [kept, *path],
        after=tuple(p for p in path[::-1] if not match.is_call(p, aten.to.dtype)),
    )


def _difference(n: fx.Node) -> Found | None:
    """x - logsumexp(x)."""
    x, lse = n.args
    if (
        n.kwargs
        or not isinstance(lse, fx.Node)
        or not match.is_float(x)
        or (result := _column_of(lse, LOG_SUM_EXP)) is None
    ):
        return None
    inner, dim = result
    if (
        not match.same(match.uncast(x), match.uncast(inner))
        or match.value(x).shape != match.value(n).shape
        or match.value(lse).dim() != match.value(x).dim()
    ):
        return None
    return Found(LOG_SOFTMAX, _skip_shift(inner, dim), dim, [lse])


def _sum(n: fx.Node) -> Found | None:
    """m + logsumexp(x - m)."""
    for lse, m in match.operands(n, aten.add.Tensor):
        dim = _one_dimension(lse, LOG_SUM_EXP)
        inner = lse.args[0] if dim is not None else None
        if (
            inner is None
            or not match.is_call(inner, aten.sub.Tensor)
            or inner.kwargs
            or not all(match.is_float(a) for a in (*inner.args, m))
            or match.value(n).shape != match.value(lse).shape
        ):
            continue
        if match.same(_column(m), _column(inner.args[1])) and match.value(m).numel() == match.value(n).numel():
            return Found(LOG_SUM_EXP, inner.args[0], dim, [lse, inner])
    return None


def _column(n: Any) -> Any:
    while match.is_call(n, *COLUMNS) and match.value(n).numel() == match.value(n.args[0]).numel():
        n = n.args[0]
    if match.is_call(n, match.operator.getitem):
        n = n.args[0]  # a maximum of dim, the same with the dimension kept or not
    return (n.args[0], match.argument(n, "dim")) if match.is_call(n, aten.max.dim, aten.amax.default) else n


def _match_shifted_softmax(n: fx.Node) -> Found | None:
    """softmax(x - m)."""
    result = match_shift(n.args[0], n.args[1])
    return (
        Found(n.target, result[0], n.args[1], [n.args[0]])
        if result and match.value(result[0]).dtype == match.value(n).dtype
        else None
    )


_RULES = {
    **dict.fromkeys(match.DIV, _quotient),
    aten.mul.Tensor: _product,
    aten.exp.default: _exp,
    aten.log.default: _log,
    aten.sub.Tensor: _difference,
    aten.add.Tensor: _sum,
    SOFTMAX: _match_shifted_softmax,
    LOG_SOFTMAX: _match_shifted_softmax,
}
