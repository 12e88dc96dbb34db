"""Joint graph -> forward and backward, by torch's min-cut with what it does not know filled in.

An operator that will be inlined anyway is inlined before the cut, so that the min-cut sees the pointwise work and the
reductions it is made of and can save or recompute each; an operator with a kernel of its own stays whole and is saved.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence

import torch.fx as fx

from mindspeed_fx import compat


def cut(gm: fx.GraphModule, inputs: Sequence[Any], memory_budget: float | None, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward of a joint graph.

    Args:
        memory_budget: fraction in (0, 1] of the bytes that saving all activations needs; None lets the min-cut decide.
        kwargs: what AOTAutograd hands to a partitioner (``num_fwd_outputs``, ``static_lifetime_input_indices`` ...).
    """
    with compat.activation_memory_budget(memory_budget):
        return compat.min_cut_partition(gm, inputs, **kwargs)


class Partitioner(compat.CustomPartitioner):
    """The partitioner that Inductor calls: joint passes, then :func:`cut`.

    Args:
        prepare: called with the joint graph before it is cut.
        identity: what compile caches know this partitioner by.
    """

    def __init__(self, prepare: Callable[[fx.GraphModule], None], memory_budget: float | None, identity: str):
        self.prepare, self.memory_budget, self.identity = prepare, memory_budget, identity

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        self.prepare(gm)
        return cut(gm, joint_inputs, self.memory_budget, **kwargs)

    def uuid(self) -> str:
        return self.identity

    def __reduce__(self) -> tuple:
        # Inductor's cache key pickles its configuration: only the identity may count.
        return (str, (self.identity,))
