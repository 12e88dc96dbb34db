"""Part of :mod:`mindspeed_fx.compat`: writes in place to a tensor whose dimensions were permuted."""

from __future__ import annotations

import torch
import torch.fx as fx

CONTIGUOUS = (
    "cumprod_ cumsum_ index_add_ index_copy_ masked_fill_ masked_scatter_ renorm_ scatter_ scatter_add_ "
    "scatter_reduce_ tril_ triu_"
).split()
"""Methods of tensors whose operator without the write gives a contiguous result, whatever the strides of its input."""


def write_by_copy(gm: fx.GraphModule) -> None:
    """In a Dynamo graph and the graphs that it calls, in place: ``x.masked_fill_(mask, 0)`` of a permuted ``x`` ->
    ``x.copy_(x.clone().masked_fill(mask, 0))``, and so for each of :data:`CONTIGUOUS`. (Of the clone, since a gradient
    may read what the operator was given.)

    AOTAutograd computes the new value apart and undoes the views through which it was to be written. Where one of them
    split a dimension and another permuted the parts, a contiguous new value cannot be undone, and the graph is refused
    ("Cannot view a tensor with shape", torch 2.11 to 2.13, every backend but "eager"). ``copy_`` keeps the strides.
    """
    for body in [m for m in gm.children() if isinstance(m, fx.GraphModule)]:
        write_by_copy(body)
    for node in gm.graph.nodes:
        if node.op != "call_method" or node.target not in CONTIGUOUS or not _is_permuted(node.args[0]):
            continue
        with gm.graph.inserting_before(node):
            old = gm.graph.call_method("clone", node.args[:1])
            new = gm.graph.call_method(node.target.removesuffix("_"), (old, *node.args[1:]), node.kwargs)
        old.meta, new.meta = node.meta.copy(), node.meta.copy()
        node.target, node.args, node.kwargs = "copy_", (node.args[0], new), {}


def _is_permuted(node: fx.Node) -> bool:
    """Dense, but not in the order of its dimensions: a new tensor like it keeps the strides of such a one alone."""
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_contiguous():
        return False
    return torch.empty_like(value).stride() == value.stride()
