"""A lower bound of the time of every plan under a limit: what certifies how far the one that was found can be from the
optimum.

Let S be what is saved and m_t(S) the bytes alive at moment t of the step. For each t there is a linear function below
it,

    m_t(S) >= c_t + sum over v in S of w_tv,

made of what must be alive whatever S is (:func:`moments`); S saves nothing that the backward does not read, since
without that it would be no slower and no larger. A plan that fits has m_t(S) <= limit for all t, so for every choice of
prices p_t >= 0

    time(S) >= time(S) + sum_t p_t (m_t(S) - limit)
            >= min over S' of [time(S') + sum over v in S' of sum_t p_t w_tv] - sum_t p_t (limit - c_t).

The minimum is a minimum cut (:mod:`mindspeed_fx.passes.recompute.solve.min_cut`), solved exactly over all choices,
whatever their memory; so the last line is a lower bound of the time of every plan that fits, for any prices. The best
prices give the bound of the linear relaxation, since cuts are integral. They are looked for one moment after the other
(the slope of the bound in p_t is c_t + w_t(S') - limit) and the
best bound found is returned: fewer iterations make it weaker, never wrong. If c_t alone is above the limit nothing
    fits.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mindspeed_fx.graph.liveness import curve
from mindspeed_fx.passes.recompute.problem.remat_problem import RematProblem
from mindspeed_fx.passes.recompute.solve.min_cut import UNIT, Cuts


@dataclass(frozen=True)
class Moments:
    """The linear functions below the memory of a step, one for each moment: the nodes of the forward that run whatever
    is saved, then those of the backward."""

    certain: list[int]
    """c_t: bytes alive whatever is saved."""
    lives: dict[int, tuple[int, int, int]]
    """Value -> (w, first, last): when saved, w bytes more are alive from the first to the last of these moments."""
    parts: dict[int, list[tuple[int, int, int]]]
    """Value -> further such stretches."""
    fixed: list[tuple[int, int, int]] = field(default_factory=list)
    """What ``certain`` is made of, workspaces aside: (bytes, first, last moment)."""
    begin: list[int] = field(default_factory=list)
    """Of each node the first moment at which the backward's own nodes read its value; the number of moments where none
    does.
    """
    end: list[int] = field(default_factory=list)
    """And the last one; -1 where none does."""

    def at(self, t: int) -> dict[int, int]:
        """w_t: value -> bytes, where there are any."""
        results = {v: w for v, (w, first, last) in self.lives.items() if w and first <= t <= last}
        for v, stretches in self.parts.items():
            for w, first, last in stretches:
                if w and first <= t <= last:
                    results[v] = results.get(v, 0) + w
        return results

    def memory(self, saved: frozenset[int]) -> list[int]:
        """The linear functions at a choice."""
        stretches = [
            s
            for v in saved
            for s in ([self.lives[v]] if v in self.lives else []) + self.parts.get(v, [])
            if s[1] <= s[2]
        ]
        return [c + m for c, m in zip(self.certain, curve(len(self.certain), stretches))]


def moments(schedule: RematProblem) -> Moments:
    """What must be alive at each moment, and what saving adds.

    Forward: values that the caller gets are made whatever is saved; between maker and last reader among what makes
    them, memory is certain, and after it a saved value stays. Backward: a value is there from its first to its last
    reader among the nodes that run in the backward anyhow, saved or recomputed; before the first of them it is there
    when it is saved. A saved value that such a node does not read is there until the first such reader of anything
    computed from it.
    """
    s = schedule
    returned, gradients = {s.root[i] for i in s.returned}, {s.root[i] for i in s.gradients}
    runs = s.computing(s.returned)
    first = [i for i in s.forward if runs[i]]
    length, cut = len(first) + len(s.backward), len(first)
    results, done = [-1] * len(s.sources), [-1] * len(s.sources)
    for t, i in enumerate(first):
        results[i] = t
        for r in (s.root[i], *(s.root[a] for a in s.sources[i])):
            done[r] = t
    begin, end = [length] * len(s.sources), [-1] * len(s.sources)
    for t, i in enumerate(s.backward, cut):
        for r in {s.root[i], *(s.root[a] for a in s.sources[i])}:
            begin[r], end[r] = min(begin[r], t), t
    behind = set(s.backward)
    # The first moment at which something computed from a value is read in the backward.
    early = list(begin)
    for i in reversed(s.forward):
        for r in (s.root[i], *(s.root[a] for a in s.sources[i])):
            early[r] = min(early[r], early[i], early[s.root[i]])
    certain, lives, parts = [], {}, {}
    for i in s.forward:
        if s.root[i] != i or not s.saved_bytes[i] or s.is_input[i]:
            continue
        size, full = s.size[i], s.saved_bytes[i]
        if i in returned:
            certain.append((full, results[i], length - 1))
            continue
        extra = []
        if results[i] >= 0:  # made in any case
            certain.append((size, results[i], done[i]))
            extra = [(full - size, results[i], done[i])]
        start = done[i] + 1 if results[i] >= 0 else cut
        if end[i] >= 0:
            last = length - 1 if i in gradients else end[i]
            certain.append((size, begin[i], last))
            extra.append((full - size, begin[i], last))
            lives[i] = (full, start, begin[i] - 1)
        else:
            lives[i] = (full, start, min(early[i], length) - 1)
        parts[i] = [e for e in extra if e[0]]
    for i in s.backward:
        if s.root[i] == i and s.size[i] and i in behind:
            certain.append((s.size[i], begin[i], length - 1 if i in gradients else end[i]))
    alive = curve(length, certain)
    order = (*first, *s.backward)
    return Moments([a + s.workspace[i] for a, i in zip(alive, order)], lives, parts, certain, begin, end)


def least_seconds(schedule: RematProblem, cuts: Cuts, limit: int, rounds: int = 40) -> float | None:
    """A lower bound of :attr:`Plan.seconds` over all plans of at most ``limit`` bytes; None when it proves that there
    are none.

    Args:
        rounds: minimum cuts to spend on it.
    """
    rows = moments(schedule)
    if max(rows.certain, default=0) > limit:
        return None
    kept = {schedule.root[i] for i in schedule.returned}
    slack = UNIT * 2 * len(cuts.values)

    def cheapest(prices: dict[int, float]) -> tuple[frozenset[int], float]:
        """(the choice, the bound) at these prices."""
        price: dict[int, float] = {}
        for t, p in prices.items():
            for v, w in rows.at(t).items():
                price[v] = price.get(v, 0.0) + p * w
        saved, total = cuts.cheapest(lambda v: 0.0 if v in kept else price.get(v, 0.0))
        return saved, total - slack - sum(p * (limit - rows.certain[t]) for t, p in prices.items())

    prices: dict[int, float] = {}
    saved, best = cheapest(prices)
    best = max(0.0, best)
    while rounds > 0:
        over = rows.memory(saved)
        t = max(range(len(over)), key=over.__getitem__, default=-1)
        if t < 0 or over[t] <= limit:
            break
        base, others = prices.get(t, 0.0), {k: p for k, p in prices.items() if k != t}
        low, high = (base, over[t] - limit), None
        step = max(base, 1e-18)
        gained, bounds = best, {}
        # The bound is concave in this price: walk out until its slope turns, then halve.
        while rounds > 0:
            p = low[0] + step if high is None else (low[0] * high * 1.0) ** 0.5 if low[0] > 0 else high / 2
            result, value = cheapest({**others, t: p})
            rounds -= 1
            slope = rows.memory(result)[t] - limit
            bounds[p] = value
            if slope > 0:
                low = (p, slope)
                step *= 8
            else:
                high = p
            best = max(best, value)
            if high is not None and high <= low[0] * 1.05 + 1e-18:
                break
        p = max(bounds, key=bounds.__getitem__)
        prices = {**others, t: p}
        saved, _ = cheapest(prices)
        rounds -= 1
        if best <= gained * (1 + 1e-4):
            break
    return best
