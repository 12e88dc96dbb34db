"""The modelled step of one choice for every operator: what each rank does, added up by itself and not taken from the
solver, with the layers of a pipeline dealt to stages.
"""

from __future__ import annotations

from typing import Any

from mindspeed_fx.planning.search.problem import Node
from mindspeed_fx.planning.search.schedules import waiting_seconds
from mindspeed_fx.planning.search.solution import Solution, Unsayable
from mindspeed_fx.planning.search.stage_loads import (
    Load,
    balanced_sizes,
    counts_of,
    even_sizes,
    joined,
    rank_bytes,
    rank_counts,
)

PAYS = 0.015
"""What layers dealt by time must save of a step to be chosen: less is within what the prices know."""


def evaluate(program: Any, chosen: dict[Node, int], bound: float) -> Solution:
    """The modelled step of one choice.

    Args:
        program: of a layout (``solve.py``), priced.
        bound: no choice is faster.

    Raises:
        Unsayable: a value cannot go where it is wanted.
    """
    L, order = program.layout, program.order
    loads, strategies, moved = part_loads(program, chosen)
    even = even_sizes(len(order), L.pp * L.virtual)
    parts, stored = _step(program, loads, even)
    seconds, layers = sum(parts.values()), None
    first = seconds
    if L.pp > 1 and (sizes := balanced_sizes(L, order, loads, program.limit)) not in (None, even):
        other, held = _step(program, loads, sizes)
        fits = [sum(s.values()) <= program.limit * (1 + 1e-9) for s in (held, stored)]
        if fits[0] and (not fits[1] or sum(other.values()) < seconds * (1 - PAYS)):
            parts, stored, seconds, layers = other, held, sum(other.values()), tuple(sizes)
    widest = max(chosen, key=lambda n: program.price[n, chosen[n]].transient)
    prices = {n: program.price[n, i] for n, i in chosen.items()}
    return Solution(
        L, strategies, prices, moved, seconds, bound, sum(stored.values()), parts, stored, widest, layers, first
    )


def part_loads(program: Any, chosen: dict[Node, int]) -> tuple[dict[int, Load], dict, list]:
    """What one layer of each run and the ends of the model do, each operator's strategy, and what moves.

    Raises:
        Unsayable: a value cannot go where it is wanted.
    """
    loads = {part: Load() for part in program.part.values()}
    gathered: dict[int, float] = {}
    hide = {part: [0.0, 0.0] for part in loads}
    for n, i in chosen.items():
        p, again, part = program.price[n, i], program.recomputation.again(n), program.part[n]
        own = Load(p.forward, p.backward - p.weights, p.weights, p.moved, p.forward * again)
        own.update, own.state, own.kept, own.transient = p.update, p.state, p.kept * (not again), p.transient
        loads[part].add(own)
        gathered[part] = gathered.get(part, 0.0) + 2 * p.gathered
        hide[part][0] += p.gather - p.forward
        hide[part][1] += p.reduce - p.backward
    for part, load in loads.items():
        load.gathered, load.exposed = gathered.get(part, 0.0), sum(max(0.0, x) for x in hide[part])
    strategies = {n: program.choices[n][i] for n, i in chosen.items()}
    moved = []
    for move in program.moves:
        p = strategies[move.value.producer].outs[move.value.index]
        for t in dict.fromkeys(strategies[e.node].ins[e.argument] for e in move.readers):
            costs = program.move_costs(move, p, t, move.readers)
            if costs is None:
                raise Unsayable(f"{move.value.name} cannot go from {p} to {t}")
            forth, back, nbytes = costs
            kept, redo = program.recomputation.keeps(move, p, t, forth, nbytes)
            part, times = program.part_of(move)
            loads[part].add(Load(moved=forth + back, recompute=redo, kept=kept), times)
            moved.append((move, p, t, forth + back + redo, kept))
    return loads, strategies, moved


def _step(program: Any, loads: dict[int, Load], sizes: list[int]) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of a step by what takes them, on the rank with the most to do, and bytes of the fullest rank.

    Args:
        sizes: layers of each stage.
    """
    L = program.layout
    m = L.microbatches
    stages = counts_of(program.order, sizes)
    ranks = [joined(loads, mine) for mine in rank_counts(L, stages)]
    once = [load.exposed * (m if L.zero == "zero3" else 1) + load.update for load in ranks]
    fullest = max(range(L.pp), key=lambda r: m * ranks[r].steady + once[r])
    load, between = ranks[fullest], program.between_stages()
    waits = 0.0
    if L.pp > 1:
        waits = waiting_seconds(L, [joined(loads, mine).parts for mine in stages], load.steady)
    parts = {
        "compute": m * (load.forward + load.inputs + load.weights),
        "recompute": m * load.recompute,
        "collectives": m * load.moved + between,
        "exposed": load.exposed * (m if L.zero == "zero3" else 1),
        "update": load.update,
        "bubble": waits,
    }
    held = rank_bytes(L, program.order, loads, sizes)
    return parts, held[max(range(L.pp), key=lambda r: sum(held[r].values()))]
