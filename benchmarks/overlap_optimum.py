"""The scheduler against the proven optimum on small random graphs: CP-SAT without memory, HiGHS with a memory limit.

    python -m benchmarks.overlap_optimum --graphs 200
    python -m benchmarks.overlap_optimum --graphs 200 --memory

Each graph has compute tasks, transfers on one or two links, and waits. The optimum is over all schedules with one
compute stream and transfers one at a time per link; without ``--memory`` memory does not count. With it the limit is
the peak of the order as given, as it is by default. A graph whose optimum is not proven within the time limit is left
out and counted.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

from mindspeed_fx.passes.overlap.model.simulator import simulate
from mindspeed_fx.passes.overlap.model.tasks import COMPUTE, Buffer, Task, TaskGraph
from mindspeed_fx.passes.overlap.scheduler.local_search import schedule


def random_graph(seed: int, size: int) -> TaskGraph:
    """A graph of about ``size`` tasks: layers of compute with gathers before, reductions after, and free side work."""
    dice = random.Random(seed)
    links = ["link0", "link1"][: dice.choice((1, 2))]
    share = dice.choice((0.2, 0.35, 0.5))
    reach = dice.choice((3, 6, 12))
    tasks: list[Task] = []
    buffers: list[Buffer] = []
    results: list[int] = []  # tasks whose result compute may read
    while len(tasks) < size:
        recent = results[-reach:]
        needs = tuple(sorted(dice.sample(recent, min(len(recent), dice.choice((0, 1, 1, 2))))))
        seconds = dice.choice((1.0, 2.0, 3.0, 5.0, 8.0)) * dice.choice((1.0, 1.0, 0.5))
        here = len(tasks)
        if dice.random() < share:
            link = dice.choice(links)
            tasks.append(Task(f"comm{here}", seconds, link, needs, link, "all_gather"))
            tasks.append(Task(f"wait{here}", 0.0, COMPUTE, (here,), kind="wait"))
            results.append(here + 1)
        else:
            tasks.append(Task(f"work{here}", seconds, COMPUTE, needs))
            results.append(here)
        readers = [here + 1] if len(tasks) - here == 2 else []
        buffers.append(Buffer(here, dice.randrange(1, 9), tuple(readers)))
    graph = TaskGraph(tasks)
    outputs = []
    for b in buffers:  # a buffer is read by whoever needs its maker or its wait
        readers = set(graph.users[b.made_by])
        for r in list(readers):
            if tasks[r].kind == "wait":
                readers |= set(graph.users[r])
        outputs.append(Buffer(b.made_by, b.bytes, tuple(sorted(readers)), kept=not readers))
    return TaskGraph(tasks, outputs)


def optimum(graph: TaskGraph, seconds: float) -> float | None:
    """Proven shortest step time, or None when the solver did not prove it in ``seconds``."""
    from ortools.sat.python import cp_model

    scale = 2  # every time is a multiple of a half
    model = cp_model.CpModel()
    horizon = int(sum(t.seconds for t in graph.tasks) * scale)
    start, machines, end = [], {}, model.new_int_var(0, horizon, "end")
    for task in graph.tasks:
        length = int(task.seconds * scale)
        begin = model.new_int_var(0, horizon, task.name)
        start.append(begin)
        machines.setdefault(task.resource, []).append(
            model.new_fixed_size_interval_var(begin, length, task.name + "_run")
        )
        for need in task.needs:
            model.add(begin >= start[need] + int(graph.tasks[need].seconds * scale))
        model.add(end >= begin + length)
    solver, status = _solved(model, machines, end, seconds)
    return solver.objective_value / scale if status == cp_model.OPTIMAL else None


def _solved(model: Any, machines: dict[str, list], end: Any, seconds: float) -> tuple[Any, Any]:
    """CP-SAT's solver, and how it ended, for the least ``end`` with intervals of one machine apart."""
    from ortools.sat.python import cp_model

    for intervals in machines.values():
        model.add_no_overlap(intervals)
    model.minimize(end)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    return solver, solver.solve(model)


