"""A training step as numbers: what is read, how large it is, in which order the backward runs; and one walk that says
what a choice of saved values costs in time and in memory.

The forward runs in order; the backward too, and what it recomputes comes right before its first reader, as torch's
partitioner orders it. Views share memory, a value dies with its last reader, what the forward returns and gradients
live on. Nodes are numbers in the order of the joint graph. No torch here: tests make schedules of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Iterable, Sequence

import numpy as np


@dataclass(frozen=True)
class Plan:
    """What comes of saving ``saved``."""

    saved: frozenset[int]
    bytes: int
    """Peak beyond the inputs of the forward."""
    seconds: float
    """What the plan costs over a step that runs everything once and keeps it for nothing: operations run twice, and
    keeping where that has a price.
    """
    at: int
    """The node during which the peak is reached."""
    recompute: tuple[int, ...]
    """What the backward runs again, in order."""
    moves: tuple[tuple[int, int, int], ...] = ()
    """(value, free, back) of each saved value that is moved to host memory: positions in the step from which on its
    memory is free, and from which on it is being filled again. See :mod:`offload`."""


@dataclass
class RematProblem:
    """One step. All lists but ``backward``, ``tail``, ``returned`` and ``gradients`` have an entry for each node."""

    sources: list[tuple[int, ...]]
    """What a node reads; nodes before it."""
    root: list[int]
    """Whose memory a node's value is: its own number unless it is a view."""
    size: list[int]
    """Bytes a node fills; 0 for views, inputs, and with generated code for what never leaves a kernel."""
    saved_bytes: list[int]
    """The same when the value is kept for the backward, and so written out."""
    seconds: list[float]
    """Of running a node again; infinite where it must not be."""
    savable: list[bool]
    must_recompute: list[bool]
    """Inside a checkpointed region: saved never, whatever it costs."""
    is_input: list[bool]
    """Inputs of the forward."""
    backward: list[int]
    """Nodes that only the backward can run, in order."""
    needed: list[int]
    """Forward nodes that the backward reads."""
    returned: list[int]
    """What the forward returns."""
    gradients: list[int]
    """What the backward returns."""
    maker: dict[int, int] = field(default_factory=dict)
    """Result of a call with several results -> the call. Torch takes the results out of a call right behind it."""
    workspace: list[int] = field(default_factory=list)
    """Bytes alive within a node's call beside operands and results."""
    save_seconds: list[float] = field(default_factory=list)
    """Seconds that keeping a node's value costs by itself."""
    prepares: list[bool] = field(default_factory=list)
    """What the forward runs only where something made of it is saved: its first run, wherever that is, is in the time
    of the step.
    """
    run_seconds: list[float] = field(default_factory=list)
    """Seconds of running a node once; empty: what running it again costs."""

    def __post_init__(self) -> None:
        count = len(self.sources)
        self.workspace = self.workspace or [0] * count
        self.prepares = self.prepares or [False] * count
        self.save_seconds = self.save_seconds or [0.0] * count
        self.run_seconds = self.run_seconds or [0.0 if s == math.inf else s for s in self.seconds]
        behind = bytearray(count)
        for i in self.backward:
            behind[i] = 1
        self.forward = [i for i in range(count) if not behind[i]]
        self.tail = sorted(set(self.needed) & set(self.gradients))
        self.evaluations = 0
        self._longer: dict[frozenset[int], list[int]] = {}
        """What is saved that only the backward needs -> the forward with it."""
        self._lies: dict[int, tuple[Any, Any, Any]] = {}
        """Of each such list, by identity: they live as long as the step."""

    def computing(self, nodes: Iterable[int]) -> bytearray:
        """1 for ``nodes`` and for every node that a node of the forward among them is computed from."""
        wanted = bytearray(len(self.sources))
        for i in nodes:
            wanted[i] = 1
        for i in reversed(self.forward):
            if wanted[i]:
                for a in self.sources[i]:
                    wanted[a] = 1
        return wanted

    def reads(self, i: int) -> set[int]:
        """The values that must be there where node ``i`` runs again."""
        return {self.root[a] for a in self.sources[i]}

    @property
    def extra(self) -> list[float]:
        """Seconds that running a node in the backward adds for certain: none for what the forward runs only where
        something made of it is saved.
        """
        return [0.0 if early and t < math.inf else t for t, early in zip(self.seconds, self.prepares)]

    @cached_property
    def values(self) -> list[int]:
        """Nodes of the forward with a value of their own that the backward may need, in order."""
        wanted = self.computing(self.needed)
        return sorted({self.root[i] for i in self.forward if wanted[i] and not self.is_input[self.root[i]]})

    def evaluate(self, saved: Iterable[int], most: float = math.inf) -> Plan | None:
        """Time and peak of a choice; None when the backward could then not have all it needs, or when it takes more
        than ``most`` seconds.
        """
        saved = frozenset(saved)
        result = self._second(saved)
        if result is None:
            return None
        first, (second, again) = self._first(saved), result
        ran = set(first) if any(self.prepares) else frozenset(again)
        spent = sum([self.seconds[i] for i in again if i in ran or not self.prepares[i]]) + sum(
            [self.save_seconds[i] for i in saved]
        )
        if spent > most:
            return None
        run, alive = first + second, self._alive(saved, first, second)
        if not run:
            return Plan(saved, 0, spent, -1, ())
        at = int(alive.argmax())
        return Plan(saved, int(alive[at]), spent, run[at], tuple(again))

    def trace(self, plan: Plan) -> tuple[list[int], list[int], int]:
        """(the nodes of forward and backward as they run, bytes alive during each, how many are forward)."""
        first, (second, _) = self._first(plan.saved), self._second(plan.saved)
        return first + second, self._alive(plan.saved, first, second, plan.moves).tolist(), len(first)

    def _first(self, saved: frozenset[int]) -> list[int]:
        """The forward in the order it runs."""
        runs, always = self._always
        more = frozenset([i for i in saved if not runs[i]])
        if not more:
            return always
        if more not in self._longer:
            runs = bytearray(len(self.sources))
            for i in (*self.returned, *more):
                runs[i] = 1
            sources = self.sources
            for i in reversed(self.forward):
                if runs[i]:
                    for a in sources[i]:
                        runs[a] = 1
            self._longer[more] = [i for i in self.forward if runs[i]]
        return self._longer[more]

    def _second(self, saved: frozenset[int]) -> tuple[list[int], list[int]] | None:
        """The backward in the order it runs, and what in it was run by the forward; None when that must not run
        again.
        """
        self.evaluations += 1
        done, sources, run, again = bytearray(self.is_input), self.sources, [], []
        for i in saved:
            done[i] = 1
        for before, node, reads in self._readers:
            run += before
            if node < 0 or done[node]:
                continue
            missing = [a for a in reads if not done[a]]
            if missing:
                for a in missing:
                    done[a] = 1
                k = 0
                while k < len(missing):
                    for a in sources[missing[k]]:
                        if not done[a]:
                            done[a] = 1
                            missing.append(a)
                    k += 1
                missing.sort()
                run += missing
                again += missing
            done[node] = 1
            run.append(node)
            if node in self._forward_set:
                again.append(node)
        seconds = self.seconds
        if math.inf in [seconds[i] for i in again]:
            return None
        return run, again

    @cached_property
    def _readers(self) -> list[tuple[list[int], int, tuple[int, ...]]]:
        """What the backward runs: (nodes that read nothing of the forward, the node behind them or -1, what that reads
        of the forward).
        """
        results, before = [], []
        for node in self.backward:
            reads = tuple(a for a in self.sources[node] if a in self._forward_set and not self.is_input[a])
            if reads:
                results.append((before, node, reads))
                before = []
            elif not self.is_input[node]:
                before.append(node)
        for node in self.tail:
            results.append((before, node, self.sources[node]))
            before = []
        return [*results, (before, -1, ())]

    @cached_property
    def _always(self) -> tuple[bytearray, list[int]]:
        """What the forward runs whatever is saved."""
        runs = self.computing(self.returned)
        return runs, [i for i in self.forward if runs[i]]

    def _laid(self, first: list[int]) -> tuple[Any, Any, Any]:
        """Of a forward of :meth:`_first`, were nothing saved: the last place that reads each value, the place that
        makes each value (both -1 where there is none), and the changes of the bytes alive from place to place."""
        if (result := self._lies.get(id(first))) is not None:
            return result
        blocks, filled, size, _ = self._arrays
        run, count = np.array(first, dtype=np.int64), len(self.root)
        last, output, places = np.full(count, -1), np.full(count, -1), np.arange(len(first))
        np.maximum.at(last, *blocks.of(run, places))
        values, where = filled.of(run, places)
        np.maximum.at(output, values, where)
        change = _sums(
            (where, size[values]), (np.maximum(where, last[values]) + 1, -size[values]), length=len(first) + 1
        )
        self._lies[id(first)] = last, output, change
        return last, output, change

    @cached_property
    def _arrays(self) -> tuple[_Lists, _Lists, Any, Any]:
        """:attr:`_blocks` and :attr:`_filled`; bytes of each value, and when it is kept."""
        return (
            _Lists(self._blocks),
            _Lists(self._filled),
            np.array(self.size, dtype=np.int64),
            np.array(self.saved_bytes, dtype=np.int64),
        )

    @cached_property
    def _blocks(self) -> list[tuple[int, ...]]:
        """The memory that a node reads or fills, by owner, where there is any."""
        results = []
        for i, sources in enumerate(self.sources):
            results.append(tuple({r for r in (self.root[i], *(self.root[a] for a in sources)) if self.saved_bytes[r]}))
        return results

    @cached_property
    def _filled(self) -> list[list[int]]:
        """The values whose memory a node's call fills: its own, or with several results all of them, whoever is
        read.
        """
        results: list[list[int]] = [[] for _ in self.sources]
        for i in range(len(self.sources)):
            if self.saved_bytes[i]:
                results[self.maker.get(i, i)].append(i)
        return results

    @cached_property
    def _returned(self) -> frozenset[int]:
        return frozenset(self.root[i] for i in self.returned)

    @cached_property
    def _ends(self) -> frozenset[int]:
        """What is alive at the end of the step."""
        return frozenset(self.root[i] for i in (*self.returned, *self.gradients))

    @cached_property
    def _ends_there(self) -> Any:
        return np.array(sorted(self._ends), dtype=np.int64)

    @cached_property
    def _at_end(self) -> Any:
        result = np.zeros(len(self.root), dtype=bool)
        result[self._ends_there] = True
        return result

    @cached_property
    def _works(self) -> bool:
        return any(self.workspace)

    @cached_property
    def _workspaces(self) -> Any:
        return np.array(self.workspace, dtype=np.int64)

    @cached_property
    def _forward_set(self) -> set[int]:
        return set(self.forward)

    def _alive(
        self, saved: frozenset[int], first: list[int], second: list[int], moves: Iterable[tuple[int, int, int]] = ()
    ) -> Any:
        """Bytes alive during each node of both, as an array."""
        blocks, filled, size, full = self._arrays
        last, result, change = self._laid(first)
        length, cut = len(first) + len(second), len(first)
        kept = np.array(sorted({self.root[i] for i in saved}.union(self._returned)), dtype=np.int64)
        run, places = np.array(second, dtype=np.int64), np.arange(cut, length)
        later = np.full(len(self.root), -1)  # stays -1 for what nobody takes out of a call
        np.maximum.at(later, *blocks.of(run, places))
        until = later.copy()
        until[self._ends_there[later[self._ends_there] >= 0]] = length - 1
        carried = kept[(result[kept] >= 0) & (last[kept] >= 0)]
        until[carried] = -1  # filled a second time, and dead at once
        own = size.copy()
        own[kept] = full[kept]
        values, where = filled.of(run, places)
        bytes_ = own[values]
        gone = later[carried]
        over = np.where(self._at_end[carried], length - 1, np.where(gone >= cut, gone, cut - 1))
        parts = [
            (np.arange(len(change)), change),
            (where, bytes_),
            (np.maximum(where, until[values]) + 1, -bytes_),
            (result[carried], full[carried] - size[carried]),
            (np.maximum(result[carried], last[carried]) + 1, size[carried]),
            (over + 1, -full[carried]),
        ]
        moved = set(carried.tolist()) if moves else ()
        for v, free, back in moves:
            if v in moved:
                mine = self.saved_bytes[v]
                parts.append(
                    (
                        np.array([free, back, later[v] + 1, int(over[np.searchsorted(carried, v)]) + 1]),
                        np.array([-mine, mine, -mine, mine]),
                    )
                )
        alive = np.cumsum(_sums(*parts, length=length + 1)[:length])
        if self._works:
            alive += self._workspaces[first + second]
        return alive


class _Lists:
    """A list of nodes for each node, as arrays."""

    def __init__(self, many: Sequence[Sequence[int]]):
        self._count = np.array([len(some) for some in many], dtype=np.int64)
        self._start = np.cumsum(self._count) - self._count
        self._all = np.array([v for some in many for v in some], dtype=np.int64)

    def of(self, run: Any, places: Any) -> tuple[Any, Any]:
        """The nodes in the lists of ``run``, and for each the place of whose list it is in."""
        count = self._count[run]
        at = np.repeat(self._start[run] - np.cumsum(count) + count, count)
        at += np.arange(len(at))
        return self._all[at], np.repeat(places, count)


def _sums(*parts: tuple[Any, Any], length: int) -> Any:
    """At each place the sum of the bytes there, each part being (places, bytes); exact below 2**53 bytes."""
    places, bytes_ = (np.concatenate(p) for p in zip(*parts))
    return np.bincount(places, bytes_, length).astype(np.int64)
