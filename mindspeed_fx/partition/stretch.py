"""The layers of a model in a graph that is yet to be compiled: what each reads, and how the next layer's is told from
it.

Unlike the layers of :mod:`mindspeed_fx.partition.repeats`, which are divided where they are compiled apart best, these
begin anywhere in their period, and a call is like another whatever it does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Hashable, Iterator, Sequence

import torch.fx as fx

from mindspeed_fx.partition import repeats


class LayersDiffer(Exception):
    """Layers that looked alike are not, or are read one by one; says what."""


class Stretch:
    """Neighbouring layers, at least three, each a list of calls that are alike in their order."""

    def __init__(self, layers: Sequence[Sequence[fx.Node]]):
        self.layers = [list(calls) for calls in layers]
        self.place = {n: (i, k) for i, calls in enumerate(self.layers) for k, n in enumerate(calls)}

    def reads(self) -> Iterator[tuple[tuple[int, int], list[fx.Node]]]:
        """((call, argument), what it is in each layer) for all that is not of the reading layer itself."""
        rows = [[repeats.arguments(n) for n in calls] for calls in self.layers]
        for k, first in enumerate(rows[0]):
            for j in range(len(first)):
                nodes = [row[k][j] for row in rows]
                if any(self.place.get(n, (-1, 0))[0] != i for i, n in enumerate(nodes)):
                    yield (k, j), nodes


def stretches(calls: Sequence[fx.Node], least: int) -> Iterator[tuple[int, int, Stretch]]:
    """What repeats three times or more, that which saves most calls first, with its bounds in ``calls``.

    Args:
        least: calls of a layer.
    """
    numbers: dict[Any, int] = {}
    words = [numbers.setdefault(repeats.word(n), len(numbers)) for n in calls]
    for start, end, period in repeats.stretches(words, least):
        first, last, layers = repeats.alike(calls, start, end, period)
        if len(layers) >= repeats.LEAST_LAYERS:
            yield first, last, Stretch(layers)


Row = Hashable
"""What has one member for each layer: an input that every layer has for itself, or a call of a stretch."""


@dataclass(frozen=True)
class Source:
    """In layer ``i`` an argument is the member ``sign * i + shift`` of ``row``; without a row, ``node`` in all."""

    row: Row
    sign: int = 0
    shift: int = 0
    node: fx.Node | None = None


def source(nodes: Sequence[Any], member: Callable[[Any], tuple[Row, int, int] | None]) -> Source:
    """What an argument is in every layer.

    Args:
        nodes: the argument, in each layer in their order.
        member: of a node the row that it is of, its number there, and how many members the row has. Layers at the ends
            may read anything where they would read a member that is none.

    Raises:
        LayersDiffer: no such thing can be said of it.
    """
    if all(n is nodes[0] for n in nodes):
        return Source(None, node=nodes[0])
    members = [member(n) for n in nodes]
    known = (i for i, (a, b) in enumerate(zip(members, members[1:])) if a and b and a[0] == b[0])
    at = next((i for i in known if abs(members[i + 1][1] - members[i][1]) == 1), None)
    if at is None:
        raise LayersDiffer(f"{nodes[0]} and {nodes[1]} are read at the same place of two layers")
    row, number, size = members[at]
    sign = members[at + 1][1] - number
    result = Source(row, sign, number - sign * at)
    for i, (n, own) in enumerate(zip(nodes, members)):
        expected = sign * i + result.shift
        if 0 <= expected < size and (own is None or own[:2] != (row, expected)):
            raise LayersDiffer(f"{n} is read where {row} of layer {expected} would be")
    return result