def proven_bound(graph: TaskGraph, seconds: float) -> float:
    """A bound of the step from what CP-SAT proves of each stretch between points that no transfer passes, or the
    highest other bound.

    What needs one point and is needed by the next runs between them, so the stretches' bounds add up, as in
    bounds.segments; here they are CP-SAT's, for start times of their own, times rounded down, without memory. Each kind
    of stretch is solved once, for at most ``seconds``.
    """
    from ortools.sat.python import cp_model

    from mindspeed_fx.passes.overlap.model import bounds

    tasks, scale, known = graph.tasks, 1e8, {}
    ends = [-1, *bounds.points(graph), len(graph)]
    total = 0.0
    for first, last in zip(ends, ends[1:]):
        after: set[int] = set()
        for i in range(first + 1, last):
            if first < 0 or first in tasks[i].needs or not after.isdisjoint(tasks[i].needs):
                after.add(i)
        inside: dict[int, int] = {}
        for i in sorted(after, reverse=True):
            if last == len(graph) or last in graph.users[i] or any(u in inside for u in graph.users[i]):
                inside[i] = 0
        inside = {i: k for k, i in enumerate(sorted(inside))}
        key = tuple(
            (tasks[i].seconds, tasks[i].resource, tuple(inside[n] for n in tasks[i].needs if n in inside))
            for i in inside
        )
        if key not in known:
            model, start, machines = cp_model.CpModel(), {}, {}
            horizon = int(sum(tasks[i].seconds for i in inside) * scale) + 1
            end = model.new_int_var(0, horizon, "end")
            for i in inside:
                length = int(tasks[i].seconds * scale)
                start[i] = model.new_int_var(0, horizon, tasks[i].name)
                if length:
                    machines.setdefault(tasks[i].resource, []).append(
                        model.new_fixed_size_interval_var(start[i], length, f"run_{i}")
                    )
                for n in tasks[i].needs:
                    if n in inside:
                        model.add(start[i] >= start[n] + int(tasks[n].seconds * scale))
                model.add(end >= start[i] + length)
            solver, _ = _solved(model, machines, end, seconds)
            known[key] = max(solver.best_objective_bound / scale, 0.0)
        total += known[key] + (tasks[last].seconds if last < len(graph) else 0.0)
    return max(total, graph.highest_bound)


