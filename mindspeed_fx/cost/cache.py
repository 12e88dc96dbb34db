"""What the last-level cache still has when a kernel reads: tensors, least recently used first out.

Large caches matter to chains of small kernels: Ascend 910B has 192 MiB, more than most activations of a layer. Results
are written through, so only reads gain. A tensor is there whole or not at all. Devices without a rate for their cache
(``Hardware.cache_bandwidth``) have none here.
"""

from __future__ import annotations

from typing import Any, Callable

from mindspeed_fx.cost.device import Hardware
from mindspeed_fx.cost.read import Call


class Cache:
    """The cache of one device while a graph runs."""

    def __init__(self, hw: Hardware):
        self.room = int(hw.cache) if hw.cache and hw.cache_bandwidth else 0
        self.held: dict[str, int] = {}
        self.used = 0

    def touch(self, calls: list[Call], value: Callable[[Any], Any]) -> int:
        """Bytes that the kernel of ``calls`` reads from the cache; afterwards its inputs and results are there.

        Args:
            value: size -> number.
        """
        if not self.room:
            return 0
        writes, held, result = [s for c in calls for s in c.writes], self.held, 0
        output = {s.key for s in writes}
        inputs = {(s.key, s.shape): s for c in calls for s in c.reads if s.key not in output}
        touched = [(s.key, value(s.bytes)) for s in inputs.values()]
        for key, n in touched:
            if key in held:
                result += n
        for key, n in touched:
            self._hold(key, max(n, held.get(key, 0)))
        for s in writes:
            self._hold(s.key, max(value(s.bytes), held.get(s.key, 0)))
        return result

    def _hold(self, key: str, count: int) -> None:
        self.used += count - self.held.pop(key, 0)
        self.held[key] = count
        while self.used > self.room:
            oldest = next(iter(self.held))
            self.used -= self.held.pop(oldest)
