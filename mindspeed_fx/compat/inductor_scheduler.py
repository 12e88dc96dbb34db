"""The order of Inductor's loops, and where they write: part of :mod:`mindspeed_fx.compat`."""

from __future__ import annotations

import copy
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


@functools.cache
def keep_targets_of_writes() -> None:
    """Inductor (2.11 to 2.14) remembers the tensor of a write in place, not its memory. Where a later write of the
    whole (``z[:, columns] = 0; z[mask] = 1``) gives the tensor other memory, the earlier one went there, too: lost, or
    behind what it should come before.
    """
    from torch._inductor.ir import MutationLayoutSHOULDREMOVE

    init = MutationLayoutSHOULDREMOVE.__init__

    @functools.wraps(init)
    def __init__(self: Any, target: Any) -> None:
        init(self, target)
        self.target = _with_its_memory(target)

    MutationLayoutSHOULDREMOVE.__init__ = __init__


def _with_its_memory(tensor: Any) -> Any:
    """``tensor``, a box or a view of one, with boxes of its own around the buffer that it has now."""
    from torch._inductor.ir import BaseView, MutableBox

    if not isinstance(tensor, (BaseView, MutableBox)):
        return tensor
    result = copy.copy(tensor)
    object.__setattr__(result, "data", _with_its_memory(tensor.data))  # views are frozen
    return result


@functools.cache
def split_equal_loops_alone() -> None:
    """Inductor (2.11 to 2.14) fuses loops of as many steps for the CPU, and ends in an assertion where it then splits
    one of 64 by 96 and one of 96 by 64 because an index is divided. Splitting saves time alone; such loops stay.
    """
    from torch._inductor import ir
    from torch._inductor.codegen.cpp import CppScheduling

    split = CppScheduling.try_loop_split

    @functools.wraps(split)
    def try_loop_split(self: Any, nodes: Any) -> Any:
        loops = (n.node.get_default_sizes_body()[0][0] for n in nodes if isinstance(n.node, ir.ComputedBuffer))
        return split(self, nodes) if len({tuple(sizes) for sizes in loops}) <= 1 else nodes

    CppScheduling.try_loop_split = try_loop_split
