"""Tokens sorted by expert, and back: -> ``mindspeed::moe_permute`` and ``mindspeed::moe_unpermute``.

``order`` is the sort of the flattened choices of experts [tokens * k]. The way there is ``tokens[order // k]``, or
``order`` applied to each token repeated k times. The way back is the sum over a token's rows, with or without
probabilities, applied to sorted rows or afterwards: rows gathered by the inverse of ``order`` (made by a second sort or
by writing 0, 1, 2 ... to the places of ``order``), rows written to the places of ``order``, or rows added up by ``order
// k``, to zeros or to what a shared expert gave. Rows are taken and added by an index of rows or by one that names it
in every column (torchtitan), summed by ``sum``, ``bmm`` or ``einsum``.

Safe because the rows and the sums are the same; a sort that may order equal experts at will is made stable, so that the
operator, which sorts by itself, and what is left of the model agree. Why it pays: the gradient of a gather adds
up row by row, the operators' gradients gather.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.fx as fx

from mindspeed_fx.compat import fake, symbols
from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.base import Context, Outcome, PassReport, Site, calls, register, rewrite_each, site, skip
from mindspeed_fx.passes.fusion.analysis.one_hot import parse_einsum
from mindspeed_fx.passes.fusion.emit import sorted_counts

NAME, PERMUTE, UNPERMUTE = "fusion.moe_permute", "mindspeed::moe_permute", "mindspeed::moe_unpermute"
GATHERS = (aten.index.Tensor, aten.index_select.default, aten.gather.default)

MANY = 8
"""Choices per token from which it pays on cpu: measured, 3 to 5 % of a layer gained at 8 and 4 % lost at 2."""

_FEW = f'{{k}} choices per token; on cpu it pays from {MANY} on; put "{NAME}" in enable to fuse all the same'


class Combined(NamedTuple):
    """``sum over j of rows[inverse of order][t * k + j] * probs[t, j]``."""

    rows: fx.Node
    """[tokens * k, hidden], sorted by expert."""
    probs: fx.Node | None
    """[tokens * k] or [tokens, k], in the order of the tokens."""
    k: Any
    order: fx.Node
    region: list[fx.Node]
    base: fx.Node | None = None
    """[tokens, hidden], to which the sums are added."""


@register(NAME)
def moe_permute(gm: fx.GraphModule, context: Context) -> PassReport:
    """Sorting tokens by expert and adding the results up become one operator each."""
    report = PassReport(NAME)
    inverses: dict[fx.Node, fx.Node] = {}
    seen: set[fx.Node] = set()

    def permute(node: fx.Node) -> Outcome:
        result = _match_permute(node)
        if result is not None:
            seen.add(node)
        if isinstance(result, tuple):
            tokens, order = (fake.hint(match.value(n).shape[0]) for n in result)
            if tokens and order // tokens < MANY and _left_to_inductor(gm, context):
                result = _FEW.format(k=order // tokens)
        return _rewrite_permute(gm, node, *result, inverses) if isinstance(result, tuple) else result

    rewrite_each(report, PERMUTE, calls(gm, *GATHERS), permute)

    def unpermute(node: fx.Node) -> Outcome:
        combined = _match_combine(node)
        if combined is None:
            return None
        seen.update(combined.region)
        if fake.hint(combined.k) < MANY and _left_to_inductor(gm, context):
            return _FEW.format(k=combined.k)
        return _rewrite_unpermute(gm, node, combined, inverses)

    sums = calls(
        gm,
        aten.sum.dim_IntList,
        aten.index_add.default,
        aten.scatter_add.default,
        aten.index_put.default,
        aten.bmm.default,
        aten.matmul.default,
        aten.einsum.default,
    )
    rewrite_each(report, UNPERMUTE, sums, unpermute)
    for node in calls(gm, *GATHERS):
        result = match.indexed_rows(node) if node not in seen and node.users else None
        if (
            result is not None
            and match.value(node).dim() == 2
            and match.is_float(node)
            and (sort := _sort_behind(result[1])) is not None
        ):
            report.skipped.append(
                skip(
                    PERMUTE,
                    node,
                    f"rows are taken in an order that comes of a sort ({sort.name}), but neither k of each token "
                    "sorted by expert nor back to be summed",
                )
            )
    rewrite.finish(gm)
    sorted_counts.read_unsorted(gm)
    return report


def _left_to_inductor(gm: fx.GraphModule, context: Context) -> bool:
    """Whether Inductor's code is to be preferred for few choices; never where a plan sends tokens to their experts, and
    knows them by this operator.
    """
    return context.left_to_inductor(NAME) and not (context.plan and context.plan.uses_all_to_all)


# --------------------------------------------------------------------------- permutations


def _match_sort(n: Any) -> fx.Node | None:
    """The sort that ``n`` is the order of: n[i] is where the i-th smallest of a list of integers stands."""
    result = None
    if (
        match.is_call(n, match.operator.getitem)
        and n.args[1] == 1
        and match.is_call(n.args[0], aten.sort.default, aten.sort.stable)
    ):
        result = n.args[0]
    elif match.is_call(n, aten.argsort.default, aten.argsort.stable):
        result = n
    plain = result is not None and match.value(result.args[0]).dim() == 1 and not match.is_float(result.args[0])
    return result if plain and not match.argument(result, "descending", False) else None


def _sort_behind(n: Any, depth: int = 3) -> fx.Node | None:
    if not isinstance(n, fx.Node) or n.op != "call_function" or _match_sort(n) is not None or not depth:
        return _match_sort(n)
    return next((result for a in n.all_input_nodes if (result := _sort_behind(a, depth - 1)) is not None), None)


def _match_floor_divide(n: Any) -> tuple[fx.Node, int] | None:
    """(order, k) when ``n`` is order // k."""
    floor = match.is_call(n, aten.floor_divide.default) or (
        match.is_call(n, aten.div.Tensor_mode) and n.kwargs.get("rounding_mode") == "floor"
    )
    return (n.args[0], n.args[1]) if floor and isinstance(n.args[1], int) and n.args[1] > 0 else None


