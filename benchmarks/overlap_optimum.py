"""The scheduler against the proven optimum (CP-SAT) on small random graphs.

    python benchmarks/overlap_optimum.py --graphs 200

Each graph has compute tasks, transfers on one or two links, and waits. The optimum is over all schedules with one compute
stream and transfers one at a time per link; memory does not count here. A graph whose optimum is not proven within the
time limit is left out and counted.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from mindspeed_fx.passes.overlap.improve import schedule
from mindspeed_fx.passes.overlap.tasks import COMPUTE, Buffer, Task, TaskGraph


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
    made = []
    for b in buffers:  # a buffer is read by whoever needs its maker or its wait
        readers = set(graph.users[b.made_by])
        for r in list(readers):
            if tasks[r].kind == "wait":
                readers |= set(graph.users[r])
        made.append(Buffer(b.made_by, b.bytes, tuple(sorted(readers)), kept=not readers))
    return TaskGraph(tasks, made)


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
        machines.setdefault(task.resource, []).append(model.new_fixed_size_interval_var(begin, length, task.name + "_run"))
        for need in task.needs:
            model.add(begin >= start[need] + int(graph.tasks[need].seconds * scale))
        model.add(end >= begin + length)
    for intervals in machines.values():
        model.add_no_overlap(intervals)
    model.minimize(end)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    return solver.objective_value / scale if solver.solve(model) == cp_model.OPTIMAL else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--work", type=int, default=120_000)
    parser.add_argument("--limit", type=float, default=20.0, help="seconds for one proof")
    given = parser.parse_args()
    ratios, unproven, ours_time, proof_time, worst, plain = [], 0, 0.0, 0.0, (0.0, -1), []
    for seed in range(given.first, given.first + given.graphs):
        graph = random_graph(seed, size=12 + seed % 29)
        begin = time.perf_counter()
        ours = schedule(graph, allowance=None, work=given.work).seconds
        middle = time.perf_counter()
        best = optimum(graph, given.limit)
        ours_time, proof_time = ours_time + middle - begin, proof_time + time.perf_counter() - middle
        if best is None:
            unproven += 1
            continue
        ratios.append(ours / best)
        plain.append(schedule(graph, allowance=None, work=0).seconds / best)
        worst = max(worst, (ours / best, seed))
    print(f"{len(ratios)} graphs of 12 to 41 tasks with a proven optimum, {unproven} without a proof in {given.limit:.0f} s")
    print(f"ours / optimum: mean {statistics.mean(ratios):.4f}, worst {worst[0]:.4f} (graph {worst[1]}), exactly optimal {sum(r < 1 + 1e-9 for r in ratios)}")
    print(f"first list schedule alone: mean {statistics.mean(plain):.4f}, worst {max(plain):.4f}")
    print(f"time: ours {ours_time:.1f} s, proofs {proof_time:.1f} s")


if __name__ == "__main__":
    main()
