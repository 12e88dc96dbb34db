"""``associative_scan`` of (decay, input) pairs, read by what stands at each place: which stretch of the sequence.

torch's generic scan halves a sequence again and again: slices of every second element, a call that combines
neighbours, interleaving by stack and flatten. Of a value it is enough to know the stretch (i, j) of tokens that each of
its elements combines; a result whose elements are (0, 0), (0, 1), (0, 2) ... holds the states. torch's pointwise scan,
which is for CUDA, stays one call.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from mindspeed_fx.compat import higher_order
from mindspeed_fx.graph import match
from mindspeed_fx.graph.match import aten

DECAY, INPUT = 0, 1
"""Of the pair (a, b) that stands for h -> a h + b."""

Stretch = tuple[int, int] | None
"""The first and the last token; None where something is read that is not used."""


@dataclass
class Combined:
    """Elements along the first dimension."""

    part: int
    sources: tuple[fx.Node | None, fx.Node | None]
    """The decays and the inputs of single tokens, the sequence first."""
    stretches: list[Stretch]


def states_of(n: fx.Node, known: dict[fx.Node, Combined | None] | None = None) -> tuple[fx.Node, fx.Node] | None:
    """(decays, inputs), the sequence first in each, when ``n`` holds the state after each token."""
    if match.is_call(n, operator.getitem) and match.is_call(n.args[0], higher_order.associative_scan_operator()):
        call, index = n.args
        values = call.args[1]
        return tuple(values) if index == INPUT and not call.args[2] and _is_combination(call) else None
    result = _read(n, {} if known is None else known)
    if result is None or result.part != INPUT or None in result.sources or len(result.stretches) < 2:
        return None
    return result.sources if result.stretches == [(0, j) for j in range(len(result.stretches))] else None


def _read(n: Any, known: dict[fx.Node, Combined | None]) -> Combined | None:
    if n not in known:
        known[n] = None
        known[n] = _look(n, known)
    return known[n]


def _look(n: Any, known: dict[fx.Node, Combined | None]) -> Combined | None:
    if not isinstance(n, fx.Node) or n.meta.get("mutated"):
        return None
    if match.is_call(n, operator.getitem) and match.is_call(n.args[0], higher_order.wrap_operator()):
        return _combine(n.args[0], n.args[1], known)
    if match.is_call(n, aten.slice.Tensor) and match.argument(n, "dim", 0) == 0:
        inner = _read(n.args[0], known)
        bounds = [match.argument(n, name) for name in ("start", "end")]
        step = match.argument(n, "step", 1)
        if inner is None or not all(b is None or isinstance(b, int) for b in bounds):
            return None
        return Combined(inner.part, inner.sources, inner.stretches[slice(*bounds, step)])
    if match.is_call(n, aten.pad.default):
        inner, widths = _read(n.args[0], known), n.args[1]
        if inner is None or any(widths[:-1]) or len(widths) != 2 * match.rank(n):
            return None
        return Combined(inner.part, inner.sources, [*inner.stretches, *[None] * widths[-1]])
    return _joined(n, known)


def _joined(n: fx.Node, known: dict[fx.Node, Combined | None]) -> Combined | None:
    """Elements of several values one after the other, or in turn."""
    turns = match.is_call(n, aten.flatten.using_ints) and list(n.args[1:]) == [0, 1]
    if turns and match.is_call(n.args[0], aten.stack.default) and match.argument(n.args[0], "dim", 0) == 1:
        arguments = n.args[0].args[0]
    elif match.is_call(n, aten.cat.default) and match.argument(n, "dim", 0) == 0:
        arguments, turns = n.args[0], False
    else:
        return None
    values = [_read(x, known) for x in arguments]
    part = next((value.part for value in values if value is not None), None)
    if part is not None:
        values = [value or _tokens(x, part, known) for x, value in zip(arguments, values)]
    if None in values or len({value.part for value in values}) != 1:
        return None
    sources = _agreed([value.sources for value in values])
    if sources is None:
        return None
    if not turns:
        return Combined(values[0].part, sources, [s for value in values for s in value.stretches])
    if len({len(value.stretches) for value in values}) != 1:
        return None
    return Combined(values[0].part, sources, [s for group in zip(*(v.stretches for v in values)) for s in group])


def _agreed(sources: list[tuple[Any, Any]]) -> tuple[Any, Any] | None:
    """What single tokens have, if all who know it say the same."""
    result = []
    for part in (DECAY, INPUT):
        said = {s[part] for s in sources if s[part] is not None}
        if len(said) > 1:
            return None
        result.append(next(iter(said), None))
    return result[0], result[1]


def _combine(call: fx.Node, index: int, known: dict[fx.Node, Combined | None]) -> Combined | None:
    """A result of a call that combines the pairs of its left and its right arguments."""
    arguments = call.args[1:]
    if len(arguments) != 4 or index not in (DECAY, INPUT) or not _is_combination(call):
        return None
    values = [_read(x, known) or _tokens(x, part, known) for x, part in zip(arguments, (DECAY, INPUT, DECAY, INPUT))]
    if None in values or [value.part for value in values] != [DECAY, INPUT, DECAY, INPUT]:
        return None
    sources = _agreed([value.sources for value in values])
    left, right = values[0].stretches, values[2].stretches
    if sources is None or left != values[1].stretches or right != values[3].stretches or len(left) != len(right):
        return None
    joined = [(a[0], b[1]) if a and b and a[1] + 1 == b[0] else None for a, b in zip(left, right)]
    return Combined(index, sources, joined)


def _tokens(n: fx.Node, part: int, known: dict[fx.Node, Combined | None]) -> Combined | None:
    """``n`` read as slices of something that is none of these: its elements are single tokens."""
    source = n.args[0] if match.is_call(n, aten.slice.Tensor) else n
    size = match.value(source).shape[0]
    if not isinstance(size, int):
        return None
    if known.get(source) is None:
        sources = (source, None) if part == DECAY else (None, source)
        known[source] = Combined(part, sources, [(i, i) for i in range(size)])
    if n is not source:
        known.pop(n, None)  # looked at before it was known what its source is
    return _read(n, known)


def _is_combination(call: fx.Node) -> bool:
    """Whether the body of ``call`` returns (a' a, a' b + b') of (a, b, a', b')."""
    graph = getattr(call.graph.owning_module, str(call.args[0].target)).graph
    arguments = [n for n in graph.nodes if n.op == "placeholder"]
    body, results = steps(call), graph.output_node().args[0]
    if body is None or len(arguments) != 4 or len(results) != 2:
        return False
    values: dict[fx.Node, Any] = dict(zip(arguments, ("a", "b", "A", "B")))
    for n, sources in body:
        terms = [values[x] for x in sources]
        values[n] = (n.target, frozenset(terms)) if len(terms) == 2 else terms[0]
    decays = (operator.mul, frozenset("aA"))
    inputs = (operator.add, frozenset(((operator.mul, frozenset("Ab")), "B")))
    return [values.get(x) for x in results] == [decays, inputs]


def steps(call: fx.Node) -> list[tuple[fx.Node, tuple[fx.Node, ...]]] | None:
    """The calls of a wrapped body that computes sums and products of its arguments, batched over their first dimension,
    each with what it reads: two values, or one that enters or leaves the batch. None where it does anything else, or a
    value without the batch takes part, which every element of the batch meets whole."""
    graph = getattr(call.graph.owning_module, str(call.args[0].target)).graph
    results: list[tuple[fx.Node, tuple[fx.Node, ...]]] = []
    inputs = set(graph.find_nodes(op="placeholder"))
    levels = [n for n in graph.nodes if getattr(n.target, "__name__", "") == _ENTERS]
    batched = set() if levels else set(inputs)  # the pointwise form of a scan has no batch: it meets the whole tensors
    left = set(inputs) if levels else batched
    for n in graph.nodes:
        name = getattr(n.target, "__name__", "")
        if n.op in ("placeholder", "output") or name in _AROUND:
            continue
        if (name, n.args[1:2]) == ("_add_batch_dim", (0,)) and n.args[0] in inputs:
            sources, place = n.args[:1], batched
        elif (name, n.args[3:4]) == ("_remove_batch_dim", (0,)) and n.args[0] in batched:
            sources, place = n.args[:1], left
        elif n.target in (operator.mul, operator.add) and all(x in batched for x in n.args):
            sources, place = n.args, batched
        else:
            return None
        results.append((n, sources))
        place.add(n)
    return results if len(levels) < 2 and all(x in left for x in graph.output_node().args[0]) else None


_ENTERS = "_vmap_increment_nesting"
_AROUND = ("lazy_load_decompositions", _ENTERS, "_vmap_decrement_nesting")
"""Calls around a batch, which give no value."""
