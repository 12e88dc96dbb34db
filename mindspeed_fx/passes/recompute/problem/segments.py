"""Where a step can be cut into segments that are recomputed one at a time.

With a price per saved byte alone the leanest plans save what is small and dear, such as the outputs of attention, and
then make the residual stream of the whole model again at once, before the first backward: that is the largest peak of
all. A plan for a small peak saves what crosses a few narrow places and makes one segment again at a time (Chen et al.
2016, arXiv 1604.06174). Narrow places are found in the bytes that cross each place of the forward, whatever the modules
are called.
"""

from __future__ import annotations

from mindspeed_fx.graph.liveness import curve
from mindspeed_fx.passes.recompute.problem.remat_problem import RematProblem

NARROW = 1.1
"""A place is narrow when no more crosses it than this times the narrowest. Set by hand."""

STRIDES = (1, 2, 4, 8, 16)
"""Every so many narrow places are kept. Without any the least peak is 39 % larger with 8 layers of a Llama, 107 % with
32 (benchmarks/results/2026-11-22-solver_ablation.txt).
"""


def crossings(schedule: RematProblem) -> list[frozenset[int]]:
    """What crosses each narrow place of the forward, in order: values that can be saved, made before it and read behind
    it.
    """
    s = schedule
    values, runs = set(s.values), s.computing(s.returned)
    run = [i for i in s.forward if runs[i]]  # the others only prepare what the backward reads
    results = {v: t for t, i in enumerate(run) for v in s._filled[i]}
    last: dict[int, int] = {}
    for t, i in enumerate(run):
        for a in s.sources[i]:
            last[s.root[a]] = t
    lives = {v: (results[v], last[v] - 1) for v in values if v in results and last.get(v, -1) > results[v]}
    bytes_ = curve(len(run), ((s.saved_bytes[v], first, end) for v, (first, end) in lives.items()))
    stuck = curve(
        len(run), ((1, first, end) for v, (first, end) in lives.items() if not s.savable[v] or s.must_recompute[v])
    )
    heavy = [t for t, i in enumerate(run) if s.seconds[i] > 0 and not stuck[t]]
    edge = len(heavy) // 10
    limit = NARROW * min((bytes_[t] for t in heavy[edge : len(heavy) - edge] if bytes_[t]), default=0)
    crossing, alive, waiting = [], set(), sorted(lives, key=lambda v: (-lives[v][0], v))
    for t in (t for t in heavy if 0 < bytes_[t] <= limit):
        while waiting and lives[waiting[-1]][0] <= t:
            alive.add(waiting.pop())
        alive = {v for v in alive if lives[v][1] >= t}
        crossing.append(frozenset(alive))
    # Two neighbours with the same widest value are one place.
    return [
        c
        for k, c in enumerate(crossing)
        if not k
        or max(c, key=lambda v: (s.saved_bytes[v], v)) != max(crossing[k - 1], key=lambda v: (s.saved_bytes[v], v))
    ]


def boundaries(schedule: RematProblem) -> list[frozenset[int]]:
    """Sets of values to keep, from the shortest segments to the longest."""
    result = crossings(schedule)
    sets = [frozenset().union(*result[k - 1 :: k]) for k in STRIDES if len(result) >= 2 * k]
    return list(dict.fromkeys(sets))