def _inverse(n: Any) -> fx.Node | None:
    """The order that ``n`` is the inverse of."""
    again = _match_sort(n)
    if again is not None:
        return again.args[0] if _match_sort(again.args[0]) is not None else None
    written = _match_scatter(n)
    counting = written is not None and match.is_call(written[1], aten.arange.default) and len(written[1].args) == 1
    return written[0] if counting and written[0].meta["val"].shape == match.value(written[1]).shape else None


def _match_scatter(n: Any) -> tuple[fx.Node, fx.Node] | None:
    """(order, x) when ``n`` is x [rows, ...] written to the places that ``order`` says: n[order] = x."""
    if match.is_call(n, aten.index_put.default) and not match.argument(n, "accumulate", False):
        places, x = n.args[1], n.args[2]
    elif match.is_call(n, aten.scatter.src) and n.args[1] == 0 and match.value(n).dim() == 1:
        places, x = [n.args[2]], n.args[3]
    else:
        return None
    whole = len(places) == 1 and _match_sort(places[0]) is not None and match.value(n).shape == match.value(x).shape
    return (places[0], x) if whole else None


# --------------------------------------------------------------------------- there


def _match_permute(node: fx.Node) -> tuple[fx.Node, fx.Node] | str | None:
    """(tokens, order) when ``node`` is the tokens in the order of their experts; why it stays; None for another
    gather.
    """
    result = match.indexed_rows(node)
    if result is None or match.value(node).dim() != 2 or not match.is_float(node):
        return None
    source, index = result
    divided = _match_floor_divide(index)
    if divided is not None:
        (order, k), tokens = divided, source
    else:
        copies = match_repeat(source)
        if copies is None:
            return None
        order, (tokens, k) = index, copies
    cut = match.part(order)
    if cut is not None and _match_sort(cut.source) is not None:
        return f"only rows {cut.start} to {cut.stop} of the sorted tokens are kept"
    if _match_sort(order) is None:
        return None
    if not symbols.statically_known_true(match.value(order).shape[0] == match.value(tokens).shape[0] * k):
        return (
            f"{match.value(order).shape[0]} sorted choices are not {k} for each of {match.value(tokens).shape[0]} "
            "tokens"
        )
    return tokens, order


