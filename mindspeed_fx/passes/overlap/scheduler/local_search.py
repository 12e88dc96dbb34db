"""Search for a better order: forward-backward passes and seeded perturbation of the keys, until the bound or the
budget.

The budget is work, not time: a number of tasks placed, so that every rank finds the same order on any machine.
"""

from __future__ import annotations

import random
from typing import Iterator, Sequence

from mindspeed_fx.passes.overlap.model.simulator import Timeline, memory_curve, simulate
from mindspeed_fx.passes.overlap.model.tasks import COMPUTE, Task, TaskGraph
from mindspeed_fx.passes.overlap.scheduler.active_schedules import by_stretches
from mindspeed_fx.passes.overlap.scheduler.beam_search import beam
from mindspeed_fx.passes.overlap.scheduler.list_scheduler import list_schedule
from mindspeed_fx.passes.overlap.scheduler.min_memory_order import min_memory_order, reorder
from mindspeed_fx.passes.overlap.scheduler.slack import raise_starts, sink_waits

WORK = 120_000
"""Tasks placed by the search at least, about 1 s on one core."""

ORDERS = 24
"""How often each task is placed at least: with half of it steps of 9442 tasks came out 14 % longer, with twice as much
none shorter.
"""

FRUGAL = 3000
"""Tasks up to which a frugal order is tried as well; no cell that was tried is shorter with it
(benchmarks/results/2026-11-22-solver_ablation.txt, as the numbers below).
"""

SMALL = 64
"""Tasks up to which a beam search follows under a memory limit. Without it random graphs of 12 to 23 tasks took 1.6 %
longer, 10.5 % at worst.
"""

STALE = 40
"""Orders without a shorter one after which a search of more than SMALL tasks ends, so that it takes as long as the
graph is large, not as its times are: thirteen graphs of launch scripts and models come out as with all of WORK but for
one, 0.004 % longer; random graphs of 40 tasks would up to 8 % (benchmarks/results/2026-11-25-overlap_search.txt).
"""

STRETCHES = 4
"""Tasks that searches of single stretches may place for each of the others: placing one takes a fifth of the time.
benchmarks/results/2026-11-22-overlap_graphs.txt has steps without these searches and with them: 1.058 and 1.035 of the
bound.
"""

CLOSE = 1e-4
"""Within this share of the bound nothing more is tried; ten times that in graphs of more than MANY tasks, where a pass
takes long.
"""

MANY = 5000
"""With it the last pass takes 0.4 s for 40 658 nodes (benchmarks/results/2026-11-22-overlap_time.txt)."""


def schedule(graph: TaskGraph, *, allowance: int | None = 0, work: int | None = None) -> Timeline:
    """The best order found, never slower than the order as given and never over its peak memory plus ``allowance``.

    Args:
        allowance: bytes over the peak of the order as given; None: memory does not count.
        work: how many tasks the search may place; at least one pass is made. Default: WORK, or ORDERS for each task
            where that is more.
    """
    return _schedule(graph, allowance, max(WORK, ORDERS * len(graph)) if work is None else work)


