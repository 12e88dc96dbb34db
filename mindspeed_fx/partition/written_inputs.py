"""Inputs that a forward writes and a checkpointed region reads: what it read is kept.

A router adds to its counts of tokens and divides by them, in a layer that is recomputed. torch would keep the input
for the backward, which has other values once a second forward has run (the stages of a pipeline run several before the
first backward): autograd ends the step with an error about an inplace operation. A copy of the old value is kept
instead.
"""

from __future__ import annotations

from typing import Sequence

import torch
import torch.fx as fx

from mindspeed_fx.compat import partitioner
from mindspeed_fx.graph.annotate import written_nodes
from mindspeed_fx.graph.storage import owner

aten = torch.ops.aten


def positions(gm: fx.GraphModule) -> list[int]:
    """Of the inputs that a captured graph writes, in checkpointed regions too."""
    written = {owner(w) for n in gm.graph.nodes for w in (*written_nodes(n), *_written_in_region(gm, n))}
    return [i for i, n in enumerate(gm.graph.find_nodes(op="placeholder")) if n in written]


def _written_in_region(gm: fx.GraphModule, node: fx.Node) -> list[fx.Node]:
    """What a call of a region, ``(body, *inputs)``, writes of its inputs."""
    if not isinstance(node.target, torch._ops.HigherOrderOperator) or not node.args:
        return []
    body = node.args[0]
    if not isinstance(body, fx.Node) or body.op != "get_attr":
        return []
    return [w for i in positions(getattr(gm, str(body.target))) if isinstance(w := node.args[1 + i], fx.Node)]


def keep_old_values(joint: fx.GraphModule, written: Sequence[int]) -> None:
    """Have regions that are recomputed in a joint graph read copies of the inputs at ``written``, in place."""
    names = {f"primals_{i + 1}" for i in written}
    for value in [n for n in joint.graph.find_nodes(op="placeholder") if n.target in names]:
        readers = [u for u in value.users if value not in written_nodes(u)]
        if not any(partitioner.must_recompute(u) for u in readers):
            continue
        with joint.graph.inserting_before(next(n for n in joint.graph.nodes if n in readers)):
            old = joint.graph.call_function(aten.clone.default, (value,))
        old.meta = {"val": value.meta["val"].clone()} if "val" in value.meta else {}
        partitioner.mark_save(old)
        for reader in readers:
            reader.replace_input_with(value, old)
