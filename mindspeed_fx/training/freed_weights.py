"""Weights that a graph gathers from their parts, and gathers again for the backward instead of keeping them whole.

Such a part is marked (:func:`free_after_forward`) before a graph reads it; torch's partitioner would keep the result of
every collective.
"""

from __future__ import annotations

from typing import Any, Sequence

import torch.fx as fx
from torch import Tensor

from mindspeed_fx.compat import partitioner
from mindspeed_fx.graph import collectives

KEY = "_mindspeed_fx_freed_after_forward"


def free_after_forward(part: Tensor) -> None:
    """Have graphs gather ``part`` again for their backward."""
    setattr(part, KEY, True)


class FreedWeights:
    """The parts among one graph's inputs.

    Args:
        inputs: of Dynamo's graph.
    """

    def __init__(self, inputs: Sequence[Any]) -> None:
        self.positions = [i for i, x in enumerate(inputs) if getattr(x, KEY, False)]

    @property
    def identity(self) -> str:
        """What compile caches must know of it."""
        return f"-freed{self.positions}" if self.positions else ""

    def mark(self, joint: fx.GraphModule) -> None:
        """Have the backward make again what is computed from one part alone, from its gather on."""
        names = {f"primals_{i + 1}" for i in self.positions}
        for part in [n for n in joint.graph.find_nodes(op="placeholder") if n.target in names]:
            alone: set[fx.Node] = {part}
            gathered: set[fx.Node] = set()
            for n in joint.graph.nodes:
                if n.all_input_nodes and alone.issuperset(n.all_input_nodes):
                    alone.add(n)
                    if collectives.is_start(n) or gathered & set(n.all_input_nodes):
                        gathered.add(n)
            for n in gathered:
                if not partitioner.must_recompute(n):
                    partitioner.mark_recompute(n)
