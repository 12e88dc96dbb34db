"""A step without its views and without what it is given: neither takes time or fills memory, and about half of all
nodes are that.
"""

from __future__ import annotations

from typing import Sequence

from mindspeed_fx.passes.recompute.problem.remat_problem import Schedule


def contract(
    schedule: Schedule, unplanned: Sequence[float] | None = None
) -> tuple[Schedule, list[int], list[float] | None]:
    """(the step with every reader of a view reading the value itself, the nodes that are left, ``unplanned`` of these).

    A value that only a view reads dies with the reader before; whoever reads the view keeps it alive as before.
    """
    s = schedule
    nodes = [i for i in range(len(s.sources)) if s.root[i] == i and not (s.given[i] and not s.full[i])]
    number = {i: n for n, i in enumerate(nodes)}
    values = lambda row: sorted({number[s.root[i]] for i in row if s.root[i] in number})  # noqa: E731
    pick = lambda row: [row[i] for i in nodes]  # noqa: E731
    made = Schedule(
        sources=[tuple(dict.fromkeys(number[s.root[a]] for a in s.sources[i] if s.root[a] in number)) for i in nodes],
        root=list(range(len(nodes))),
        size=pick(s.size),
        full=pick(s.full),
        seconds=pick(s.seconds),
        savable=pick(s.savable),
        forced=pick(s.forced),
        given=pick(s.given),
        backward=[number[i] for i in s.backward if i in number],
        needed=values(s.needed),
        returned=values(s.returned),
        gradients=values(s.gradients),
        maker={number[a]: number[b] for a, b in s.maker.items()},
        workspace=pick(s.workspace),
        keep=pick(s.keep),
        prepares=pick(s.prepares),
        takes=pick(s.takes),
    )
    return made, nodes, None if unplanned is None else pick(unplanned)
