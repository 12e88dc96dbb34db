"""An inverse built row by row becomes solutions of its triangular system.

``for i in range(1, n): a[..., i, :i] += (a[..., i, :i, None] * a[..., :i, :i]).sum(-2)``, then ``a + eye``, is the
inverse of the unit lower triangular I - a: forward substitution, in n - 1 rounds that wait for each other, as linear
attention with delta rules has it where a solver may not be called (transformers under ``torch.export``, and in its
releases before 5). Every product with the inverse becomes one call of ``linalg.solve_triangular``, which
``fusion.gated_delta_rule`` and ``fusion.kimi_delta_attention`` read.

Safe because rows are written in order, nobody else reads or writes them on the way, and all that is not below the
diagonal is zero.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from mindspeed_fx.compat import fake, symbols
from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.base import Context, Miss, Outcome, PassReport, calls, register, rewrite_each, site
from mindspeed_fx.passes.fusion.analysis.bands import Band
from mindspeed_fx.passes.fusion.analysis.positions import meaning

NAME, OPERATOR = "canonicalize.forward_substitution", "aten.linalg_solve_triangular"

FEWEST = 3
"""Rows that are a substitution: fewer may be anything."""


@register(NAME)
def forward_substitution(gm: fx.GraphModule, context: Context) -> PassReport:
    """Products with an inverse that was built row by row become solutions of its system."""
    report = PassReport(NAME)
    place = {n: i for i, n in enumerate(gm.graph.nodes)}
    sums = (n for n in calls(gm, *match.ADD) if n in place)
    rewrite_each(report, OPERATOR, sums, lambda node: _rewrite(gm, node, place))
    rewrite.finish(gm)
    return report


def _rewrite(gm: fx.GraphModule, node: fx.Node, place: dict[fx.Node, int]) -> Outcome:
    rows = next((a for a, b in match.operands(node, *match.ADD) if _is_eye(b) and match.is_float(a)), None)
    size = match.value(rows).shape[-1] if rows is not None else None
    if rows is None or not rows.meta.get("mutated") or not isinstance(size, int) or size <= FEWEST:
        return None
    if match.value(rows).dtype not in (torch.float32, torch.float64):
        return f"torch solves no triangular system in {match.value(rows).dtype}".replace("torch.", "")
    system, negated = _strictly_lower(rows)
    region = _substitution(rows, node, place)
    if reason := _seen_elsewhere(rows, [*region, node]):
        return reason
    if system.meta.get("mutated"):
        return f"{system.name} is changed in place"
    if len({n.meta["grad_enabled"] for n in (*region, node)}) > 1:
        return "part of the rows is computed with gradients off (torch.no_grad)"
    outcome = site(OPERATOR, node, [*region, node])
    if not negated:
        system = rewrite.insert(gm, node, aten.neg.default, (system,))
    for user in list(node.users):
        if match.is_call(user, aten.matmul.default) and user.args[0] is node:
            right = user.args[1]
            if match.value(right).shape[:-2] == match.value(system).shape[:-2]:
                _solve(gm, user, system, right)
    if node.users:
        eye = next(b for a, b in match.operands(node, *match.ADD) if a is rows)
        eyes = rewrite.insert(gm, node, aten.expand.default, (eye, [*match.value(rows).shape]))
        _solve(gm, node, system, rewrite.insert(gm, node, aten.clone.default, (eyes,)))
    for n in sorted(region, key=place.__getitem__, reverse=True):
        if not n.users:
            gm.graph.erase_node(n)
    return outcome


def _solve(gm: fx.GraphModule, old: fx.Node, system: fx.Node, right: fx.Node) -> None:
    symbols.allow_systems_of_any_number()
    new = rewrite.insert(
        gm, old, aten.linalg_solve_triangular.default, (system, right), {"upper": False, "unitriangular": True}
    )
    if reason := rewrite.substitute(gm, old, new):
        raise Miss(reason)
    if not old.users:
        gm.graph.erase_node(old)


def _is_eye(n: Any) -> bool:
    while match.is_call(n, aten.to.dtype, aten.expand.default, aten.unsqueeze.default) and not n.meta.get("mutated"):
        n = n.args[0]
    if not match.is_call(n, aten.eye.default, aten.eye.m) or n.meta.get("mutated"):
        return False
    return match.value(n).shape[0] == match.value(n).shape[1]


def _strictly_lower(rows: fx.Node) -> tuple[fx.Node, bool]:
    """(a, whether its sign was changed) when ``rows`` are at first what of a lies below the diagonal, and zeros.

    Raises:
        Miss: nothing says that the rest is zero.
    """
    a, negated, below = rows, False, False
    while a is rows or not a.meta.get("mutated"):
        if match.is_call(a, aten.neg.default):
            negated = not negated
        elif match.is_call(a, aten.tril.default) and match.argument(a, "diagonal", 0) == -1:
            below = True
        elif match.is_call(a, aten.masked_fill.Scalar) and a.args[2] == 0 and _hides_the_rest(a.args[1]):
            below = True
        else:
            break
        a = a.args[0]
    if not below:
        raise Miss(f"nothing says that {rows.name} is zero on and above its diagonal")
    return a, negated


def _hides_the_rest(mask: fx.Node) -> bool:
    """Whether ``mask`` is True on and above the diagonal, and only there."""
    band = meaning(mask)
    if not isinstance(band, Band) or band.documents is not None:
        return False
    above = (band.low, band.high) == (0, float("inf")) and band.inside and not band.outside
    return above or ((band.low, band.high) == (float("-inf"), -1) and band.outside and not band.inside)


def _substitution(rows: fx.Node, last: fx.Node, place: dict[fx.Node, int]) -> list[fx.Node]:
    """Everything between ``rows`` and their sum with the identity, if it is the substitution.

    Raises:
        Miss: a row is missing, out of order, or computed otherwise; or somebody else reads the rows.
    """
    n, region = match.value(rows).shape[-1], [rows]
    uses = iter(sorted((u for u in rows.users if u is not last), key=place.__getitem__))
    after = -1
    for i in range(1, n):
        row, block, target = (_view(next(uses, None), rows) for _ in range(3))
        factors = row
        if block is not None and block[1] == i:  # the row is read twice
            factors, block, target = block, target, _view(next(uses, None), rows)
        copied = _is_round(i, n, row, factors, block, target)
        if copied is None:
            raise Miss(f"row {i} of {rows.name} is not what forward substitution makes of it")
        order = [place[x] for x in (row[0][0], factors[0][0], block[0][0], copied[-1])]
        if min(order[:3]) < after or order[-1] != max(order):
            raise Miss(f"row {i} of {rows.name} is read or written out of order")
        after = order[-1]
        region += [*row[0], *factors[0], *block[0], *target[0], *copied]
    if (other := next(uses, None)) is not None or place[last] < after:
        raise Miss(f"{(other or last).name} reads {rows.name}, too")
    return list(dict.fromkeys(region))


def _seen_elsewhere(rows: fx.Node, region: list[fx.Node]) -> str | None:
    """Why somebody else has part in the rounds, which will be gone: a value of theirs is read or changed."""
    own, storage = set(region), fake.storage_of(match.value(rows))
    for n in region[1:-1]:
        if any(u not in own for u in n.users):
            return f"{n.name} is read outside of the substitution"
        if n.meta.get("mutated") and fake.storage_of(match.value(n)) != storage:
            return f"{n.name} is changed in place"
    return None


View = tuple[list[fx.Node], tuple[int, int] | int, tuple[int, int]]
"""The calls of a view, its rows (a number where one was selected) and its columns."""


def _view(n: fx.Node | None, rows: fx.Node) -> View | None:
    """What ``n``, a use of ``rows``, and the views of it see."""
    dims, size = match.rank(rows), match.value(rows).shape[-1]
    seen: list[Any] = [(0, size), (0, size)]
    chain: list[fx.Node] = []
    source = rows
    while n is not None:
        if match.is_call(n, aten.select.int) and n.args[1] % match.rank(source) == dims - 2 and not chain:
            seen[0] = n.args[2] % size
        elif (piece := match.part(n)) is not None and piece.step == 1:
            # Counted from the last dimension, the columns, whatever was selected.
            side = piece.dim - match.value(source).dim()
            if side == -1:
                seen[1] = piece.start, piece.stop
            elif side == -2 and isinstance(seen[0], tuple):
                seen[0] = piece.start, piece.stop
            elif (piece.start, piece.stop) != (0, match.value(source).shape[piece.dim]):
                return None
        else:
            break
        chain.append(n)
        source = n
        n = next(iter(n.users)) if len(n.users) == 1 else None
    return (chain, seen[0], seen[1]) if chain else None


def _is_round(
    i: int, n: int, row: View | None, factors: View | None, block: View | None, target: View | None
) -> list[fx.Node] | None:
    """The calls of round i besides its views, the copy last; None when it is something else.

    ``row + (factors[..., None] * block).sum(-2)`` is copied to ``target``; the factors are the row, or the whole row
    with its zeros, n of them, for as many rows of the block (flash-linear-attention's reference).
    """
    if row is None or factors is None or block is None or target is None:
        return None
    if row[1:] != (i, (0, i)) or target[1:] != row[1:]:
        return None
    if (factors[1:], block[1:]) not in [((i, (0, m)), ((0, m), (0, i))) for m in (i, n)]:
        return None
    write = next(iter(target[0][-1].users), None)
    if not match.is_call(write, aten.copy_.default) or write.args[0] is not target[0][-1] or write.users:
        return None
    for own, summed in match.operands(write.args[1], *match.ADD):
        calls = _sum_of_products(summed, factors[0][-1], block[0][-1])
        if calls is not None and _copied(own) is row[0][-1]:
            return [own, *calls, write.args[1], write]
    return None


def _sum_of_products(summed: Any, row: fx.Node, block: fx.Node) -> list[fx.Node] | None:
    """The calls of ``(row[..., None] * block).sum(-2)``."""
    if not match.is_call(summed, aten.sum.dim_IntList) or match.argument(summed, "keepdim"):
        return None
    product, dims = summed.args[:2]
    if [d % match.rank(product) for d in dims] != [match.rank(product) - 2]:
        return None
    for factor, other in match.operands(product, *match.MUL):
        column = _copied(factor)
        if (
            match.is_call(column, aten.unsqueeze.default)
            and column.args[1] % match.rank(column) == match.rank(column) - 1
            and _copied(column.args[0]) is row
            and _copied(other) is block
        ):
            return [column.args[0], other, column, factor, product, summed]
    return None


def _copied(n: Any) -> Any:
    return n.args[0] if match.is_call(n, aten.clone.default) else n
