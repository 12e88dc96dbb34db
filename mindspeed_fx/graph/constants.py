"""Numbers that are written down in a model's code, and that its graph holds as a tensor."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from mindspeed_fx.compat import tracing

aten = torch.ops.aten


def integers_of(node: Any) -> list[int] | None:
    """The integers that ``node`` always is (of ``x[..., [-2]]``); None where it is something else."""
    if not isinstance(node, fx.Node):
        return None
    if node.target is aten.lift_fresh_copy.default:
        node = node.args[0]
    held = getattr(node.graph.owning_module, str(node.target), None) if node.op == "get_attr" else None
    if not isinstance(held, torch.Tensor) or held.ndim != 1 or held.dtype is not torch.int64 or tracing.is_fake(held):
        return None
    with tracing.outside_tracing():
        return held.tolist()
