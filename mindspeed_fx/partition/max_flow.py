"""Maximum flow that can go on: capacities may rise between two solutions, and the flow found so far stays.

A rising price per saved byte raises capacities alone, so a whole hull of cuts costs little more than its last one.
Capacities are integers, so that all ranks find the same cut. Dinic's algorithm (1970).
"""

from __future__ import annotations

ENDLESS = 1 << 100
"""Capacity of an edge that no cut may hold."""

SOURCE, SINK = 0, 1


class Network:
    """A flow network over vertices 0 (source), 1 (sink), 2, 3, ..."""

    def __init__(self, vertices: int):
        self.edges: list[list[int]] = [[] for _ in range(vertices)]
        self.to: list[int] = []
        self.room: list[int] = []
        """What an edge can still take; edge e ^ 1 is its reverse."""

    def add(self, a: int, b: int, capacity: int) -> int:
        """A new edge; returns its number."""
        number = len(self.to)
        self.to += [b, a]
        self.room += [capacity, 0]
        self.edges[a].append(number)
        self.edges[b].append(number + 1)
        return number

    def solve(self) -> int:
        """Adds flow until there is no way left; returns what was added."""
        total = 0
        while (level := self._levels()) is not None:
            total += self._blocking(level)
        return total

    def sink_side(self) -> bytearray:
        """After :meth:`solve`: 1 for the vertices that can still reach the sink. The smallest sink side of a minimum
        cut.
        """
        result = bytearray(len(self.edges))
        result[SINK], todo, to, room = 1, [SINK], self.to, self.room
        while todo:
            for e in self.edges[todo.pop()]:
                if room[e ^ 1] and not result[to[e]]:
                    result[to[e]] = 1
                    todo.append(to[e])
        return result

    def _levels(self) -> list[int] | None:
        """Distance to the sink of every vertex; None when the source cannot reach it."""
        level, to, room, edges = [-1] * len(self.edges), self.to, self.room, self.edges
        level[SINK], front, far = 0, [SINK], 0
        while front and level[SOURCE] < 0:
            far += 1
            reached = []
            for b in front:
                for e in edges[b]:
                    a = to[e]
                    if level[a] < 0 and room[e ^ 1]:
                        level[a] = far
                        reached.append(a)
            front = reached
        return level if level[SOURCE] >= 0 else None

    def _blocking(self, level: list[int]) -> int:
        """Flow along shortest ways until none is left."""
        to, room, edges = self.to, self.room, self.edges
        at, path, total, vertex = [0] * len(edges), [], 0, SOURCE
        while True:
            if vertex == SINK:
                flow = min(room[e] for e in path)
                total += flow
                first = len(path)
                for k in range(len(path) - 1, -1, -1):
                    e = path[k]
                    room[e] -= flow
                    room[e ^ 1] += flow
                    if not room[e]:
                        first = k
                vertex = to[path[first] ^ 1]
                del path[first:]
                continue
            out, k, below = edges[vertex], at[vertex], level[vertex] - 1
            while k < len(out) and not (room[out[k]] and level[to[out[k]]] == below):
                k += 1
            at[vertex] = k
            if k < len(out):
                path.append(out[k])
                vertex = to[out[k]]
            elif path:
                level[vertex] = -1
                e = path.pop()
                vertex = to[e ^ 1]
                at[vertex] += 1
            else:
                return total