def optimum_within(
    graph: TaskGraph, limit: int, seconds: float | None = None, known: float | None = None, nodes: int | None = None
) -> float | None:
    """Proven shortest step of all orders whose peak is at most ``limit`` bytes, under the simulator's rules (HiGHS), or
    None.

    Args:
        seconds, nodes: what the solver may take, by the clock and of its search tree; the latter does not depend on how
            busy the machine is.
        known: a step that some such order has: longer ones are not looked at.

    x[i, k] is 1 when task i is issued k-th; clock[k] is when the compute stream is done with the first k + 1 tasks.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_matrix

    tasks, n = graph.tasks, len(graph)
    moves = graph.transfers
    pairs = [(a, b) for a in moves for b in moves if a < b and tasks[a].resource == tasks[b].resource]
    kept_while = [(b, k) for b in range(len(graph.buffers)) for k in range(n)]
    index = {
        name: at
        for at, name in enumerate(
            [("x", i, k) for i in range(n) for k in range(n)]
            + [("first", *p) for p in pairs]
            + [("live", *p) for p in kept_while]
            + [("clock", k) for k in range(n)]
            + [("start", i) for i in moves]
            + ["step"]
        )
    }
    big = sum(t.seconds for t in tasks) if known is None else known
    rows: list[tuple[dict, float]] = []  # sum of coefficient * variable >= right-hand side

    def at_least(terms: list[tuple[float, object]], bound: float) -> None:
        row: dict[int, float] = {}
        for factor, name in terms:
            row[index[name]] = row.get(index[name], 0.0) + factor
        rows.append((row, bound))

    def issued(i: int, before: int) -> list[tuple[float, object]]:
        return [(1.0, ("x", i, k)) for k in range(before)]

    def minus(terms: list[tuple[float, object]]) -> list[tuple[float, object]]:
        return [(-f, name) for f, name in terms]

    for i in range(n):
        at_least([(1.0, ("x", i, k)) for k in range(n)], 1)
        at_least([(-1.0, ("x", i, k)) for k in range(n)], -1)
        at_least([(1.0, ("x", k, i)) for k in range(n)], 1)
        for need in tasks[i].needs:
            for k in range(n):
                at_least(issued(need, k) + minus(issued(i, k + 1)), 0)
    for k in range(n):
        before = [(-1.0, ("clock", k - 1))] if k else []
        at_least(
            [
                (1.0, ("clock", k)),
                *before,
                *((-tasks[i].seconds, ("x", i, k)) for i in range(n) if tasks[i].resource == COMPUTE),
            ],
            0,
        )
        for i in range(n):
            if tasks[i].resource != COMPUTE:
                at_least([(1.0, ("start", i)), *before, (-big, ("x", i, k))], -big)
                continue
            for need in tasks[i].needs:
                if tasks[need].resource != COMPUTE:
                    at_least(
                        [(1.0, ("clock", k)), (-1.0, ("start", need)), (-big, ("x", i, k))],
                        tasks[need].seconds + tasks[i].seconds - big,
                    )
    for i in moves:
        at_least([(1.0, "step"), (-1.0, ("start", i))], tasks[i].seconds)
        for need in tasks[i].needs:
            if tasks[need].resource != COMPUTE:
                at_least([(1.0, ("start", i)), (-1.0, ("start", need))], tasks[need].seconds)
    at_least([(1.0, "step"), (-1.0, ("clock", n - 1))], 0)
    place = lambda i: [(float(k), ("x", i, k)) for k in range(n)]
    for a, b in pairs:
        at_least([*place(b), *minus(place(a)), (-float(n), ("first", a, b))], 1 - n)
        at_least([*place(a), *minus(place(b)), (float(n), ("first", a, b))], 1)
        at_least([(1.0, ("start", b)), (-1.0, ("start", a)), (-big, ("first", a, b))], tasks[a].seconds - big)
        at_least([(1.0, ("start", a)), (-1.0, ("start", b)), (big, ("first", a, b))], tasks[b].seconds)
    for n_, b in enumerate(graph.buffers):
        for k in range(n):
            result = issued(b.made_by, k + 1) if b.made_by >= 0 else []
            existing = 0.0 if b.made_by >= 0 else 1.0
            users = {*b.users, *([b.made_by] if b.made_by >= 0 else [])}
            for u in [None] if b.kept else users:
                at_least([(1.0, ("live", n_, k)), *minus(result), *(issued(u, k) if u is not None else [])], existing)
    for k in range(n):
        at_least([(-float(b.bytes), ("live", m, k)) for m, b in enumerate(graph.buffers)], -float(limit))
    upper = [1.0 if isinstance(name, tuple) and name[0] in ("x", "first", "live") else big for name in index]
    whole = [1 if isinstance(name, tuple) and name[0] in ("x", "first") else 0 for name in index]
    matrix = coo_matrix(
        (
            [f for r, _ in rows for f in r.values()],
            ([i for i, (r, _) in enumerate(rows) for _ in r], [c for r, _ in rows for c in r]),
        ),
        shape=(len(rows), len(index)),
    )
    goal = [0.0] * len(index)
    goal[index["step"]] = 1.0
    hit = milp(
        goal,
        constraints=LinearConstraint(matrix.tocsr(), [low for _, low in rows]),
        integrality=whole,
        bounds=Bounds([0.0] * len(index), upper),
        options={
            "mip_rel_gap": 0.0,
            **({} if seconds is None else {"time_limit": seconds}),
            **({} if nodes is None else {"node_limit": nodes}),
        },
    )
    return float(hit.fun) if hit.status == 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--work", type=int, default=120_000)
    parser.add_argument("--limit", type=float, default=20.0, help="seconds for one proof")
    parser.add_argument(
        "--memory",
        action="store_true",
        help="with the peak of the order as given as limit, proven by HiGHS, on smaller graphs",
    )
    args = parser.parse_args()
    ratios, unproven, ours_time, proof_time, worst, plain = [], 0, 0.0, 0.0, (0.0, -1), []
    for seed in range(args.first, args.first + args.graphs):
        graph = random_graph(seed, size=6 + seed % 5 if args.memory else 12 + seed % 29)
        allowance = 0 if args.memory else None
        begin = time.perf_counter()
        ours = schedule(graph, allowance=allowance, work=args.work).seconds
        middle = time.perf_counter()
        best = optimum_within(graph, simulate(graph).peak, args.limit) if args.memory else optimum(graph, args.limit)
        ours_time, proof_time = ours_time + middle - begin, proof_time + time.perf_counter() - middle
        if best is None:
            unproven += 1
            continue
        ratios.append(ours / best)
        plain.append(schedule(graph, allowance=allowance, work=0).seconds / best)
        worst = max(worst, (ours / best, seed))
    within = " within memory" if args.memory else ""
    sizes = "6 to 12" if args.memory else "12 to 41"
    print(
        f"{len(ratios)} graphs of {sizes} tasks with a proven optimum{within}, {unproven} without a proof in "
        f"{args.limit:.0f} s"
    )
    print(
        f"ours / optimum: mean {statistics.mean(ratios):.4f}, worst {worst[0]:.4f} (graph {worst[1]}), exactly optimal "
        f"{sum(r < 1 + 1e-9 for r in ratios)}"
    )
    print(f"first list schedule alone: mean {statistics.mean(plain):.4f}, worst {max(plain):.4f}")
    print(f"time: ours {ours_time:.1f} s, proofs {proof_time:.1f} s")


if __name__ == "__main__":
    main()