def _schedule(graph: TaskGraph, allowance: int | None, work: int) -> Timeline:
    arg = simulate(graph)
    limit = None if allowance is None else arg.peak + allowance
    search = _Search(graph, limit, arg)
    search.run(work if limit is None else max(work // 2, 1))
    best, order, spent = search.best, search.best_order, search.spent
    if limit is not None:
        for anchor in _anchors(graph, limit, order):
            if spent + len(graph) > work or search._done():
                break
            moved = graph.remember(("reordered", tuple(anchor)), lambda: reorder(graph, anchor))
            search = _Search(moved, limit, simulate(moved, memory=False))
            search.run((work - spent + 1) // 2)
            spent += search.spent
            if search.best < best:
                best, order = search.best, [anchor[k] for k in search.best_order]
        width = min(work // (4 * max(len(graph), 1)), 500)  # about four ready tasks to each partial order
        if len(graph) <= SMALL and width >= 20 and best > graph.highest_bound * (1 + CLOSE):
            hit = beam(graph, limit, width)
            if hit is not None and simulate(graph, hit, memory=False).seconds < best:
                order = hit
    if not search._done():
        order = by_stretches(graph, order, limit, STRETCHES * work)
    order = sink_waits(graph, raise_starts(graph, order, limit), limit)
    result = simulate(graph, order)
    if result.seconds > arg.seconds * (1 + 1e-12):
        return arg
    return result


def _anchors(graph: TaskGraph, limit: int, best: Sequence[int]) -> Iterator[list[int]]:
    """Other orders within the limit to search from: what may be issued ahead depends on the order that memory is
    promised for.
    """
    if len(graph) <= FRUGAL:
        lean = min_memory_order(graph)
        if max(memory_curve(graph, lean), default=0) <= limit:
            yield lean
    yield list(best)


_STARTS = (
    (1.0, 2.0, 0.0),
    (0.0, None, 0.0),
    (1.0, 2.0, 0.5),
    (0.0, 2.0, 0.5),
    (1.0, 0.5, 0.0),
    (0.0, 0.5, 0.5),
    (0.5, 2.0, 0.5),
    (1.0, 8.0, 0.0),
)
"""What the search begins with: share of the order as given against the critical path in the keys; how far ahead to
prefetch, in durations of the transfer (None: as far as memory allows); patience. With the first four alone cells were
0.02 % longer; without patience one took 3.9 % longer, without holding prefetches back 9.1 %.
"""


class _Search:
    def __init__(self, graph: TaskGraph, limit: int | None, arg: Timeline):
        self.graph, self.limit = graph, limit
        self.best, self.best_order = arg.seconds, list(arg.order)
        self.bound = graph.highest_bound
        self.expected: list[float] | None = None
        self.release: list[float] | None = None
        self.spent = self.stale = 0

    def run(self, work: int) -> None:
        alap, size = self.graph.alap_lengths, len(self.graph)
        longest = max(alap, default=0.0)
        for share, margin, patience in _STARTS:
            self.release = None if margin is None or self.limit is None else just_in_time(self.graph, margin)
            self._descend([share * longest * i / size - (1 - share) * t for i, t in enumerate(alap)], patience, work)
            if self.spent >= work or self._done():
                return
        dice = random.Random(0)
        while self.spent < work and not self._done() and not (self.stale > STALE and size > SMALL):
            noise = dice.choice((0.1, 0.3, 1.0))
            patience = dice.choice((0.0, 0.0, 0.5, 1.0, 3.0))
            self.release = (
                None
                if self.limit is None or dice.random() < 0.5
                else just_in_time(self.graph, dice.choice((0.5, 1.0, 2.0, 4.0)))
            )
            keys = [-t * (1 + noise * (dice.random() - 0.5)) for t in alap]
            if dice.random() < 0.5:  # near the best so far
                place = {i: k for k, i in enumerate(self.best_order)}
                keys = [place[i] + noise * size * (dice.random() - 0.5) for i in range(size)]
            self._descend(keys, patience, work)

    def _done(self) -> bool:
        return self.best <= self.bound * (1 + (CLOSE if len(self.graph) <= MANY else 10 * CLOSE))

    def _descend(self, keys: Sequence[float], patience: float, work: int) -> None:
        """List schedule, then backward and forward again while it gets better (Li and Willis 1992)."""
        last = float("inf")
        while True:
            seconds, end = self._try(keys, patience)
            if self._done() or seconds >= last or self.spent >= work:
                return
            last = seconds
            keys = self._latest_starts(end)

    def _try(self, keys: Sequence[float], patience: float) -> tuple[float, list[float]]:
        order, end = _listed(self.graph, keys, self.limit, patience, self.expected, self.release)
        self.spent += len(self.graph)
        seconds, self.stale = max(end, default=0.0), self.stale + 1
        if seconds < self.best:
            self.stale = 0
            self.best, self.best_order = seconds, order
            self.expected = [max((end[n] for n in t.needs), default=0.0) for t in self.graph.tasks]
        return seconds, end

    def _latest_starts(self, end: list[float]) -> list[float]:
        """Starts of a schedule made from the end of the step towards its beginning, late tasks first."""
        size = len(self.graph)
        reverse = self.graph.remember("reversed", lambda: _turned(self.graph))
        _, reversed_end = _listed(reverse, [-end[size - 1 - i] for i in range(size)])
        self.spent += size
        return [-reversed_end[size - 1 - i] for i in range(size)]


def _turned(graph: TaskGraph) -> TaskGraph:
    """The tasks from the last to the first, each needing what needed it; without memory."""
    size = len(graph)
    return TaskGraph(
        [
            Task(t.name, t.seconds, t.resource, tuple(size - 1 - u for u in graph.users[i]))
            for i, t in reversed(list(enumerate(graph.tasks)))
        ]
    )


def _listed(
    graph: TaskGraph,
    keys: Sequence[float],
    limit: int | None = None,
    patience: float = 0.0,
    expected: Sequence[float] | None = None,
    release: Sequence[float] | None = None,
) -> tuple[list[int], list[float]]:
    """:func:`list_schedule`, which a second search of the same graph, with more work or less, begins with again."""
    known = (tuple(keys), limit, patience, expected and tuple(expected), release and tuple(release))
    return graph.remember(
        known,
        lambda: list_schedule(graph, keys, limit=limit, patience=patience, expected=expected, release=release),
    )


def just_in_time(graph: TaskGraph, margin: float) -> list[float]:
    """For each transfer, how much compute (seconds, in the order as given) comes before the latest moment it should
    start.

    Worked out backwards per link: a transfer must end before the compute that needs it, and before the next one on its
    link must start; then ``margin`` times its own duration is allowed for. Never later than it stands in the given
    order.
    """
    before, total = [], 0.0
    for task in graph.tasks:
        before.append(total)
        total += task.seconds if task.resource == COMPUTE else 0.0
    due = [float("inf")] * len(graph)  # of waits and views: when their first user that takes time runs
    for i in range(len(graph) - 1, -1, -1):
        task = graph.tasks[i]
        due[i] = (
            before[i]
            if task.resource == COMPUTE and task.seconds
            else min((due[u] for u in graph.users[i]), default=total)
        )
    latest, release = dict.fromkeys(graph.links, float("inf")), [0.0] * len(graph)
    for i in sorted(graph.transfers, key=lambda i: (-due[i], -i)):
        task = graph.tasks[i]
        latest[task.resource] = min(due[i], latest[task.resource]) - task.seconds
        release[i] = min(before[i], latest[task.resource] - margin * task.seconds)
        due[i] = latest[task.resource]
    return release