def match_repeat(n: fx.Node) -> tuple[fx.Node, int] | None:
    """(x, k) when ``n`` is [tokens * k, hidden] with each row of x k times in a row."""
    if (
        match.is_call(n, aten.repeat_interleave.self_int)
        and match.argument(n, "dim") == 0
        and isinstance(n.args[1], int)
    ):
        return n.args[0], n.args[1]
    if match.is_call(n, *match.RESHAPES, aten.clone.default) and match.value(n).dim() == 2:
        while match.is_call(n, *match.RESHAPES, aten.clone.default):
            n = n.args[0]
        if (
            match.is_call(n, aten.expand.default)
            and match.is_call(n.args[0], aten.unsqueeze.default)
            and n.args[0].args[1] == 1
            and match.value(n).dim() == 3
        ):
            return n.args[0].args[0], match.value(n).shape[1]
    return None


def _rewrite_permute(gm: fx.GraphModule, node: fx.Node, tokens: fx.Node, order: fx.Node, inverses: dict) -> Site | str:
    sort = _match_sort(order)
    indices = sort.args[0]
    reason = match.unsafe([node], [tokens, order, indices])
    if reason:
        return reason
    _stabilize(sort)
    both = rewrite.insert(gm, node, torch.ops.mindspeed.moe_permute.default, (tokens, indices))
    permuted = rewrite.insert(gm, node, match.operator.getitem, (both, 0))
    inverses.setdefault(order, rewrite.insert(gm, node, match.operator.getitem, (both, 1)))
    return rewrite.substitute(gm, node, permuted) or site(PERMUTE, node, [node])


def _stabilize(sort: fx.Node) -> None:
    """Equal elements keep their order: one of the results that the unstable sort may give."""
    values = sort.args[0]
    sort.target = aten.sort.stable if match.is_call(sort, aten.sort.default, aten.sort.stable) else aten.argsort.stable
    sort.args, sort.kwargs = (values,), {"stable": True}


# --------------------------------------------------------------------------- and back


def _match_combine(node: fx.Node) -> Combined | None:
    """What ``node`` adds up, when it is the way back."""
    if match.is_call(node, aten.sum.dim_IntList):
        return _match_sum(node)
    if match.is_call(node, aten.bmm.default, aten.matmul.default, aten.einsum.default):
        return _match_weighted_product(node)
    if match.is_call(node, aten.index_put.default):
        if not match.argument(node, "accumulate", False) or len(node.args[1]) != 1:
            return None
        base, index, rows = node.args[0], node.args[1][0], node.args[2]
    else:
        base, dim, index, rows = node.args[:4]
        if dim != 0 or node.kwargs.get("alpha", 1) != 1:
            return None
    if match.is_call(node, aten.scatter_add.default):
        index = match.row_number(index) if match.value(index).shape == match.value(rows).shape else None
    divided = _match_floor_divide(index)
    if divided is None or _match_sort(divided[0]) is None or match.value(rows).dim() != 2:
        return None
    order, k = divided
    rows, probs, region = _match_weights(rows, order)
    return Combined(rows, probs, k, order, [node, *region], None if match.is_zeros(base) else base)


def _match_weighted_product(node: fx.Node) -> Combined | None:
    """[tokens, 1, k] @ [tokens, k, hidden], or their einsum."""
    if match.is_call(node, aten.einsum.default):
        words = parse_einsum(node)
        if words is None or len(words[0]) != 2 or sorted(map(len, words[0])) != [2, 3]:
            return None
        (one, probs), (three, copies) = sorted(zip(words[0], node.args[1]), key=lambda pair: len(pair[0]))
        if three[:2] != one or words[1] != three[0] + three[2]:
            return None
    else:
        probs, copies = node.args
        if (
            match.value(probs).dim() != 3
            or match.value(copies).dim() != 3
            or not symbols.statically_known_true(match.value(probs).shape[1] == 1)
        ):
            return None
    copies = match.uncast(copies)
    return _match_gather(copies, probs, match.value(copies), [node]) if match.is_float(copies) else None


def _match_sum(node: fx.Node) -> Combined | None:
    """The sum over the second of [tokens, k, hidden]."""
    whole = match.value(node.args[0])
    if (
        whole.dim() != 3
        or [d % 3 for d in node.args[1] or ()] != [1]
        or match.argument(node, "keepdim", False)
        or match.argument(node, "dtype") is not None
    ):
        return None
    copies, probs, region = match.uncast(node.args[0]), None, [node]
    for a, b in match.operands(copies, aten.mul.Tensor):
        if (
            isinstance(a, fx.Node)
            and match.is_call(match.uncast(b), aten.unsqueeze.default)
            and match.value(b).shape == (*whole.shape[:2], 1)
        ):
            region.append(copies)
            probs, copies = match.uncast(b).args[0], match.uncast(a)
            break
    return _match_gather(copies, probs, whole, region)


