"""A selective scan, read from the outputs of its states: unrolled token by token, or an associative scan.

Letters as in kernels/selective_scan.py: b rows, d channels, n the state, s the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from mindspeed_fx.graph import match
from mindspeed_fx.graph.match import aten
from mindspeed_fx.graph.new_call import NewCall
from mindspeed_fx.passes.base import Miss
from mindspeed_fx.passes.fusion.analysis import associative_scan, multilinear, norms


@dataclass
class SelectiveScan:
    """Arguments of ``mindspeed::selective_scan``, and what of the graph it stands for."""

    u: Any
    dt: Any
    a: Any
    b: Any
    c: Any
    d: fx.Node | None
    z: Any
    bias: fx.Node | None
    state: fx.Node | None
    softplus: bool
    first: fx.Node
    """Where the operator stands."""
    out: fx.Node
    """The result, with skip and gate where it has them."""
    turned: bool
    """Whether the result, and the gate, are [batch, seq, channels] where the operator's are [batch, channels, seq]."""
    final: list[fx.Node]
    """Reads of the last state."""
    region: list[fx.Node]


@dataclass
class _Line:
    """States that go from token to token, and what is read of them."""

    decays: tuple[fx.Node, str]
    inputs: tuple[fx.Node, str]
    c: tuple[fx.Node, str]
    state: fx.Node | None
    first: fx.Node
    y: fx.Node
    final: list[fx.Node]
    region: list[fx.Node]
    letters: str = "bds"
    """Of y."""


def read(node: fx.Node, known: dict) -> SelectiveScan | None:
    """The scan whose outputs, token by token, ``node`` stacks, or whose states it turns after an associative scan;
    None when it is something else. ``known`` is kept between the nodes of a graph.

    Raises:
        Miss: a line of states is there, and it is not the selective scan's.
    """
    line = _unrolled(node) if match.is_call(node, aten.stack.default) else _associative(node, known)
    if line is None:
        return None
    a, delta, delta_letters = _decays(line)
    dt, softplus, bias = _step(delta)
    b, u = _inputs(line, delta)
    u = (norms.strip_widening(u[0]), u[1])
    out, d, z = _skip_and_gate(line, u)
    region = [*line.region, line.decays[0], line.inputs[0], out]
    arranged = (
        _arrange(line, u, "bds"), _arrange(line, (dt, delta_letters), "bds"), _arrange(line, a, "dn"),
        _arrange(line, b, "bns"), _arrange(line, line.c, "bns"),
    )  # fmt: skip
    turned = line.letters == "bsd"
    z = NewCall(line.first, aten.transpose.int, z, 1, 2) if turned and z is not None else z
    return SelectiveScan(*arranged, d, z, bias, line.state, softplus, line.first, out, turned, line.final, region)


def _arrange(line: _Line, factor: tuple[Any, str], wanted: str) -> Any:
    """A factor with its dimensions in the wanted order, and before it was widened."""
    node, letters = factor
    if letters == wanted:
        return norms.strip_widening(node)
    while match.is_call(node, aten.transpose.int):
        swapped, (i, j) = list(letters), (d % len(letters) for d in node.args[1:3])
        swapped[i], swapped[j] = swapped[j], swapped[i]
        node, letters = node.args[0], "".join(swapped)
        if letters == wanted:
            return norms.strip_widening(node)
    return NewCall(line.first, aten.permute.default, norms.strip_widening(node), [letters.index(x) for x in wanted])


# --------------------------------------------------------------------------- states


def _selected(n: Any) -> tuple[Any, int, int] | None:
    """(x, dimension, place) when ``n`` is x at one place of a dimension."""
    if not match.is_call(n, aten.select.int) or not isinstance(n.args[2], int):
        return None
    x, dim, at = n.args
    dim, size = dim % match.rank(x), match.value(x).shape[dim]
    return (x, dim, at % size) if isinstance(size, int) and size else None


def _output(n: Any) -> tuple[fx.Node, tuple[Any, int, int], str] | None:
    """(the state, C at one token, the letters of that) when ``n`` is their product."""
    form = multilinear.read(n, lambda x: match.is_call(x, aten.add.Tensor) or _is_wide_select(x))
    names = multilinear.lettered(form, "bd", "n") if len(form.labels) == 2 else None
    if names is None or len(names) != 2:
        return None
    for (state, own), (c, letters) in (names, names[::-1]):
        if own == "bdn" and sorted(letters) == ["b", "n"] and (place := _selected(c)) is not None:
            return match.uncast(state), place, letters
    return None


