"""Beam search over orders of a small task graph under a memory limit.

List scheduling under a limit sees one step ahead, and a task that takes memory now may keep a better one from running
later. Here many partial orders grow side by side, one task at a time; of those that issued the same tasks the better
ones stay, by a lower bound of the step that each can still reach. A partial order that memory brings to a dead end
falls out.
"""

from __future__ import annotations

from typing import Sequence

from mindspeed_fx.passes.overlap.model.tasks import COMPUTE, TaskGraph

_SAME = 3  # partial orders kept that issued the same tasks (as in 2026-11-21-overlap_optimum.txt, --memory)


def beam(graph: TaskGraph, limit: int, width: int) -> list[int] | None:
    """An order whose peak is at most ``limit`` bytes; None when none of ``width`` partial orders came through."""
    tasks, alap, size = graph.tasks, graph.alap_lengths, len(graph)
    links = {link: k for k, link in enumerate(graph.links)}
    needs = [_bits(t.needs) for t in tasks]
    results, readers, frees = [0] * size, [], [[] for _ in range(size)]
    existing = 0
    for n, b in enumerate(graph.buffers):
        if b.made_by >= 0:
            results[b.made_by] += b.bytes
        else:
            existing += b.bytes
        readers.append(_bits({b.made_by, *b.users} - {-1}))
        for u in {b.made_by, *b.users} - {-1}:
            if not b.kept:
                frees[u].append(n)
    work = [sum(t.seconds for t in tasks if t.resource == COMPUTE)] + [
        sum(t.seconds for t in tasks if t.resource == link) for link in links
    ]
    # issued, bytes live, clock, when each link is free, ends of transfers, work left, order
    states = [(0, existing, 0.0, (0.0,) * len(links), {}, tuple(work), None)]
    for _ in range(size):
        grown: dict[int, list[tuple]] = {}
        for issued, live, clock, free, ends, remaining, order in states:
            for i in range(size):
                if issued >> i & 1 or needs[i] & ~issued or live + results[i] > limit:
                    continue
                task, now = tasks[i], issued | 1 << i
                ready = max([clock, *(ends[n] for n in task.needs if n in ends)])
                if task.resource == COMPUTE:
                    then, freed, done = ready + task.seconds, free, ends
                    remain = (remaining[0] - task.seconds, *remaining[1:])
                else:
                    k = links[task.resource]
                    end = max(ready, free[k]) + task.seconds
                    then, freed, done = clock, (*free[:k], end, *free[k + 1 :]), {**ends, i: end}
                    remain = (*remaining[: k + 1], remaining[k + 1] - task.seconds, *remaining[k + 2 :])
                least = max(
                    [
                        then + remain[0],
                        *(max(f, then if r else 0.0) + r for f, r in zip(freed, remain[1:])),
                        *done.values(),
                    ]
                )
                for u in range(size):
                    if not now >> u & 1 and not needs[u] & ~now:
                        least = max(least, max([then, *(done[n] for n in tasks[u].needs if n in done)]) + alap[u])
                after = live + results[i] - sum(graph.buffers[n].bytes for n in frees[i] if not readers[n] & ~now)
                grown.setdefault(now, []).append(
                    (least, then, sum(freed), len(grown), (now, after, then, freed, done, remain, (i, order)))
                )
        chosen = [s for same in grown.values() for s in sorted(same, key=lambda s: s[:3])[:_SAME]]
        states = [s[4] for s in sorted(chosen, key=lambda s: s[:4])[:width]]
        if not states:
            return None
    matches, order = [], min(states, key=lambda s: max([s[2], *s[4].values()]))[6]
    while order is not None:
        matches.append(order[0])
        order = order[1]
    return matches[::-1]


def _bits(items: Sequence[int]) -> int:
    result = 0
    for i in items:
        result |= 1 << i
    return result
