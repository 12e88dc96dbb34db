"""A gated delta rule that goes from chunk to chunk, read from its line of states.

Letters as in kernels/gated_delta_rule.py. The two triangular systems of all chunks give U and W; then, chunk by chunk,

    N = U_i - W_i S;  out_i = (q e^c)_i S + P_i N;  S <- S (e^c_C)_i + (k e^(c_C - c))_i^T N

Every chunk must be there and read the same five values; what these are made of, :mod:`delta_chunks` says.
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
class GatedDeltaRule:
    """Arguments of ``mindspeed::gated_delta_rule``, and what of the graph it stands for."""

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
    q_decayed: Any
    scores: Any
    k_decayed: Any
    last: Any
    filled: fx.Node
    first: fx.Node
    final: fx.Node | None
    writes: list[fx.Node]
    region: list[fx.Node]


def is_unit_triangular(n: Any) -> bool:
    return (
        match.is_call(n, aten.linalg_solve_triangular.default)
        and match.argument(n, "upper") is False
        and match.argument(n, "left", True) is not False
        and match.argument(n, "unitriangular") is True
        and match.value(n).dim() == 5
    )


def read(solution: fx.Node) -> GatedDeltaRule | None:
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
    for i in range(chunks):
        n = _start(u, i)
        if n is None or n.args[1].args[0].args[0] is not w or (state is not None and n.args[1].args[1] is not state):
            raise Miss(f"chunk {i} does not read the state that chunk {i - 1} left")
        state = n.args[1].args[1]
        q_decayed, scores, filled, write = _output(n, state, i)
        step = _step(n, state, i)
        last, k_decayed, after = step or (None, None, None)
        if line is None:
            line = _Line(state, q_decayed, scores, k_decayed, last, filled, n.args[1], None, [], [])
        if [q_decayed, scores, filled] != [line.q_decayed, line.scores, line.filled]:
            raise Miss(f"chunk {i} reads other values than the first one")
        if step is not None and [last, k_decayed] != [line.last, line.k_decayed]:
            raise Miss(f"the state after chunk {i} is made of other values than that after the first one")
        if step is None and i + 1 < chunks:
            raise Miss(f"the state after chunk {i} is not S e^c + k^T N")
        line.writes.append(write)
        line.region += [n, n.args[1], write.args[1], *([after] if after is not None else [])]
        line.final = state = after
    assert line is not None
    if line.final is not None and not line.final.users:
        line.final = None
    return line


def _output(n: fx.Node, state: fx.Node, i: int) -> tuple[Any, Any, fx.Node, fx.Node]:
    """(scale q e^c, P, what is filled, the write) of chunk i, all but the write for all chunks."""
    for product in n.users:
        piece = chunk_of(product.args[0]) if match.is_call(product, aten.matmul.default) else None
        if piece is None or piece[1] != i or product.args[1] is not n:
            continue
        for total in product.users:
            for read, other in match.operands(total, aten.add.Tensor):
                known = other is product and match.is_call(read, aten.matmul.default) and read.args[1] is state
                source = chunk_of(read.args[0]) if known else None
                if source is None or source[1] != i:
                    continue
                write = next((x for x in total.users if match.is_call(x, aten.copy_.default)), None)
                into = chunk_of(write.args[0]) if write is not None and write.args[1] is total else None
                if into is None or into[1] != i or len(total.users) != 1:
                    raise Miss(f"the result of chunk {i} is not written to its place among the others")
                return source[0], piece[0], into[0], write
    raise Miss(f"the result of chunk {i} is not (q e^c) S + P N")


def _step(n: fx.Node, state: fx.Node, i: int) -> tuple[Any, Any, fx.Node] | None:
    """(e^c_C, k e^(c_C - c), the state after chunk i)."""
    for product in n.users:
        keys = (
            delta_chunks.transposed(product.args[0])
            if match.is_call(product, aten.matmul.default) and product.args[1] is n
            else None
        )
        piece = chunk_of(keys) if keys is not None else None
        for total in product.users if piece is not None and piece[1] == i else ():
            for before, other in match.operands(total, aten.add.Tensor):
                for held, decay in match.operands(before, aten.mul.Tensor) if other is product else ():
                    source = chunk_of(decay)
                    if held is state and source is not None and source[1] == i:
                        return source[0], piece[0], total
    return None


def _arguments(u: fx.Node, w: fx.Node, line: _Line) -> GatedDeltaRule:
    """What the values of all chunks are made of, each told by the others."""
    v, beta = _pair("beta v", u.args[1])
    values = {"the queries": line.q_decayed, "beta k e^c": w.args[1], "the system": u.args[0], "q k^T": line.scores}
    if line.last is not None:  # of a single chunk the state at its end may not be computed
        values |= {"the decay of a state": line.last, "the keys": line.k_decayed}
    parts = {name: delta_chunks.factors(x) for name, x in values.items()}
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
    g = _gate(c)
    out, padded = _result(line, match.value(v).shape[2])
    (q, eps), (k, k_eps) = _source(q, line.first, v), _source(k, line.first, v)
    if eps != k_eps:
        raise Miss(f"queries are normalized with eps {eps} and keys with {k_eps}")
    if not symbols.statically_known_true(match.value(q).shape[1] == match.value(k).shape[1]):
        raise Miss(f"{match.value(q).shape[1]} heads of queries meet {match.value(k).shape[1]} of keys")
    state = None if match.is_zeros(line.start) else line.start
    region = [u, w, u.args[0], *line.region]
    return GatedDeltaRule(
        q, k, v, norms.strip_widening(g), norms.strip_widening(beta), state, scale, eps,
        match.value(u).shape[3], line.first, out, padded, line.final, line.writes, region,
    )  # fmt: skip


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
    if match.argument(c, "dim") % match.rank(c) != 3 or number != 1 or [what for what, _ in inside] != [COLUMN]:
        raise Miss(f"{c.name} is not the running sum of the gates in each chunk")
    return inside[0][1]


def _source(n: fx.Node, before: fx.Node, v: fx.Node) -> tuple[Any, float | None]:
    """Queries or keys before they are normalized and their heads are repeated, and the eps of the norm."""
    normal = delta_chunks.normal(n)
    if normal is not None:
        return _heads(normal[0], before, v), normal[1]
    inner = _heads(n, before, v)
    normal = delta_chunks.normal(inner)
    return (norms.strip_widening(normal[0]), normal[1]) if normal is not None else (inner, None)


def _heads(n: fx.Node, before: fx.Node, v: fx.Node) -> Any:
    n = norms.strip_widening(n)
    source = kv_heads.ungroup(before, n, match.value(v).shape[1])
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
