"""Memory while a graph is reordered, with a promise: what is left can always still be run within the limit.

The promise is kept by an anchor, the order as given. ``profile[k]`` is the memory while the k-th task of that order
runs, if everything not yet issued ran in that order from now on. Issuing a task ahead of its place allocates its
buffers earlier (adds to the profile between now and its place) and frees earlier what it was the last to use
(subtracts). It is allowed only if the profile stays under the limit from now on. So the first task of the anchor that
is not yet issued is always allowed, and no choice can lead into a dead end.
"""

from __future__ import annotations

import numpy as np

from mindspeed_fx.passes.overlap.model.simulator import memory_curve
from mindspeed_fx.passes.overlap.model.tasks import TaskGraph


class Anchor:
    """Memory of a task graph that is issued in some order, anchored in the order as given; ``issued[i]`` once task i
    is.

    Args:
        limit: bytes that must never be exceeded; at least the peak of the order as given. None: no limit.
    """

    def __init__(self, graph: TaskGraph, limit: int | None):
        self.size, self.limit, self.first = len(graph), limit, 0
        self.issued = bytearray(self.size + 1)
        if limit is None:
            return
        self.profile = np.asarray(memory_curve(graph, range(self.size)), dtype=np.int64)
        if self.size and self.profile.max() > limit:
            raise ValueError(
                f"the limit of {limit} bytes is under the {int(self.profile.max())} bytes that the order as given needs"
            )
        self._seen = memoryview(self.profile)  # one number is read faster so
        self._bytes, self._made, self._uses, users = graph.buffer_users
        self._users = [list(u) for u in users]
        self._full = [-1] * self.size  # where memory was too full for a task when it was last asked for
        self._adds = [0] * self.size  # what it would have added there
        self._asked = [0] * self.size  # and when: how many tasks were issued then
        self._touched = [0] * len(users)  # when a buffer's user was last issued: others may free more since
        self._time = 0

    def allowed(self, i: int) -> bool:
        """May task ``i`` be issued now?"""
        if self.limit is None or i == self.first:
            return True
        result = self._made[i]
        if not result:
            return True
        now, full = self.first, self._full[i]
        if self._seen[now] + result > self.limit:  # while i runs, what it frees is still there
            return False
        if full >= now and self._seen[full] + self._adds[i] > self.limit:
            asked, touched = self._asked[i], self._touched
            if all(touched[n] <= asked for n in self._uses[i]):
                return False
        ahead = self.profile[now:i]
        highest = int(ahead.argmax())
        if self._seen[now + highest] + result <= self.limit:
            return True
        freed = self._freed(i)
        self._adds[i] = result
        if freed:
            ahead = ahead + result
            for low, high, size in freed:
                ahead[max(low - now, 0) : max(high - now, 0)] -= size
            highest = int(ahead.argmax())
            if ahead[highest] <= self.limit:
                return True
            self._adds[i] = int(ahead[highest] - self.profile[now + highest])
        self._full[i], self._asked[i] = now + highest, self._time
        return False

    def issue(self, i: int) -> None:
        """Task ``i`` is issued now."""
        if self.limit is not None:
            freed = self._freed(i)
            if i > self.first:
                if self._made[i]:
                    self.profile[self.first : i] += self._made[i]
            for low, high, size in freed:
                self.profile[max(low, self.first) : high] -= size
            self._time += 1
            for n in self._uses[i]:
                self._touched[n] = self._time
        self.issued[i] = 1
        while self.issued[self.first]:  # there is a zero at the end
            self.first += 1

    def _freed(self, i: int) -> list[tuple[int, int, int]]:
        """Stretches [low, high) of the profile that lose bytes because ``i`` is done early."""
        freed = []
        for n in self._uses[i]:
            users = self._users[n]
            while users and self.issued[users[-1]]:
                users.pop()
            if users and users[-1] == i:
                before = len(users) - 2
                while before >= 0 and self.issued[users[before]]:
                    before -= 1
                low = users[before] + 1 if before >= 0 else self.first
                if low <= i:
                    freed.append((low, i + 1, self._bytes[n]))
        return freed
