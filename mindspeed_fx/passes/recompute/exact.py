"""The lower bound of small steps by integer programming: the linear functions of :mod:`bound`, solved to the end by HiGHS (scipy).

Binary s_v and r_v say that value v is saved, or made again. Times, and who needs whom, are those of the minimum cut; the memory at moment t is at least
c_t + sum of w_tv s_v, which must fit at every moment at once. The optimum, or what the solver has proved when its work is over, is a lower bound of the time of every plan
that fits: at least that of :mod:`bound`, which is this program's relaxation, and of no use for a large step.
"""

from __future__ import annotations

import math

from mindspeed_fx.passes.recompute.bound import moments
from mindspeed_fx.passes.recompute.schedule import Schedule

SCALE = 1e6
"""Microseconds, and parts of the limit: numbers near one for the solver."""

SAFE = 1e-6
"""What the solver's tolerances may take from a bound, of the bound."""


def exact_seconds(schedule: Schedule, limit: int, nodes: int = 1000, clock: float | None = None) -> float | None:
    """A lower bound of :attr:`Plan.seconds` over all plans of at most ``limit`` bytes; None when it proves that there are none.

    Args:
        nodes: of the solver's search tree.
        clock: seconds that the solver may take; None: as many as the nodes need. With it two runs may find different bounds.

    Raises:
        ImportError: without scipy.
    """
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    s, rows = schedule, moments(schedule)
    if max(rows.certain, default=0) > limit:
        return None
    count, extra = len(s.values), s.extra
    if not count:
        return 0.0
    save = {v: n for n, v in enumerate(s.values)}
    make = {v: count + n for n, v in enumerate(s.values)}
    upper, cost = np.ones(2 * count), np.zeros(2 * count)
    entries: list[tuple[int, int, float]] = []
    least: list[float] = []

    def at_least(parts: list[tuple[int, float]], low: float) -> None:
        entries.extend((len(least), column, factor) for column, factor in parts)
        least.append(low)

    needed, kept = {s.root[i] for i in s.needed}, {s.root[i] for i in s.returned}
    for v in s.values:
        if not s.savable[v] or s.forced[v]:
            upper[save[v]] = 0
        if extra[v] == math.inf:
            upper[make[v]] = 0
        cost[save[v]], cost[make[v]] = s.keep[v] * SCALE, 0.0 if extra[v] == math.inf else extra[v] * SCALE
        if v in needed:
            at_least([(save[v], 1), (make[v], 1)], 1)
        for a in s.reads(v):
            if a in save:
                at_least([(save[a], 1), (make[a], 1), (make[v], -1)], 0)
    for t, certain in enumerate(rows.certain):
        if parts := [(save[v], -w / limit) for v, w in rows.at(t).items() if v in save and v not in kept]:
            at_least(parts, (certain - limit) / limit - 1e-9)
    i, j, x = zip(*entries) if entries else ((0,), (0,), (0.0,))
    matrix = coo_array((x, (i, j)), shape=(max(1, len(least)), 2 * count)).tocsr()
    options = {"node_limit": nodes, **({"time_limit": clock} if clock else {})}
    found = milp(cost, integrality=np.ones(2 * count), bounds=Bounds(0, upper), constraints=LinearConstraint(matrix, np.array(least or [0.0])), options=options)
    if found.status == 2:
        return None
    proved = found.mip_dual_bound if found.mip_dual_bound is not None and math.isfinite(found.mip_dual_bound) else 0.0
    return max(0.0, proved) * (1 - SAFE) / SCALE
