"""Save or recompute every value, at the least sum of the prices of both: one minimum cut, exactly solved.

Each operation is a vertex (sink side: the backward runs it again), each value another (sink side: the backward has it).
Cut edges are what is paid: into an operation the price of running it again, from an operation to its value the price of
saving. Values needed for a recomputation must be there too: an uncuttable edge. The construction is the one of Chen et
al. and of torch's partitioner, with finite prices where that has bans.
"""

from __future__ import annotations

import math
from typing import Callable, Sequence

from mindspeed_fx.compat import partitioner
from mindspeed_fx.partition.max_flow import ENDLESS, SINK, SOURCE, Network
from mindspeed_fx.passes.recompute.problem.dataflow import Dataflow, Operation, Value
from mindspeed_fx.passes.recompute.problem.remat_problem import RematProblem

UNIT = 1e-15
"""Prices are counted in this, for exact and equal cuts on all ranks: a femtosecond."""

FRACTION = 2.0**-10
"""The same for prices in bytes moved."""


def cheapest(tape: Dataflow, again: Callable[[Operation], float], save: Callable[[Value], float]) -> list[Value]:
    """The values to save.

    Args:
        again: price of running an operation once more, in bytes moved; infinite where it must not be.
        save: price of keeping a value; infinite where it cannot be.
    """
    operation = {o: 2 + n for n, o in enumerate(tape.operations)}
    value = {v: 2 + len(operation) + n for n, v in enumerate(tape.values)}
    network = Network(2 + len(operation) + len(value))
    for o, vertex in operation.items():
        price = again(o)
        if price > 0 and not partitioner.must_recompute(o.node):
            network.add(SOURCE, vertex, _capacity(price, FRACTION))
        for v in o.inputs:
            network.add(value[v], vertex, ENDLESS)
    for v, vertex in value.items():
        # One result of an operation that runs again may have to be saved all the same: the end of a checkpointed
        # region.
        network.add(
            SOURCE if partitioner.must_save(v.node) else operation[v.made_by],
            vertex,
            _capacity(save(v), FRACTION) if v.savable and not partitioner.must_recompute(v.node) else ENDLESS,
        )
        if v.needed:
            network.add(vertex, SINK, ENDLESS)
    network.solve()
    existing = network.sink_side()
    return [
        v
        for v in tape.values
        if existing[value[v]] and (partitioner.must_save(v.node) or not existing[operation[v.made_by]])
    ]


class Cuts:
    """Minimum cuts of one schedule at many prices.

    Attributes:
        values: the nodes whose values may be saved or recomputed.
    """

    def __init__(self, schedule: RematProblem, seconds: Sequence[float] | None = None):
        self.schedule, seconds = schedule, schedule.extra if seconds is None else seconds
        self.values = schedule.values
        again = {v: 2 + 2 * n for n, v in enumerate(self.values)}
        self._again, self._network = again, Network(2 + 2 * len(self.values))
        needed = {schedule.root[i] for i in schedule.needed}
        self._save = []
        for v in self.values:  # what an operation reads must be there when it runs again
            for a in schedule.reads(v):
                if a in again:
                    self._network.add(again[a] + 1, again[v], ENDLESS)
        for v in self.values:
            o = again[v]
            if seconds[v] > 0:
                self._network.add(SOURCE, o, _capacity(seconds[v], UNIT))
            self._save.append(self._network.add(o, o + 1, 0))
            if v in needed:
                self._network.add(o + 1, SINK, ENDLESS)
        self._empty, self._prices, self._flow = list(self._network.room), [0] * len(self.values), 0

    def cheapest(self, price: Callable[[int], float]) -> tuple[frozenset[int], float]:
        """(the nodes to save, the least sum of prices), where ``price`` in seconds is for saving a node's value.

        The sum is a lower bound of ``seconds`` + price of all choices, up to :data:`UNIT` per value.
        """
        schedule = self.schedule
        wanted = [
            _capacity(price(v) + schedule.save_seconds[v], UNIT)
            if schedule.savable[v] and not schedule.must_recompute[v]
            else ENDLESS
            for v in self.values
        ]
        if any(a < b for a, b in zip(wanted, self._prices)):  # flow cannot be taken back
            self._network.room, self._prices, self._flow = list(self._empty), [0] * len(self.values), 0
        room = self._network.room
        for e, new, old in zip(self._save, wanted, self._prices):
            room[e] += new - old
        self._prices = wanted
        self._flow += self._network.solve()
        existing = self._network.sink_side()
        return frozenset(
            v for v in self.values if existing[self._again[v] + 1] and not existing[self._again[v]]
        ), self._flow * UNIT


def _capacity(price: float, unit: float) -> int:
    return ENDLESS if price == math.inf else min(int(price / unit), ENDLESS - 1)
