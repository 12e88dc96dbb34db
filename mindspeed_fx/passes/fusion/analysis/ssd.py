"""A state space dual in chunks, read from the sum of what a token takes from its chunk and from the state before it.

Letters as in kernels/ssd.py: b rows, c chunks, l and s tokens of a chunk, h heads, p and n the width and the state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from mindspeed_fx.compat import symbols
from mindspeed_fx.graph import match
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.base import Miss
from mindspeed_fx.passes.fusion.analysis import kv_heads, multilinear, norms
from mindspeed_fx.passes.fusion.analysis.bands import Band
from mindspeed_fx.passes.fusion.analysis.positions import meaning

PAIRS, SUM, REST, BETWEEN, STATES, LINE, ROW = "pairs", "sum", "rest", "between", "states", "line", "row"
"""e^(a_(s+1) + .. + a_l) for s <= l; e^c; e^(c_last - c); the first of chunks; the states before each chunk; the state
at the start and what each chunk adds; anything else."""


@dataclass
class StateSpaceDual:
    """Arguments of ``mindspeed::ssd``, and what of the graph it stands for."""

    x: fx.Node
    dt: fx.Node
    a: fx.Node
    b: fx.Node
    c: fx.Node
    d: fx.Node | None
    state: fx.Node | None
    line: fx.Node
    """The states before and after all chunks: the operator stands in its place."""
    out: fx.Node
    """[batch, seq, heads, p], with the skip if there is one."""
    padded: fx.Node | None
    """The result with tokens that fill the last chunk, where there are any; ``out`` itself where all are read."""
    final: list[fx.Node]
    """Reads of the last state."""
    region: list[fx.Node]


def read(node: fx.Node) -> StateSpaceDual | None:
    """The rule whose result, without the skip, is ``node`` in chunks; None when it is another sum.

    Raises:
        Miss: the pairs of tokens of a chunk are there, and the rest is not the state space dual's.
    """
    if not match.is_call(node, aten.add.Tensor) or match.value(node).dim() != 5:
        return None
    for inside, across in match.operands(node, aten.add.Tensor):
        if all(isinstance(x, fx.Node) for x in (inside, across)):
            form = multilinear.read(inside, _is_leaf)
            if PAIRS in (kinds := _kinds(form)):
                return _read(node, form, kinds, across)
    return None


def _read(node: fx.Node, form: multilinear.Form, kinds: list[str], across: fx.Node) -> StateSpaceDual:
    inside = multilinear.named(form, kinds, "row bclhn, row bcshn, pairs bhcls, row bcshp -> bclhp")
    if inside is None:
        raise Miss(
            f"what tokens of a chunk add to each other ({_shown(form, kinds)}) is not C B^T times decays times X"
        )
    c, b, pairs, x = inside
    c_again, sums, states = _named(across, "row bclhn, sum bhcl, states bchpn -> bclhp", "what the state adds")
    line = match.part(states).source
    between, cat = _named(line, "between bhcz, line bzhpn -> bchpn", "the states before chunks")
    start, added = cat.args[0]
    b_again, rest, x_again = _named(added, "row bclhn, rest bhcl, row bclhp -> bchpn", "what a chunk adds to its state")
    for name, one, other in (("C", c, c_again), ("B", b, b_again), ("dt x", x, x_again)):
        if not match.same(one, other):
            raise Miss(f"{one.name} and {other.name} stand for {name}")
    gates = _gates(pairs)
    if not all(match.same(gates, _gates(n)) for n in (sums, rest, between)):
        raise Miss("the decays inside a chunk and between chunks are not of the same steps")
    x, dt = _x_and_dt(_sequence(x))
    a = _rates(gates, dt)
    b, c = (_groups(_sequence(n)) for n in (b, c))
    state = None if match.is_zeros(start) else _first(start)
    readers = list(line.users)
    final = [n for n in readers if _is_last(n, line)]
    if any(n is not states and n not in final and not match.same(n, states) for n in readers):
        raise Miss(f"the states before chunks ({line.name}) are read by others")
    out, padded, d = _result(node, x, line)
    x, dt, a = (norms.strip_widening(n) for n in (x, dt, a))
    inputs = [n for n in (x, dt, a, b, c, d, state) if n is not None]
    region = _between([out, line], inputs)
    return StateSpaceDual(x, dt, a, b, c, d, state, line, out, padded, final, region)


def _is_leaf(n: fx.Node) -> bool:
    return match.is_call(n, aten.exp.default, aten.cat.default) or match.part(n) is not None


def _kinds(form: multilinear.Form) -> list[str]:
    return [_kind(factor.node) for factor in form.factors]


def _named(n: Any, pattern: str, what: str) -> list[fx.Node]:
    form = multilinear.read(n, _is_leaf)
    kinds = _kinds(form)
    result = multilinear.named(form, kinds, pattern)
    if result is None:
        raise Miss(f"{what} ({_shown(form, kinds)}) is not {pattern.replace('row ', '')}")
    return result


def _shown(form: multilinear.Form, kinds: list[str]) -> str:
    factors = " * ".join(
        f.node.name if kind == ROW else f"{kind} {f.node.name}" for f, kind in zip(form.factors, kinds)
    )
    return factors if form.number == 1 else f"{form.number:.4g} * {factors}"


def _kind(n: fx.Node) -> str:
    if match.is_call(n, aten.exp.default):
        return _decay(n.args[0])[0]
    if match.is_call(n, aten.cat.default) and len(n.args[0]) == 2 and match.argument(n, "dim", 0) == 1:
        return LINE if symbols.statically_known_true(match.value(n.args[0][0]).shape[1] == 1) else ROW
    piece = match.part(n)
    if piece is None:
        return ROW
    size = match.value(piece.source).shape[piece.dim]
    return STATES if (piece.dim, piece.start, piece.stop, piece.step) == (1, 0, size - 1, 1) else ROW


def _decay(x: Any) -> tuple[str, Any]:
    """What the exponential of ``x`` is, and the gates [b, h, c, l] that it is of."""
    if _is_running_sum(x):
        return SUM, x.args[0]
    if match.is_call(x, aten.sub.Tensor) and _is_running_sum(x.args[1]) and _last(x.args[0]) is x.args[1]:
        return REST, x.args[1].args[0]
    steps = _segments(x)
    if steps is None:
        return ROW, None
    if match.value(x).dim() == 5:
        return PAIRS, steps
    if match.is_call(steps, aten.pad.default) and list(steps.args[1]) == [1, 0] and not match.argument(steps, "value"):
        whole = _last(steps.args[0])
        return (BETWEEN, whole.args[0]) if whole is not None else (ROW, None)
    return ROW, None


def _gates(decay: fx.Node) -> fx.Node:
    return _decay(decay.args[0])[1]


def _is_running_sum(n: Any) -> bool:
    if not match.is_call(n, aten.cumsum.default) or match.argument(n, "dtype") not in (None, match.value(n).dtype):
        return False
    return match.argument(n, "dim") % match.rank(n) == match.rank(n) - 1


def _last(n: Any) -> Any:
    """The running sum whose last element ``n`` is, as a column or without the dimension."""
    if match.is_call(n, aten.select.int):
        source, dim, at = n.args
        size = match.value(source).shape[dim]
        return source if _is_running_sum(source) and dim % 4 == 3 and at in (-1, size - 1) else None
    piece = match.part(n)
    whole = piece is not None and piece.dim == match.rank(piece.source) - 1 and _is_running_sum(piece.source)
    return piece.source if whole and piece.start == match.value(piece.source).shape[-1] - 1 else None


def _segments(n: Any) -> Any:
    """a [..., l] when ``n`` [..., l, s] is a_(s+1) + .. + a_l where s <= l, and minus infinity elsewhere."""
    if not match.is_call(n, aten.masked_fill.Scalar) or n.args[2] != float("-inf") or not _fills(n.args[1], 1):
        return None
    sums = n.args[0]
    if (
        match.is_call(sums, aten.cumsum.default)
        and match.argument(sums, "dim") % match.rank(sums) == match.rank(sums) - 2
    ):
        steps = sums.args[0]
        if not match.is_call(steps, aten.masked_fill.Scalar) or steps.args[2] != 0 or not _fills(steps.args[1], 0):
            return None
        rows = steps.args[0]
        rows = rows.args[0] if match.is_call(rows, aten.expand.default) else rows
        last = match.is_call(rows, aten.unsqueeze.default) and rows.args[1] % match.rank(rows) == match.rank(rows) - 1
        return rows.args[0] if last else None
    if match.is_call(sums, aten.sub.Tensor):
        rows, columns = sums.args[:2]
        at = [x.args[1] % match.rank(x) if match.is_call(x, aten.unsqueeze.default) else None for x in (rows, columns)]
        rank = match.rank(sums)
        if at == [rank - 1, rank - 2] and rows.args[0] is columns.args[0] and _is_running_sum(rows.args[0]):
            return rows.args[0].args[0]
    return None


def _fills(mask: Any, first: int) -> bool:
    """Whether a mask is true where the column is at least ``first`` ahead of the row."""
    band = meaning(mask)
    if not isinstance(band, Band) or band.documents is not None:
        return False
    if (band.low, band.high) == (first, float("inf")):
        return bool(band.inside) and not band.outside
    return (band.low, band.high) == (float("-inf"), first - 1) and bool(band.outside) and not band.inside


def _sequence(n: Any) -> Any:
    """[b, seq, ...] that ``n`` [b, c, l, ...] divides into chunks, without zeros after the last token."""
    if not match.is_call(n, *match.RESHAPES):
        raise Miss(f"{n.name} is no sequence in chunks")
    new, inner = list(match.value(n).shape), n.args[0]
    old = list(match.value(inner).shape)
    merged = [new[0], new[1] * new[2], *new[3:]] if len(new) >= 3 else []
    if not symbols.are_known_equal(old, merged):
        raise Miss(f"{n.name} is no sequence in chunks")
    return _unpadded(inner)


def _unpadded(n: Any) -> Any:
    """``n`` [b, seq, ...] without zeros after the last token."""
    if not match.is_call(n, aten.pad.default):
        return n
    widths, mode, fill = (match.argument(n, name) for name in ("pad", "mode", "value"))
    rank = match.rank(n)
    widths = [*widths, *[0] * (2 * rank - len(widths))]
    at = 2 * (rank - 2)  # widths are listed from the last dimension on
    others = [w for i, w in enumerate(widths) if i != at + 1]
    return n.args[0] if mode in (None, "constant") and not fill and not any(others) else n


def _pair(n: fx.Node, pattern: str) -> list[fx.Node] | None:
    """The factors of one product; each may be a product itself."""
    form = multilinear.read(n, lambda x: x is not n and match.is_call(x, *match.MUL))
    return multilinear.named(form, [ROW] * len(form.factors), pattern)


def _x_and_dt(n: fx.Node) -> tuple[fx.Node, fx.Node]:
    pair = _pair(n, "row bshp, row bsh -> bshp")
    if pair is None:
        raise Miss(f"{n.name} is not a value times the step of each token and head")
    return pair[0], pair[1]


def _rates(gates: fx.Node, dt: fx.Node) -> fx.Node:
    """A, of the gates dt A [b, h, c, l]."""
    chunked = _pair(gates, "row bclh -> bhcl")
    if chunked is None:
        raise Miss(f"{gates.name} is no sequence of steps in chunks")
    inner = _sequence(chunked[0])
    pair = _pair(inner, "row bsh, row h -> bsh")
    if pair is None or not match.same(norms.strip_widening(pair[0]), norms.strip_widening(dt)):
        raise Miss(f"{inner.name} is not the step of each token times a rate of each head")
    return pair[1]


def _groups(n: Any) -> Any:
    """B or C [b, seq, groups, n] before its heads were repeated."""
    source = kv_heads.repetition(norms.strip_widening(n))
    return norms.strip_widening(n if source is None or source[1] != 2 else source[0])


def _first(start: fx.Node) -> fx.Node:
    state = match.uncast(start)
    if not match.is_call(state, aten.unsqueeze.default) or state.args[1] % 5 != 1:
        raise Miss(f"{start.name} is no state at the start")
    return state.args[0]


def _is_last(n: fx.Node, line: fx.Node) -> bool:
    size = match.value(line).shape[1]
    return match.is_call(n, aten.select.int) and n.args[1] % 5 == 1 and n.args[2] in (-1, size - 1)


def _result(node: fx.Node, x: fx.Node, line: fx.Node) -> tuple[fx.Node, fx.Node | None, fx.Node | None]:
    """The result [b, seq, h, p] as far as the operator makes it; with tokens that are too many; D."""
    inner = norms.only_user(node)
    inner = norms.only_user(inner) if match.is_call(inner, *multilinear.SAME) else inner
    shape, new = match.value(node).shape, match.value(inner).shape if inner is not None else ()
    joined = [shape[0], shape[1] * shape[2], *shape[3:]]
    if not match.is_call(inner, *match.RESHAPES) or not (
        len(new) == 4 and all(symbols.statically_known_true(a == b) for a, b in zip(new, joined))
    ):
        raise Miss(f"{node.name} is not joined to one sequence")
    if symbols.statically_known_true(new[1] == match.value(x).shape[1]):
        total, d = _skip(inner, x, line)
        return total, None, d
    total, d = _skip(inner, x, line)
    cut = _cut(total, x)
    if cut is None:
        return total, total, d
    if d is None:
        after, d = _skip(cut, x, line)
        return after, total if after is cut else None, d
    return cut, total, d


def _cut(n: fx.Node, x: fx.Node) -> fx.Node | None:
    """The one reader of ``n`` when it takes its first tokens, as many as x has."""
    piece = match.part(user := norms.only_user(n))
    seq = match.value(x).shape[1]
    return user if piece is not None and (piece.dim, piece.start, piece.stop, piece.step) == (1, 0, seq, 1) else None


def _skip(n: fx.Node, x: fx.Node, line: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """(the sum, D) when the one reader of ``n`` adds D x to it; else (n, None)."""
    total = norms.only_user(n)
    for one, other in match.operands(total, aten.add.Tensor):
        if one is n and isinstance(other, fx.Node) and match.is_float(other):
            pair = _pair(other, "row bshp, row h -> bshp")
            same = pair is not None and match.same(*(norms.strip_widening(y) for y in (_unpadded(pair[0]), x)))
            if same and _is_before(pair[1], line):
                return total, pair[1]
    return n, None


def _is_before(n: fx.Node, other: fx.Node) -> bool:
    return next(x for x in n.graph.nodes if x is n or x is other) is n


def _between(outs: list[fx.Node], inputs: list[fx.Node]) -> list[fx.Node]:
    """What ``outs`` are computed of, from ``inputs`` on."""
    seen, stack = dict.fromkeys(inputs), list(outs)
    while stack:
        n = stack.pop()
        if n not in seen and n.op == "call_function":
            seen[n] = None
            stack += n.all_input_nodes
    return [n for n in seen if n not in inputs]
