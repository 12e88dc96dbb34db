"""How far the elements of a row are spread: a root mean square or a standard deviation, in any spelling.

The root of a mean or a sum of squares, also as a product of rows with themselves, of a variance by ``var``,
``var_mean`` or ``mean(x^2) - mean(x)^2``; ``norm``, ``linalg.norm``, ``vector_norm``; ``std``, ``std_mean``; times
numbers, with an eps inside or beside the root, with a least value.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.fx as fx

from mindspeed_fx.compat import symbols
from mindspeed_fx.graph import match
from mindspeed_fx.graph.layout import is_transpose
from mindspeed_fx.graph.match import aten
from mindspeed_fx.graph.schema import has_argument
from mindspeed_fx.passes.fusion.analysis import algebra

VAR, STD = (aten.var.dim, aten.var.correction), (aten.std.dim, aten.std.correction)
PAIRS = (aten.var_mean.dim, aten.var_mean.correction, aten.std_mean.dim, aten.std_mean.correction)
NORM = (
    aten.linalg_vector_norm.default,
    aten.linalg_norm.default,
    aten.norm.ScalarOpt_dim,
    aten.norm.Scalar,
    aten.frobenius_norm.dim,
)
NEGLIGIBLE = 1e-8
"""A least root mean square up to this is the same as an eps of its square: for zeros both give zeros, with the same
gradient, and from a root mean square of 3e-5 on the two agree to the last place of float32."""


class RootMoment(NamedTuple):
    """max(sqrt(scale * m + eps) + beside, least), where m is the mean of the squares of ``of``, or its variance."""

    x: fx.Node
    centered: bool
    dims: list[int]
    """Over which m is taken, counted from the front."""
    nodes: list[fx.Node]
    scale: float = 1.0
    eps: float = 0.0
    eps_outside: float = 0.0
    clamp_min: float = 0.0

    @property
    def last(self) -> bool:
        return self.dims == [match.value(self.x).dim() - 1]

    @property
    def differs(self) -> str | None:
        """Why no operator computes this, None when one does with ``eps``."""
        name = "variance" if self.centered else "mean square"
        deviation = "standard deviation" if self.centered else "root mean square"
        if self.eps < 0:
            return f"eps is negative ({self.eps / self.scale:g}), the operator adds one to the {name}"
        if self.eps_outside:
            return f"eps is added to the {deviation}, the operator adds it to the {name}"
        if self.clamp_min**2 > self.eps and self.clamp_min > NEGLIGIBLE * self.scale**0.5:
            return (
                f"the {deviation} is at least {self.clamp_min / self.scale**0.5:g}, the operator adds eps to the {name}"
            )
        return None


def inverse_root(n: Any) -> RootMoment | None:
    """``n`` as 1 over what a :class:`RootMoment` says."""
    flat = algebra.product(_below(n))
    if len(flat.over) + len(flat.under) != 1:
        return None
    if flat.under:
        result = root(flat.under[0])
    else:
        inside = match.inverse_root(flat.over[0])
        result = None if inside is None else _square(inside, [flat.over[0]])
    if result is None or (flat.numbers and (flat.number <= 0 or result.eps_outside or result.clamp_min)):
        return None
    factor = flat.number**-2
    return result._replace(scale=result.scale * factor, eps=result.eps * factor, nodes=[*flat.nodes, *result.nodes])


def root(n: Any, depth: int = algebra.DEEPEST) -> RootMoment | None:
    """``n`` as what a :class:`RootMoment` says."""
    n = _below(n)
    if not isinstance(n, fx.Node) or depth == 0:
        return None
    if (inside := match.root(n)) is not None:
        return _square(inside, [n])
    if (
        match.is_call(n, *NORM)
        and match.is_float(n.args[0])
        and match.argument(n, "p", match.argument(n, "ord", 2)) in (2, None)
    ):
        dims = _dims(n)
        count = _count(n.args[0], dims)
        return RootMoment(n.args[0], False, dims, [n], scale=count) if count else None
    if (result := _statistic(n, STD, 0)) is not None:
        return result
    floor = _least(n)
    if floor is not None:
        result = root(floor[0], depth - 1)
        return result and result._replace(clamp_min=max(result.clamp_min, floor[1]), nodes=[n, *result.nodes])
    factor = algebra.linear_step(n)
    result = root(factor[0], depth - 1) if factor and factor[1] > 0 else None
    if result is None or result.clamp_min:
        return None
    _, a, b = factor
    return result._replace(
        scale=result.scale * a * a,
        eps=result.eps * a * a,
        eps_outside=result.eps_outside * a + b,
        nodes=[n, *result.nodes],
    )


def _square(n: Any, above: list[fx.Node], depth: int = algebra.DEEPEST) -> RootMoment | None:
    """The root of ``n``."""
    n = _below(n)
    if not isinstance(n, fx.Node) or depth == 0:
        return None
    nodes = [*above, n]
    if match.is_call(n, aten.mean.dim, aten.sum.dim_IntList) and match.is_float(n.args[0]):
        of = match.uncast(match.match_square(match.uncast(n.args[0])))
        of = match.uncast(of.args[0]) if match.is_call(of, aten.abs.default, aten.neg.default) else of
        dims = _dims(n)
        count = 1 if n.target is aten.mean.dim else _count(n.args[0], dims)
        return RootMoment(of, False, dims, [*nodes, n.args[0]], scale=count) if of is not None and count else None
    if (x := _with_itself(n)) is not None and (count := _count(x, [match.value(x).dim() - 1])):
        return RootMoment(match.uncast(x), False, [match.value(x).dim() - 1], nodes, scale=count)
    if (result := _statistic(n, VAR, 0)) is not None:
        return result._replace(nodes=[*above, *result.nodes])
    if match.is_call(n, aten.sub.Tensor) and not n.kwargs and (result := _moments(n)) is not None:
        return result._replace(nodes=[*nodes, *result.nodes])
    if match.match_square(n) is not None:
        result = root(match.match_square(n), depth - 1)
        return None if result is None or result.eps_outside else result._replace(nodes=[*nodes, *result.nodes])
    floor = _least(n)
    if floor is not None:
        result = _square(floor[0], nodes, depth - 1)
        return result and result._replace(clamp_min=max(result.clamp_min, floor[1] ** 0.5)) if floor[1] >= 0 else None
    factor = algebra.linear_step(n)
    result = _square(factor[0], nodes, depth - 1) if factor and factor[1] > 0 else None
    return (
        None
        if result is None or result.clamp_min
        else result._replace(scale=result.scale * factor[1], eps=result.eps * factor[1] + factor[2])
    )


def _with_itself(n: fx.Node) -> fx.Node | None:
    """x when ``n`` is the product of its rows with themselves: by ``einsum``, or as a row times a column."""
    if match.is_call(n, aten.einsum.default) and len(n.args[1]) == 2 and match.same(*n.args[1]):
        arg, arrow, result = n.args[0].replace(" ", "").partition("->")
        one, _, other = arg.partition(",")
        return (
            n.args[1][0]
            if arrow
            and one == other
            and result == one[:-1]
            and len(set(one.replace("...", "."))) == len(one.replace("...", "."))
            else None
        )
    while match.is_call(n, aten.squeeze.dim) and match.value(n).dim() < match.value(n.args[0]).dim():
        n = n.args[0]
    if not match.is_call(n, aten.matmul.default):
        return None
    row, column = n.args
    x = (
        row.args[0]
        if match.is_call(row, aten.unsqueeze.default)
        and row.args[1] % match.value(row).dim() == match.value(row).dim() - 2
        else None
    )
    neighbour = (
        match.is_call(column, aten.unsqueeze.default)
        and column.args[1] % match.value(column).dim() == match.value(column).dim() - 1
        and x is not None
        and match.same(column.args[0], x)
    )
    return x if neighbour or (x is not None and is_transpose(column) and match.same(column.args[0], row)) else None


def _moments(n: fx.Node) -> RootMoment | None:
    """mean(x^2) - mean(x)^2."""
    mean, square = match.match_square(match.uncast(n.args[1])), _square(n.args[0], [])
    if (
        mean is None
        or square is None
        or square.centered
        or (square.scale, square.eps, square.clamp_min) != (1.0, 0.0, 0.0)
    ):
        return None
    of = mean_of(mean)
    if of is None or not match.same(match.uncast(of[0]), match.uncast(square.x)) or of[1] != square.dims:
        return None
    return square._replace(centered=True, nodes=[*square.nodes, n.args[1], mean])


def mean_of(n: Any) -> tuple[fx.Node, list[int]] | None:
    """(x, dimensions) when ``n`` is a mean of x, which keeps its dimensions or not."""
    n = _below(n)
    if match.is_call(n, match.operator.getitem) and n.args[1] == 1 and match.is_call(n.args[0], *PAIRS):
        return n.args[0].args[0], _dims(n.args[0])
    factor = algebra.linear_step(n)
    if factor and factor[2] == 0 and match.is_call(total := _below(factor[0]), aten.sum.dim_IntList):
        dims = _dims(total)
        count = _count(total.args[0], dims)
        return (total.args[0], dims) if count and abs(factor[1] * count - 1) < 1e-12 else None
    return (n.args[0], _dims(n)) if match.is_call(n, aten.mean.dim) and match.is_float(n.args[0]) else None


def keeps(n: fx.Node, x: fx.Node, dims: list[int]) -> bool:
    """Whether ``n``, a statistic of ``x`` over ``dims``, meets the elements that it was taken of."""
    n = n.args[0] if match.is_call(n, *algebra.EXPANDED) else n
    shape = match.value(n).shape
    if len(shape) != match.value(x).dim() or not shape:  # two numbers: the norm of all gradients, a factor that clips
        return False
    return all(-len(shape) <= d < len(shape) and symbols.statically_known_true(shape[d] == 1) for d in dims)


def _statistic(n: fx.Node, single: tuple, index: int) -> RootMoment | None:
    """A variance or deviation as ATen has it; of n - 1 elements it is a scaled one."""
    pair = match.is_call(n, match.operator.getitem) and n.args[1] == index and match.is_call(n.args[0], *PAIRS)
    call = n.args[0] if pair else n
    if pair and (call.target in PAIRS[:2]) != (single is VAR):
        return None
    if not match.is_call(call, *(PAIRS if pair else single)) or not match.is_float(call.args[0]):
        return None
    arg = match.argument(call, "unbiased" if has_argument(call, "unbiased") else "correction")
    dims, correction = _dims(call), 1 if arg is None else int(arg)
    count = _count(call.args[0], dims) if correction else 1
    return (
        RootMoment(call.args[0], True, dims, [n, call], scale=count / (count - correction))
        if count and count > correction or not correction
        else None
    )


def _least(n: fx.Node) -> tuple[fx.Node, float] | None:
    """(x, c) when ``n`` is max(x, c)."""
    if match.is_call(n, aten.clamp_min.default, aten.clamp.default) and match.argument(n, "max") is None:
        least = match.number(match.argument(n, "min"))
        return None if least is None else (n.args[0], float(least))
    pairs = match.operands(n, aten.maximum.default, aten.max.other)
    return next(((x, float(match.number(c))) for x, c in pairs if match.number(c) is not None), None)


def _dims(n: fx.Node) -> list[int]:
    dims, rank = match.argument(n, "dim"), match.value(n.args[0]).dim()
    dims = list(range(rank)) if dims is None or dims == [] else dims if isinstance(dims, (list, tuple)) else [dims]
    return sorted(d % rank for d in dims) if rank else []  # torch takes 0 and -1 for a tensor without dimensions


def _count(x: fx.Node, dims: list[int]) -> int:
    """Elements along ``dims``; 0 where that is not known."""
    count = 1
    for d in dims:
        size = match.value(x).shape[d]
        if not isinstance(size, int):
            return 0
        count *= size
    return count


def _below(n: Any) -> Any:
    """``n`` without casts, expansions and a last dimension of one that was added."""
    while True:
        inner = match.uncolumn(match.uncast(n))
        if match.is_call(inner, *algebra.EXPANDED) and match.value(inner.args[0]).dim() == match.value(inner).dim():
            inner = inner.args[0]
        if inner is n:
            return n
        n = inner
