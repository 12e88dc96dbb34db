"""A delta rule that goes from chunk to chunk, read from its line of states.

Letters as in kernels/gated_delta_rule.py and, with a gate for every channel, kernels/kimi_delta_attention.py. The two
triangular systems of all chunks give U and W; then, chunk by chunk,

    N = U_i - W_i S;  out_i = (q e^c)_i S + P_i N;  S <- S (e^c_C)_i + (k e^(c_C - c))_i^T N

Every chunk must be there and read the same five values, computed for all chunks or in each; what these are made of,
:mod:`delta_chunks` says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from mindspeed_fx.compat import symbols
from mindspeed_fx.graph import match
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.base import Miss
from mindspeed_fx.passes.fusion.analysis import delta_chunks, kv_heads, norms
from mindspeed_fx.passes.fusion.analysis.delta_chunks import ACROSS, COLUMN, LAST, PAIRS, REST, ROW, SUM, chunk_of


@dataclass
class DeltaRule:
    """Arguments of ``mindspeed::gated_delta_rule`` or ``kimi_delta_attention``, and what of the graph it stands for."""

    q: Any
    k: Any
    v: fx.Node
    g: fx.Node
    beta: fx.Node
    state: fx.Node | None
    scale: float
    norm_eps: float | None
    chunk: int
    first: fx.Node
    """The first call that reads a state."""
    out: fx.Node
    """[batch, heads, seq, v_dim]"""
    padded: fx.Node | None
    """The result with the tokens that were added, where there are any."""
    final: fx.Node | None
    """The last state, where it is read."""
    writes: list[fx.Node]
    """What fills the result chunk by chunk."""
    region: list[fx.Node]


@dataclass
class _Line:
    """The line of states: the values that all its chunks read, and its ends."""

    start: fx.Node
    parts: dict[str, _Value]
    filled: fx.Node
    first: fx.Node
    final: fx.Node | None
    writes: list[fx.Node]
    region: list[fx.Node]


@dataclass
class _Value:
    """A value that chunks read: where the first one has it, and its factors."""

    node: fx.Node
    factors: delta_chunks.Factors


def is_unit_triangular(n: Any) -> bool:
    return (
        match.is_call(n, aten.linalg_solve_triangular.default)
        and match.argument(n, "upper") is False
        and match.argument(n, "left", True) is not False
        and match.argument(n, "unitriangular") is True
        and match.value(n).dim() == 5
    )


def is_by_channel(solution: fx.Node) -> bool:
    """Whether the products of the system of ``solution`` are sums over channels with decays of their own, rather than
    products of matrices."""
    n = solution.args[0]
    while match.is_call(n, aten.neg.default, aten.tril.default, aten.masked_fill.Scalar, aten.mul.Tensor):
        n = n.args[0]
    return match.is_call(n, aten.sum.dim_IntList)


def read(solution: fx.Node) -> DeltaRule | None:
    """The rule whose U is ``solution``; None when it is the solution of something else, W of a rule included.

    Raises:
        Miss: a line of states starts here, and is not the gated delta rule's.
    """
    copies = (n for n in solution.users if match.is_call(n, aten.contiguous.default))
    u = next((n for n in (solution, *copies) if _start(n, 0) is not None), None)
    if u is None:
        return None
    started = _start(u, 0)
    chunks = match.value(solution).shape[2]
    if not isinstance(chunks, int):
        raise Miss("the number of chunks is symbolic")
    w = chunk_of(started.args[1].args[0])[0]
    other = w.args[0] if match.is_call(w, aten.contiguous.default) else w
    if not (is_unit_triangular(other) and other.args[0] is solution.args[0]):
        raise Miss(f"{w.name}, which reads the state, is not solved from the system of {solution.name}")
    return _arguments(solution, other, _read_line(u, w, chunks))


def _start(u: fx.Node, i: int) -> fx.Node | None:
    """N of chunk i: U_i - W_i S."""
    for piece in u.users:
        if chunk_of(piece) == (u, i):
            for n in piece.users:
                if match.is_call(n, aten.sub.Tensor) and n.args[0] is piece and not n.kwargs:
                    product = n.args[1]
                    if match.is_call(product, aten.matmul.default) and (chunk_of(product.args[0]) or (0, -1))[1] == i:
                        return n
    return None


def _read_line(u: fx.Node, w: fx.Node, chunks: int) -> _Line:
    line: _Line | None = None
    state = None
    known: dict[fx.Node, delta_chunks.Factors] = {}
    for i in range(chunks):
        n = _start(u, i)
        if n is None or n.args[1].args[0].args[0] is not w or (state is not None and n.args[1].args[1] is not state):
            raise Miss(f"chunk {i} does not read the state that chunk {i - 1} left")
        state = n.args[1].args[1]
        nodes, filled, write = _output(n, state, i)
        step = _step(n, state)
        if step is not None:  # of a single chunk the state at its end may not be computed
            nodes |= step[0]
        elif i + 1 < chunks:
            raise Miss(f"the state after chunk {i} is not S e^c + k^T N")
        parts = {name: _Value(x, _factors_of(x, i, known)) for name, x in nodes.items()}
        if line is None:
            line = _Line(state, parts, filled, n.args[1], None, [], [])
        for name, part in parts.items():
            first = line.parts[name].factors
            if filled is not line.filled or part.factors[0] != first[0] or not _equal(part.factors[1], first[1]):
                raise Miss(f"chunk {i} reads other values than the first one: {name} ({part.node.name})")
        after = step[1] if step is not None else None
        line.writes.append(write)
        line.region += [n, n.args[1], write.args[1], *([after] if after is not None else [])]
        line.final = state = after
    assert line is not None
    if line.final is not None and not line.final.users:
        line.final = None
    return line


def _factors_of(n: fx.Node, i: int, known: dict[fx.Node, delta_chunks.Factors]) -> delta_chunks.Factors:
    """Of ``n`` in chunk i; what is a chunk of a value of all is read once."""
    whole = delta_chunks.of_all_chunks(n, i)
    if whole is None:
        return delta_chunks.factors(n, i)
    if whole not in known:
        known[whole] = delta_chunks.factors(whole)
    return known[whole]


def _output(n: fx.Node, state: fx.Node, i: int) -> tuple[dict[str, fx.Node], fx.Node, fx.Node]:
    """(scale q e^c and P of chunk i, what all chunks fill, the write)."""
    for product in n.users:
        if not match.is_call(product, aten.matmul.default) or product.args[1] is not n:
            continue
        for total in product.users:
            for read, other in match.operands(total, aten.add.Tensor):
                if other is not product or not match.is_call(read, aten.matmul.default) or read.args[1] is not state:
                    continue
                write = next((x for x in total.users if match.is_call(x, aten.copy_.default)), None)
                into = chunk_of(write.args[0]) if write is not None and write.args[1] is total else None
                if into is None or into[1] != i or len(total.users) != 1:
                    raise Miss(f"the result of chunk {i} is not written to its place among the others")
                return {"the queries": read.args[0], "q k^T": product.args[0]}, into[0], write
    raise Miss(f"the result of chunk {i} is not (q e^c) S + P N")


def _step(n: fx.Node, state: fx.Node) -> tuple[dict[str, fx.Node], fx.Node] | None:
    """(e^c_C and k e^(c_C - c), the state after the chunk of ``n``)."""
    for product in n.users:
        keys = (
            delta_chunks.transposed(product.args[0])
            if match.is_call(product, aten.matmul.default) and product.args[1] is n
            else None
        )
        for total in product.users if keys is not None else ():
            for before, other in match.operands(total, aten.add.Tensor):
                for held, decay in match.operands(before, aten.mul.Tensor) if other is product else ():
                    if held is state and match.is_float(decay) and _is_by_rows(decay, state):
                        return {"the decay of a state": decay, "the keys": keys}, total
    return None


def _is_by_rows(decay: fx.Node, state: fx.Node) -> bool:
    """Whether ``decay`` is a number for each state, or one for each of its rows."""
    shape, rows = match.value(decay).shape, match.value(state).shape[2]
    return len(shape) == 4 and shape[3] == 1 and (shape[2] == 1 or symbols.statically_known_true(shape[2] == rows))


def _arguments(u: fx.Node, w: fx.Node, line: _Line) -> DeltaRule:
    """What the values of all chunks are made of, each told by the others."""
    v, beta = _pair("beta v", u.args[1])
    parts = {name: part.factors for name, part in line.parts.items()}
    values = {name: part.node for name, part in line.parts.items()} | {"beta k e^c": w.args[1], "the system": u.args[0]}
    parts |= {name: delta_chunks.factors(values[name]) for name in ("beta k e^c", "the system")}
    q = _factor(parts["the queries"], ROW)
    k, c = _factor(parts["beta k e^c"], ROW), _factor(parts["beta k e^c"], SUM)
    scale = parts["the queries"][0]
    expected: dict[str, tuple[float, list[tuple[str, Any]]]] = {
        "the decay of a state": (1.0, [(LAST, c)]),
        "the queries": (scale, [(ROW, q), (SUM, c)]),
        "the keys": (1.0, [(ROW, k), (REST, c)]),
        "beta k e^c": (1.0, [(ROW, k), (COLUMN, beta), (SUM, c)]),
        "the system": (1.0, [(ROW, k), (COLUMN, beta), (ACROSS, k), (PAIRS, c)]),
        "q k^T": (scale, [(ROW, q), (ACROSS, k), (PAIRS, c)]),
    }
    for name, have in parts.items():
        number, wanted = expected[name]
        if None in (q, k, c) or not math.isclose(have[0], number, rel_tol=1e-6) or not _equal(have[1], wanted):
            raise Miss(f"{name} ({values[name].name}) is not {_shown(number, wanted)}")
    g, by_channel = _gate(c), match.rank(c) == 5
    if by_channel != is_by_channel(u):
        raise Miss(f"pairs of tokens are summed by channels, of which {c.name} decays all alike")
    heads = None if by_channel else match.value(v).shape[1]
    out, padded = _result(line, match.value(v).shape[2])
    (q, eps), (k, k_eps) = _source(q, line.first, heads), _source(k, line.first, heads)
    if eps != k_eps:
        raise Miss(f"queries are normalized with eps {eps} and keys with {k_eps}")
    if not symbols.statically_known_true(match.value(q).shape[1] == match.value(k).shape[1]):
        raise Miss(f"{match.value(q).shape[1]} heads of queries meet {match.value(k).shape[1]} of keys")
    if by_channel:
        _require_a_gate_for_every_channel(q, k, v, g)
    state = None if match.is_zeros(line.start) else line.start
    region = [u, w, u.args[0], *line.region]
    return DeltaRule(
        q, k, v, norms.strip_widening(g), norms.strip_widening(beta), state, scale, eps,
        match.value(u).shape[3], line.first, out, padded, line.final, line.writes, region,
    )  # fmt: skip


def _require_a_gate_for_every_channel(q: Any, k: Any, v: fx.Node, g: fx.Node) -> None:
    if not symbols.are_known_equal(list(match.value(g).shape), list(match.value(k).shape)):
        raise Miss(f"the gates {g.name} are not one for every channel of the keys")
    if not symbols.are_known_equal(list(match.value(q).shape[:3]), list(match.value(v).shape[:3])):
        raise Miss("queries and values do not have the same heads")


def _factor(read: delta_chunks.Factors, what: str) -> Any:
    return next((node for kind, node in read[1] if kind == what), None)


def _pair(name: str, n: Any) -> tuple[Any, Any]:
    number, inside = delta_chunks.factors(n)
    kinds = dict(inside)
    if number != 1 or len(inside) != 2 or set(kinds) != {ROW, COLUMN}:
        raise Miss(f"{n.name} is not {name}: rows, and a number for each")
    return kinds[ROW], kinds[COLUMN]


def _equal(have: list[tuple[str, Any]], wanted: list[tuple[str, Any]]) -> bool:
    remaining = list(wanted)
    for what, node in have:
        same = next((x for x in remaining if x[0] == what and (x[1] is node or match.same(x[1], node))), None)
        if same is None:
            return False
        remaining.remove(same)
    return not remaining


def _shown(number: float, wanted: list[tuple[str, Any]]) -> str:
    names = [what if what in (SUM, REST, LAST, PAIRS) else f"{getattr(n, 'name', n)} by {what}" for what, n in wanted]
    return " * ".join(([] if number == 1 else [f"{number:.4g}"]) + names)


def _gate(c: fx.Node) -> fx.Node:
    """g, whose running sum in each chunk is c."""
    number, inside = delta_chunks.factors(c.args[0])
    kind = ROW if match.rank(c) == 5 else COLUMN
    if match.argument(c, "dim") % match.rank(c) != 3 or number != 1 or [what for what, _ in inside] != [kind]:
        raise Miss(f"{c.name} is not the running sum of the gates in each chunk")
    return inside[0][1]


def _source(n: fx.Node, before: fx.Node, heads: Any) -> tuple[Any, float | None]:
    """Queries or keys before they are normalized, and before they are repeated for ``heads`` heads, and the eps of the
    norm."""
    normal = delta_chunks.normal(n)
    if normal is not None:
        return _heads(normal[0], before, heads), normal[1]
    inner = _heads(n, before, heads)
    normal = delta_chunks.normal(inner)
    return (norms.strip_widening(normal[0]), normal[1]) if normal is not None else (inner, None)


def _heads(n: fx.Node, before: fx.Node, heads: Any) -> Any:
    n = norms.strip_widening(n)
    source = None if heads is None else kv_heads.ungroup(before, n, heads)
    return n if source is None else source


def _result(line: _Line, seq: Any) -> tuple[fx.Node, fx.Node | None]:
    """The result [batch, heads, seq, v_dim], without the tokens that were added, and with them if there are any."""
    filled = line.filled
    order = {n: i for i, n in enumerate(filled.graph.nodes)}
    others = [n for n in filled.users if not (len(n.users) == 1 and next(iter(n.users)) in line.writes)]
    if len(others) != 1 or not match.is_call(others[0], *match.RESHAPES) or filled.op == "placeholder":
        raise Miss(f"the chunks of the result in {filled.name} are read one by one, or elsewhere")
    if any(order[write] > order[others[0]] for write in line.writes):
        raise Miss("the result is read before the last chunk is written")
    out = others[0]
    shape, whole = match.value(out).shape, match.value(filled).shape
    if len(shape) != 4 or not all(
        symbols.statically_known_true(a == b) for a, b in zip(shape[2:], (whole[2] * whole[3], whole[4]))
    ):
        raise Miss(f"{out.name} does not join the chunks to one sequence")
    if symbols.statically_known_true(shape[2] == seq):
        return out, None
    cut = next(iter(out.users)) if len(out.users) == 1 else None
    piece = match.part(cut) if cut is not None else None
    if piece is None or (piece.dim, piece.start, piece.step) != (2, 0, 1) or piece.stop != seq:
        raise Miss("the tokens that fill the last chunk are read")
    return cut, out
