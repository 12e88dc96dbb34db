"""The order of Inductor's loops: part of :mod:`mindspeed_fx.compat`."""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def keep_writes_before_reads() -> None:
    """Inductor (2.11 to 2.14) forgets that a loop reads what an earlier one has written in place (a scatter into zeros)
    when it makes the loop anew to fuse it for the CPU: the loop then ran before what it reads was written.
    """
    from torch._inductor.scheduler import SchedulerNode

    recompute = SchedulerNode.recompute_size_and_body

    @functools.wraps(recompute)
    def recompute_size_and_body(self: Any, *args: Any, **kwargs: Any) -> None:
        recompute(self, *args, **kwargs)
        self.set_read_writes(self.read_writes.rename(self.mutation_renames))

    SchedulerNode.recompute_size_and_body = recompute_size_and_body