def _match_gather(
    copies: fx.Node, probs: fx.Node | None, whole: torch.Tensor, region: list[fx.Node]
) -> Combined | None:
    """The way back of ``copies`` [tokens, k, hidden], which are summed over k, times ``probs`` if there are any."""
    if not match.is_call(copies, *match.RESHAPES):
        return None
    region.append(copies)
    rows = match.uncast(copies.args[0])
    if not isinstance(rows, fx.Node) or match.value(rows).dim() != 2 or match.value(rows).shape[1] != whole.shape[2]:
        return None
    gathered, written = match.indexed_rows(rows), _match_scatter(rows)
    order, source = (_inverse(gathered[1]), gathered[0]) if gathered else written or (None, None)
    if order is None:
        return None
    region.append(rows)
    if probs is None:
        source, probs, more = _match_weights(source, order)
        region += more
    return Combined(match.uncast(source), probs, whole.shape[1], order, region)


def _match_weights(n: fx.Node, order: fx.Node) -> tuple[fx.Node, fx.Node | None, list[fx.Node]]:
    """(rows, probabilities in the order of the tokens, nodes) when ``n`` is rows times sorted probabilities; else (n,
    None, []).
    """
    n = match.uncast(n)
    for rows, share in match.operands(n, aten.mul.Tensor):
        if not isinstance(share, fx.Node) or match.value(share).shape != (match.value(n).shape[0], 1):
            continue
        inner = match.uncast(share)
        inner = match.uncast(inner.args[0]) if match.is_call(inner, aten.unsqueeze.default, *match.RESHAPES) else inner
        gathered = match.indexed_rows(inner)
        if gathered is not None and gathered[1] is order:
            probs = gathered[0].args[0] if match.is_call(gathered[0], aten.unsqueeze.default) else gathered[0]
            if match.value(probs).dim() == 1:
                return match.uncast(rows), probs, [n]
    return n, None, []


def _rewrite_unpermute(gm: fx.GraphModule, node: fx.Node, result: Combined, inverses: dict) -> Site | str:
    rows, probs, k, order, region, base = result
    shape, root = match.value(rows).shape, match.value(node)
    if not symbols.statically_known_true(shape[0] == root.shape[0] * k) or not symbols.statically_known_true(
        shape[0] == match.value(order).shape[0]
    ):
        return f"{shape[0]} rows are not {k} for each of {root.shape[0]} tokens"
    reason = match.unsafe(region, [rows, order, probs, base])
    if reason:
        return reason
    inverse = inverses.get(order)
    if inverse is None or not _before(gm, inverse, node):
        sort = rewrite.insert(gm, node, aten.sort.default, (order,))
        inverse = rewrite.insert(gm, node, match.operator.getitem, (sort, 1))
    if probs is not None:
        probs = rewrite.insert(gm, node, aten.reshape.default, (probs, [root.shape[0], k]))
    dtype = (
        match.value(rows).dtype
        if probs is None
        else torch.promote_types(match.value(rows).dtype, match.value(probs).dtype)
    )
    if torch.promote_types(dtype, root.dtype) != dtype:
        rows = rewrite.insert(gm, node, aten.to.dtype, (rows, root.dtype))  # the model adds up in a wider type
    new = rewrite.insert(gm, node, torch.ops.mindspeed.moe_unpermute.default, (rows, inverse, probs, k))
    new = new if base is None else rewrite.insert(gm, node, aten.add.Tensor, (base, new))
    new = (
        new
        if match.value(new).dim() == root.dim()
        else rewrite.insert(gm, node, aten.reshape.default, (new, list(root.shape)))
    )
    return rewrite.substitute(gm, node, new) or site(UNPERMUTE, node, region)


def _before(gm: fx.GraphModule, first: fx.Node, second: fx.Node) -> bool:
    return next(n for n in gm.graph.nodes if n is first or n is second) is first