def _is_wide_select(n: fx.Node) -> bool:
    place = _selected(n)
    return place is not None and match.value(place[0]).shape[place[1]] != 1


def _unrolled(stack: fx.Node) -> _Line | None:
    outputs = stack.args[0]
    if match.value(stack).dim() != 3 or match.argument(stack, "dim", 0) % 3 == 0:
        return None
    reads = [_output(n) for n in outputs[:1]]
    if reads[0] is None or _update(reads[0][0]) is None:
        return None
    reads += [_output(n) for n in outputs[1:]]
    start, region = _update(reads[0][0])[2], [stack, *outputs]
    before, sources = start, None
    for i, output in enumerate(reads):
        update = None if output is None else _update(output[0], before)
        if update is None or update[2] is not before:
            raise Miss(f"token {i} does not read the state that token {i - 1} left")
        decay, added, _ = update
        places = (decay, added, output[1])
        sources = sources or [p[:2] for p in places]
        same = all(match.same(p[0], of) and p[1] == dim for p, (of, dim) in zip(places, sources))
        if not same or any(p[2] != i for p in places) or output[2] != reads[0][2]:
            raise Miss(f"decay, input and C of token {i} are not those of place {i} of a sequence")
        before = output[0]
        region.append(before)
    length = match.value(sources[0][0]).shape[sources[0][1]]
    if length != len(reads):
        raise Miss(f"{len(reads)} of {length} tokens are scanned")
    (decays, at), (inputs, also), (c, c_at) = sources
    letters = reads[0][2]
    users = [u for u in before.users if u not in outputs and not _leads_to(u, outputs[-1])]
    return _Line(
        (decays, _with_sequence("bdn", at)), (inputs, _with_sequence("bdn", also)), (c, _with_sequence(letters, c_at)),
        None if match.is_zeros(start) else start, before, stack, [before] if users else [], region,
        _with_sequence("bd", match.argument(stack, "dim", 0) % 3),
    )  # fmt: skip


def _with_sequence(letters: str, at: int) -> str:
    return letters[:at] + "s" + letters[at:]


def _leads_to(n: fx.Node, output: fx.Node) -> bool:
    for _ in range(4):
        if n is output:
            return True
        n = norms.only_user(n)
    return False


def _update(n: Any, before: Any = None) -> tuple[Any, Any, Any] | None:
    """(decay, input, the state before) of the state ``n``: the first two at one place of a sequence."""
    n = match.uncast(n)
    for product, added in match.operands(n, aten.add.Tensor):
        place = _selected(added)
        for decay, state in match.operands(product, aten.mul.Tensor) if place is not None else ():
            if (own := _selected(decay)) is not None and (before is None or state is before):
                return own, place, state
    return None


def _associative(node: fx.Node, known: dict) -> _Line | None:
    """The states [..., seq, ...] of ``node``, which moves the sequence from the first dimension to where it was."""
    if not match.is_call(node, aten.movedim.int) or node.args[1] != 0 or match.value(node).dim() != 4:
        return None
    pair = associative_scan.states_of(node.args[0], known)
    if pair is None:
        return None
    at = node.args[2] % 4
    turned = [match.is_call(x, aten.movedim.int) and [d % 4 for d in x.args[1:]] == [at, 0] for x in pair]
    if at != 2 or not all(turned):
        raise Miss("the scan is not over the third dimension of [batch, channels, seq, state]")
    final, y = [], None
    for user in node.users:
        place = _selected(user)
        if place is not None and place[1:] == (at, match.value(node).shape[at] - 1):
            final.append(user)
        elif y is None:
            y = _read_of(node, user)
        else:
            raise Miss(f"the states {node.name} are read by others than C and as the last")
    if y is None:
        raise Miss(f"what reads the states {node.name} is not their product with C")
    decays, inputs = (x.args[0] for x in pair)
    return _Line((decays, "bdsn"), (inputs, "bdsn"), y[1], None, node, y[0], final, [node])


def _read_of(states: fx.Node, user: fx.Node) -> tuple[fx.Node, tuple[fx.Node, str]] | None:
    """(y, C) when ``user`` is on the way from the states to their product with C."""
    n: fx.Node | None = user
    for _ in range(8):
        if n is None or not match.is_float(n):
            return None
        if match.value(n).dim() == 3:
            inner = _is_factor(states)  # C may be a product itself: of a norm with its weight
            form = multilinear.read(n, lambda x: x is states or inner(x))
            names = multilinear.lettered(form, "bds", "n")
            if names is not None and len(names) == 2 and (states, "bdsn") in names:
                c = next(x for x in names if x[0] is not states)
                return (n, c) if sorted(c[1]) == ["b", "n", "s"] else None
        n = norms.only_user(n)
    return None


