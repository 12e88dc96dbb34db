"""Which parts of a graph one generated kernel can do: pointwise operators and sums, means and maxima over the last
dimension.

A region computes on one domain, rows of ``width`` elements. A node joins the region of what it reads when both have
that domain and no path between them leaves it, so that the regions of a graph can run one after the other. Values are
whole rows, one number a row, a vector that every row shares, or one number. Sizes must be known, tensors contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

aten = torch.ops.aten
GENERATED = frozenset(
    (
        aten.add.Tensor,
        aten.sub.Tensor,
        aten.mul.Tensor,
        aten.div.Tensor,
        aten.neg.default,
        aten.exp.default,
        aten.log.default,
        aten.sqrt.default,
        aten.rsqrt.default,
        aten.reciprocal.default,
        aten.abs.default,
        aten.sigmoid.default,
        aten.silu.default,
        aten.relu.default,
        aten.erf.default,
        aten.maximum.default,
        aten.minimum.default,
        aten.where.self,
        aten.pow.Tensor_Scalar,
        aten._to_copy.default,
        aten.gt.Tensor,
        aten.ge.Tensor,
        aten.lt.Tensor,
        aten.le.Tensor,
        aten.gt.Scalar,
        aten.ge.Scalar,
        aten.lt.Scalar,
        aten.le.Scalar,
        aten.add.Scalar,
        aten.sub.Scalar,
        aten.mul.Scalar,
        aten.div.Scalar,
    )
)
"""Pointwise operators that kernels/triton/generate.py has a translation for."""
REDUCTIONS = frozenset((aten.sum.dim_IntList, aten.mean.dim, aten.amax.default))
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.bool)
WIDEST = 16384
"""Elements of the widest row: a region's rows are kept whole."""


@dataclass(frozen=True)
class Region:
    """Nodes of one graph that one kernel can do, in order."""

    shape: tuple[int, ...]
    """The domain: [..., width]."""
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]

    def kind(self, node: fx.Node) -> str:
        """ "full", "row", "vector" or "one": how the value of ``node`` lies in the domain."""
        return kind(node.meta["val"], self.shape)


def kind(value: torch.Tensor, shape: tuple[int, ...]) -> str | None:
    """How a tensor lies in a domain; None when it does not."""
    sizes = (1,) * (len(shape) - value.dim()) + tuple(value.shape)
    if len(sizes) != len(shape):
        return None
    if all(n == 1 for n in sizes):
        return "one"
    if sizes == shape:
        return "full"
    if sizes == (*shape[:-1], 1) and value.dim() == len(shape):
        return "row"
    return "vector" if sizes[-1] == shape[-1] and all(n == 1 for n in sizes[:-1]) else None


def regions(gm: fx.GraphModule, smallest: int = 2) -> list[Region]:
    """The regions of ``gm`` of at least ``smallest`` nodes that compute, in the order of their first nodes."""
    domain: dict[fx.Node, tuple[int, ...]] = {}
    level: dict[fx.Node, int] = {}
    parent: dict[fx.Node, fx.Node] = {}

    def find(n: fx.Node) -> fx.Node:
        while parent[n] is not n:
            n = parent[n]
        return n

    for node in gm.graph.nodes:
        result = _domain(node, domain)
        if result is not None:
            domain[node], parent[node] = result, node
        # Whoever leaves a domain and comes back is on another level, however short the way.
        level[node] = max(
            (level[a] + (result is None or domain.get(a) != result) for a in node.all_input_nodes), default=0
        )
        for a in node.all_input_nodes if result is not None else ():
            if domain.get(a) == result and level[a] == level[node]:
                parent[find(node)] = find(a)
    members: dict[fx.Node, list[fx.Node]] = {}
    for node in domain:
        members.setdefault(find(node), []).append(node)
    results = (
        _region(nodes, domain[nodes[0]])
        for nodes in members.values()
        if sum(n.target is not aten._to_copy.default for n in nodes) >= smallest
    )
    return [r for r in results if r is not None]


def _domain(node: fx.Node, domain: dict[fx.Node, tuple[int, ...]]) -> tuple[int, ...] | None:
    """The rows on which a node computes; None when it is for no region."""
    if node.op != "call_function" or node.target not in GENERATED | REDUCTIONS or not _plain(node):
        return None
    if node.target in REDUCTIONS:
        x = node.args[0].meta["val"]
        dims = node.args[1] if len(node.args) > 1 else []
        keep = node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False)
        shape = tuple(x.shape)
        return (
            shape
            if list(dims) in ([-1], [x.dim() - 1]) and keep and _wide(shape) and not node.kwargs.get("dtype")
            else None
        )
    own = tuple(node.meta["val"].shape)
    arguments = [domain[a] for a in node.all_input_nodes if a in domain]
    shape = next((d for d in arguments if kind(node.meta["val"], d) == "row" and d[-1] > 1), own)
    tensors = [a.meta["val"] for a in node.all_input_nodes]
    return shape if _wide(shape) and all(kind(t, shape) for t in tensors) else None


def _wide(shape: tuple[int, ...]) -> bool:
    return len(shape) >= 2 and 1 < shape[-1] <= WIDEST


def _plain(node: fx.Node) -> bool:
    """Its tensors are contiguous, of known sizes and supported types; numbers are numbers."""
    for n in (node, *node.all_input_nodes):
        x = n.meta.get("val")
        if (
            not isinstance(x, torch.Tensor)
            or x.dtype not in DTYPES
            or not all(isinstance(s, int) for s in x.shape)
            or not x.is_contiguous()
        ):
            return False
    if node.target is aten._to_copy.default:
        device = node.kwargs.get("device")
        return (
            device is None or torch.device(device).type == node.args[0].meta["val"].device.type
        ) and node.kwargs.get("memory_format") in (None, torch.contiguous_format, torch.preserve_format)
    return all(isinstance(a, (fx.Node, int, float)) for a in node.args[:1]) and not node.kwargs.get("rounding_mode")


def _region(nodes: list[fx.Node], shape: tuple[int, ...]) -> Region | None:
    inside = set(nodes)
    inputs = dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside)
    outputs = [n for n in nodes if any(u not in inside for u in n.users)]
    fits = all(kind(n.meta["val"], shape) for n in inputs) and all(
        kind(n.meta["val"], shape) in ("full", "row") for n in outputs
    )
    return Region(shape, tuple(nodes), tuple(inputs), tuple(outputs)) if outputs and fits else None


def graph_of(region: Region) -> fx.GraphModule:
    """The region alone: placeholders for its inputs, its outputs as a tuple; values are fake as in the graph it is
    from.
    """
    graph, at = fx.Graph(), {}
    for n in region.inputs:
        at[n] = graph.placeholder(n.name)
        at[n].meta["val"] = n.meta["val"]
    for n in region.nodes:
        at[n] = graph.node_copy(n, at.__getitem__)
    graph.output(tuple(at[n] for n in region.outputs))
    return fx.GraphModule(torch.nn.Module(), graph)


def names(region: Region) -> str:
    """The operators of a region in order, casts left out, for reports."""
    said: list[Any] = [
        n.target._schema.name.split("::")[1] for n in region.nodes if n.target is not aten._to_copy.default
    ]
    return ", ".join(said if len(said) <= 8 else [*said[:7], f"... {len(said) - 7} more"])
