"""Zeros without memory, which forward-mode derivatives leave, become zeros.

A function under ``jacfwd`` makes them with ``_efficientzerotensor`` where it does not depend on what is differentiated.
The cut would save one for the backward, and Inductor takes no such tensor for an input. As a ``full`` it is made again
instead.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from mindspeed_fx.graph import rewrite

aten = torch.ops.aten


def fill_zeros(joint: fx.GraphModule) -> None:
    """Replace every tensor of ``joint`` that is zero without memory by a filled one."""
    for n in joint.graph.find_nodes(op="call_function", target=aten._efficientzerotensor.default):
        n.replace_all_uses_with(rewrite.insert(joint, n, aten.full.default, (n.args[0], 0), dict(n.kwargs)))
        joint.graph.erase_node(n)
