"""What every rank of a pipeline computes and holds, from what one layer of each kind and the two ends of the model do.

Layers are dealt to stages in their order: as equal as can be by number, or so that the fullest rank has the least to
do. Stage 0 has what comes before the layers, the last one what comes after them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields
from typing import Sequence

from mindspeed_fx.cost.pipeline import Parts
from mindspeed_fx.planning.search.layouts import Layout
from mindspeed_fx.planning.search.problem import Node, Problem
from mindspeed_fx.planning.search.schedules import in_flight, rank_of_stage

BEFORE, AFTER = -1, -2
"""Parts of a model beside its runs of layers, which have their numbers."""


@dataclass
class Load:
    """Seconds of one microbatch, and bytes, of a part of a model on one rank."""

    forward: float = 0.0
    inputs: float = 0.0
    """Gradients of activations."""
    weights: float = 0.0
    moved: float = 0.0
    """Collectives that are waited for, there and back."""
    recompute: float = 0.0
    exposed: float = 0.0
    """What gathers and reductions do not hide: seconds each time."""
    update: float = 0.0
    """Seconds of the optimizer, once a step."""
    state: float = 0.0
    kept: float = 0.0
    """Bytes kept of each microbatch for its backward."""
    gathered: float = 0.0
    transient: float = 0.0
    """Bytes at hand; these two are the largest of any part's, all others sums."""

    def add(self, other: Load, times: float = 1.0) -> None:
        for name in SUMS:
            setattr(self, name, getattr(self, name) + times * getattr(other, name))
        self.gathered = max(self.gathered, other.gathered)
        self.transient = max(self.transient, other.transient)

    @property
    def steady(self) -> float:
        """Seconds of a microbatch."""
        return self.forward + self.inputs + self.weights + self.moved + self.recompute

    @property
    def parts(self) -> Parts:
        half = self.moved / 2
        return Parts(self.forward + half, self.recompute, self.inputs + half, self.weights)

    def bytes(self, held: float) -> dict[str, float]:
        """With ``held`` microbatches kept."""
        kept = held * self.kept
        return {"states": self.state, "kept": kept, "operator": self.transient, "gathered": self.gathered}


SUMS = tuple(f.name for f in fields(Load) if f.name not in ("gathered", "transient"))


def parts_of(problem: Problem) -> dict[Node, int]:
    """The part that each operator is in: its run, ``BEFORE`` or ``AFTER`` the layers."""
    results = {n: n.run for n in problem.nodes}
    after = {n for n in problem.nodes if n.run >= 0}
    readers: dict[Node, list[Node]] = {}
    for e in problem.edges:
        if e.value.producer is not None:
            readers.setdefault(e.value.producer, []).append(e.node)
    todo = list(after)
    while todo:
        for reader in readers.get(todo.pop(), ()):
            if reader not in after:
                after.add(reader)
                todo.append(reader)
    return results | {n: AFTER for n in after if n.run < 0}


def layer_order(problem: Problem) -> list[int]:
    """The run of each layer, in the order in which they run."""
    begun = list(dict.fromkeys(n.run for n in problem.nodes if n.run >= 0))
    return [run for run in begun for _ in problem.runs[run]]