# --------------------------------------------------------------------------- what states are made of


def _decays(line: _Line) -> tuple[tuple[fx.Node, str], fx.Node, str]:
    """A, delta and the letters of delta."""
    n, letters = line.decays
    names = None
    if match.is_call(n, aten.exp.default):
        names = multilinear.lettered(multilinear.read(n.args[0], _is_factor(n.args[0])), letters)
    kinds = {"".join(sorted(own)): (node, own) for node, own in names or ()}
    if names is None or len(names) != 2 or set(kinds) != {"dn", "bds"}:
        raise Miss(f"the decays {n.name} are not exponentials of a step of each token times a rate of each channel")
    return kinds["dn"], *kinds["bds"]


def _is_factor(whole: fx.Node):
    """Products inside of a product are its factors, but for those that have all of its dimensions."""
    rank = match.value(whole).dim()
    return lambda x: match.is_call(x, aten.mul.Tensor) and match.value(x).dim() < rank


def _is_inner(whole: fx.Node):
    """Products inside of a product are its factors."""
    return lambda x: x is not whole and match.is_call(x, aten.mul.Tensor)


def _inputs(line: _Line, delta: fx.Node) -> tuple[tuple[fx.Node, str], tuple[fx.Node, str]]:
    """B and u."""
    n, letters = line.inputs
    names = multilinear.lettered(multilinear.read(n, _is_factor(n)), letters) or []
    if len(names) == 2:  # a product of the step and the value that was made before
        inner = next((x for x in names if sorted(x[1]) == ["b", "d", "s"]), names[0])
        parts = multilinear.lettered(multilinear.read(inner[0], _is_inner(inner[0])), inner[1]) or []
        names = [x for x in names if x is not inner] + parts
    rows = [x for x in names if sorted(x[1]) == ["b", "d", "s"]]
    steps = [x for x in rows if match.same(x[0], delta)]
    b = [x for x in names if sorted(x[1]) == ["b", "n", "s"]]
    if len(names) != 3 or len(rows) != 2 or not steps or len(b) != 1:
        raise Miss(f"what is added to states ({n.name}) is not the step times B times a value of each channel")
    return b[0], next(x for x in rows if x is not steps[0])


def _step(delta: fx.Node) -> tuple[fx.Node, bool, fx.Node | None]:
    """(dt, whether softplus is taken, the bias of dt)"""
    n = norms.strip_widening(delta)
    if not match.is_call(n, aten.softplus.default) or (
        match.argument(n, "beta", 1) != 1 or match.argument(n, "threshold", 20) != 20
    ):
        return n, False, None
    inner = n.args[0]
    for dt, bias in match.operands(inner, aten.add.Tensor):
        column = isinstance(bias, fx.Node) and match.is_call(bias, aten.unsqueeze.default)
        if column and match.value(bias.args[0]).dim() == 1 and bias.args[1] % 2 == 1:
            return norms.strip_widening(dt), True, bias.args[0]
    return norms.strip_widening(inner), True, None


def _skip_and_gate(line: _Line, u: tuple[fx.Node, str]) -> tuple[fx.Node, fx.Node | None, fx.Node | None]:
    """The result, D and z."""
    order = {n: i for i, n in enumerate(line.first.graph.nodes)}
    out, d, z = line.y, None, None
    total = norms.only_user(out)
    for one, other in match.operands(total, aten.add.Tensor):
        if one is out and isinstance(other, fx.Node) and match.is_float(other) and match.value(other).dim() == 3:
            names = multilinear.lettered(multilinear.read(other, _is_factor(other)), line.letters) or []
            rates = [x for x, own in names if own == "d"]
            values = [(norms.strip_widening(x), own) for x, own in names if own != "d"]
            same = len(rates) == len(values) == 1 and values[0][1] == u[1] and match.same(values[0][0], u[0])
            if same and order[rates[0]] < order[line.first]:
                out, d = total, rates[0]
                break
    product = norms.only_user(out)
    for one, gate in match.operands(product, aten.mul.Tensor):
        same = (
            one is out and match.is_call(gate, aten.silu.default) and match.value(gate).shape == match.value(out).shape
        )
        if same and order[gate.args[0]] < order[line.first]:
            return product, d, gate.args[0]
    return out, d, z
