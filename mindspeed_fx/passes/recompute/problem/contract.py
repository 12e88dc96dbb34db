"""A step without its views and without what it is given: neither takes time or fills memory, and about half of all
nodes are that.
"""

from __future__ import annotations

from typing import Sequence

from mindspeed_fx.passes.recompute.problem.remat_problem import RematProblem


def contract(
    schedule: RematProblem, unplanned: Sequence[float] | None = None
) -> tuple[RematProblem, list[int], list[float] | None]:
    """(the step with every reader of a view reading the value itself, the nodes that are left, ``unplanned`` of these).

    A value that only a view reads dies with the reader before; whoever reads the view keeps it alive as before.
    """
    s = schedule
    nodes = [i for i in range(len(s.sources)) if s.root[i] == i and not (s.is_input[i] and not s.saved_bytes[i])]
    number = {i: n for n, i in enumerate(nodes)}
    values = lambda row: sorted({number[s.root[i]] for i in row if s.root[i] in number})  # noqa: E731
    pick = lambda row: [row[i] for i in nodes]  # noqa: E731
    result = RematProblem(
        sources=[tuple(dict.fromkeys(number[s.root[a]] for a in s.sources[i] if s.root[a] in number)) for i in nodes],
        root=list(range(len(nodes))),
        size=pick(s.size),
        saved_bytes=pick(s.saved_bytes),
        seconds=pick(s.seconds),
        savable=pick(s.savable),
        must_recompute=pick(s.must_recompute),
        is_input=pick(s.is_input),
        backward=[number[i] for i in s.backward if i in number],
        needed=values(s.needed),
        returned=values(s.returned),
        gradients=values(s.gradients),
        maker={number[a]: number[b] for a, b in s.maker.items()},
        workspace=pick(s.workspace),
        save_seconds=pick(s.save_seconds),
        prepares=pick(s.prepares),
        run_seconds=pick(s.run_seconds),
    )
    return result, nodes, None if unplanned is None else pick(unplanned)