def even_sizes(layers: int, stages: int) -> list[int]:
    """Layers of each stage: layer i of n in stage i * stages // n."""
    sizes = [0] * stages
    for i in range(layers):
        sizes[i * stages // layers] += 1
    return sizes


def counts_of(order: Sequence[int], sizes: Sequence[int]) -> list[dict[int, int]]:
    """How many of each part the stages have."""
    results: list[dict[int, int]] = []
    at = 0
    for size in sizes:
        mine: dict[int, int] = {}
        for run in order[at : at + size]:
            mine[run] = mine.get(run, 0) + 1
        results.append(mine)
        at += size
    results[0][BEFORE] = results[-1][AFTER] = 1
    return results


def rank_counts(layout: Layout, stages: Sequence[dict[int, int]]) -> list[dict[int, int]]:
    """How many of each part the ranks have, of what their stages have."""
    results: list[dict[int, int]] = [{} for _ in range(layout.pp)]
    for s, mine in enumerate(stages):
        rank = results[rank_of_stage(layout, s)]
        for part, count in mine.items():
            rank[part] = rank.get(part, 0) + count
    return results


def holders(layout: Layout, order: Sequence[int]) -> list[tuple[dict[int, int], float]]:
    """What may be the fullest rank of even stages: parts, and microbatches kept; those that have no more than another
    are left out.
    """
    ranks = rank_counts(layout, counts_of(order, even_sizes(len(order), layout.pp * layout.virtual)))
    results: list[tuple[dict[int, int], float]] = []
    for rank, mine in enumerate(ranks):
        held = in_flight(layout, rank)
        if not any(h >= held and all(other.get(k, 0) >= n for k, n in mine.items()) for other, h in results):
            results.append((mine, held))
    return results


def balanced_sizes(layout: Layout, order: Sequence[int], loads: dict[int, Load], memory: float) -> list[int] | None:
    """Layers of each stage so that the fullest rank takes the least time, of those whose ranks fit in ``memory`` bytes
    where any do; each has one at least. (Found by bisection over the time that a
    stage may take, filled from the back, for the first ranks keep the most
    microbatches; layers are then shifted to where memory is free.)
    """
    count = layout.pp * layout.virtual
    if count > len(order):
        return None
    times = [loads[run].steady for run in order]
    ends = loads.get(BEFORE, Load()).steady, loads.get(AFTER, Load()).steady
    low, high = 0.0, sum(times) + sum(ends)
    best: list[int] | None = None
    for _ in range(40):
        middle = (low + high) / 2
        sizes = _filled(times[::-1], ends[::-1], count, middle)
        if sizes is None:
            low = middle
        else:
            best, high = sizes[::-1], middle
    if best is not None and layout.virtual > 1:
        best = _shifted(layout, times, ends, best)
    return best and _within(layout, order, loads, memory, best)


def _shifted(layout: Layout, times: Sequence[float], ends: tuple[float, float], sizes: list[int]) -> list[int]:
    """Layers shifted from the stages of the fullest rank to others, as long as the fullest rank has less to do."""
    until = [0.0, *itertools.accumulate(times)]

    def fullest(sizes: Sequence[int]) -> tuple[float, int]:
        bounds = [0, *itertools.accumulate(sizes)]
        ranks = [0.0] * layout.pp
        for s in range(len(sizes)):
            ranks[rank_of_stage(layout, s)] += until[bounds[s + 1]] - until[bounds[s]]
        ranks[0] += ends[0]
        ranks[rank_of_stage(layout, len(sizes) - 1)] += ends[1]
        return max((seconds, rank) for rank, seconds in enumerate(ranks))

    seconds, rank = fullest(sizes)
    for _ in range(len(times)):
        tried = []
        for s, to in itertools.permutations(range(len(sizes)), 2):
            if rank_of_stage(layout, s) == rank and sizes[s] > 1:
                moved = list(sizes)
                moved[s] -= 1
                moved[to] += 1
                tried.append((*fullest(moved), moved))
        if not tried or min(tried)[0] >= seconds * (1 - 1e-9):
            break
        seconds, rank, sizes = min(tried)
    return sizes


def _filled(times: Sequence[float], ends: tuple[float, float], count: int, most: float) -> list[int] | None:
    """Sizes of stages that take no more than ``most`` seconds each; None: there are none."""
    sizes, at = [], 0
    for s in range(count):
        remaining = count - 1 - s
        used, size = ends[0] if s == 0 else 0.0, 0
        used += ends[1] if not remaining else 0.0
        while at + size < len(times) - remaining and (size == 0 or used + times[at + size] <= most):
            used += times[at + size]
            size += 1
        if used > most or (not remaining and at + size < len(times)):
            return None
        sizes.append(size)
        at += size
    return sizes


def _within(layout: Layout, order: Sequence[int], loads: dict[int, Load], memory: float, sizes: list[int]) -> list[int]:
    """Layers shifted from ranks that do not fit to the neighbours that hold least, as long as that helps."""
    for _ in range(len(order)):
        needs = _totals(layout, order, loads, sizes)
        worst = max(range(layout.pp), key=needs.__getitem__)
        if needs[worst] <= memory:
            return sizes
        tried = []
        for s in range(len(sizes)):
            for other in (s - 1, s + 1):
                if rank_of_stage(layout, s) == worst and 0 <= other < len(sizes) and sizes[s] > 1:
                    moved = list(sizes)
                    moved[s] -= 1
                    moved[other] += 1
                    tried.append((max(_totals(layout, order, loads, moved)), moved))
        if not tried or min(tried)[0] >= needs[worst]:
            return sizes
        sizes = min(tried)[1]
    return sizes


def rank_bytes(
    layout: Layout, order: Sequence[int], loads: dict[int, Load], sizes: Sequence[int]
) -> list[dict[str, float]]:
    """What each rank holds, by what it is."""
    counts = rank_counts(layout, counts_of(order, sizes))
    return [joined(loads, mine).bytes(in_flight(layout, rank)) for rank, mine in enumerate(counts)]


def _totals(layout: Layout, order: Sequence[int], loads: dict[int, Load], sizes: Sequence[int]) -> list[float]:
    return [sum(held.values()) for held in rank_bytes(layout, order, loads, sizes)]


def joined(loads: dict[int, Load], counts: dict[int, int]) -> Load:
    """The load of so many of each part."""
    result = Load()
    for part, count in counts.items():
        if part in loads:
            result.add(loads[part], count)
    return result


def whole_sizes(problem: Problem, sizes: Sequence[int]) -> list[int]:
    """Layers of each stage, of all layers of the model: one that is in no run, for none is like it, goes with the one
    before it.

    Args:
        sizes: of the layers that are in runs.
    """
    begun = list(dict.fromkeys(n.run for n in problem.nodes if n.run >= 0))
    names = [name for run in begun for name in problem.runs[run]]
    stage_of = dict(zip(names, (s for s, size in enumerate(sizes) for _ in range(size))))
    results, known = [0] * len(sizes), set(problem.module_names)
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in names):
        at = min(stage_of[name] for name in names if name.rpartition(".")[0] == parent)
        number = 0
        while (layer := f"{parent}.{number}".lstrip(".")) in known:
            at = stage_of.get(layer, at)
            results[at] += 1
            number += 1
    return results
