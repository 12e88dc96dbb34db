"""What AOTAutograd asks a program before it traces it: which results there are, and which inputs are written.

It runs the program for that, on fake tensors, which takes as long as tracing the forward does. The captured graph knows
the answer: results are whole, of the shapes that a single device has. Only the simple case is answered here (nothing is
written, and results are plain tensors of fixed sizes in memory of their own); every other program is run.
"""

from __future__ import annotations

from typing import Any, Sequence

import torch
import torch.fx as fx

from mindspeed_fx.compat import fake, fx_graph, tracing
from mindspeed_fx.graph.annotate import bodies, written_nodes
from mindspeed_fx.graph.storage import owner
from mindspeed_fx.sharding.constraint import constrain


def results_of(graph: fx.GraphModule) -> list[fx.Node] | None:
    """The nodes whose values ``graph``, captured, returns; None where only a run tells what AOTAutograd asks."""
    outputs = graph.graph.output_node().args[0]
    nodes = outputs if isinstance(outputs, (tuple, list)) else ()
    if not nodes or not all(isinstance(n, fx.Node) and "needs_grad" in n.meta for n in nodes):
        return None
    values = [n.meta.get("val") for n in nodes]
    if not all(isinstance(v, torch.Tensor) and _has_fixed_sizes(v) and v.is_contiguous() for v in values):
        return None
    inside = [fx_graph.example_value_of(n) for n in graph.graph.find_nodes(op="placeholder")]
    if not all(isinstance(v, (int, float)) or (isinstance(v, torch.Tensor) and _has_fixed_sizes(v)) for v in inside):
        return None
    own = {fake.storage_of(v) for v in values}
    if len(own) < len(values) or any(_owner(n).op != "call_function" for n in nodes):
        return None
    if any(_writes_or_hides(n) for body in (graph, *bodies(graph)) for n in body.graph.nodes):
        return None
    return list(nodes)


def _has_fixed_sizes(x: torch.Tensor) -> bool:
    return all(isinstance(n, int) for n in (*x.shape, *x.stride()))


def _owner(n: fx.Node) -> fx.Node:
    """The node whose memory ``n`` has."""
    while (own := owner(n)).target is constrain:
        n = own.args[0]
    return own


def _writes_or_hides(n: fx.Node) -> bool:
    """Whether ``n`` writes into memory, or calls what does more than operators say."""
    called = n.op in ("call_module", "call_method")
    hides = n.op == "call_function" and tracing.is_higher_order(n.target) and not tracing.is_checkpoint(n.target)
    return bool(written_nodes(n)) or called or hides


def stand_in(results: Sequence[fx.Node], local: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """Empty tensors of the shapes of ``results``; those that a gradient flows into depend on an input."""
    differentiable = next((x for x in local if isinstance(x, torch.Tensor) and x.requires_grad), None)
    standing = []
    for n in results:
        value = n.meta["val"]
        empty = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        flows = n.meta["needs_grad"] and differentiable is not None
        standing.append(_Depending.apply(differentiable, empty) if flows else empty)
    return tuple(standing)


class _Depending(torch.autograd.Function):
    """``empty``, as if it were computed of ``x``."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor, empty: torch.Tensor) -> torch.Tensor:
        return empty.clone()

    @staticmethod
    def backward(_ctx: Any, _grad: torch.Tensor) -> tuple[None, None]:
        return None, None
