"""A region's nodes, each as many times as there are chunks."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.fx as fx

from mindspeed_fx.graph.collectives import is_start
from mindspeed_fx.graph.match import argument, value
from mindspeed_fx.graph.op_sets import TO_SHAPE
from mindspeed_fx.graph.rewrite import insert
from mindspeed_fx.graph.storage import is_view
from mindspeed_fx.passes.overlap.chunking.chunk_spec import (
    Parts,
    Put,
    Sum,
    chunk_shape,
    chunk_size,
    dense,
    is_packed,
    shares,
    take,
    together,
)
from mindspeed_fx.passes.overlap.chunking.region import Region

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
CHUNK = "mindspeed_fx_chunk"
"""Key in ``node.meta`` of collectives that move one chunk; they are no material for buckets."""


def compute_in_chunks(gm: fx.GraphModule, region: Region, parts: Parts, put: Put | None = None) -> None:
    """Compute ``region`` in chunks, in place. Each chunk's node stands where the whole's stood; who reads the whole
    from outside the region gets it put together."""
    order = sorted(region.cuts)
    work = _Chunks(put or functools.partial(insert, gm), region, parts)
    for node in order:
        work.chunks[node] = []
        for i in range(len(shares(parts))):
            work.chunks[node].append(work.chunk(node, i))
        if not isinstance(region.cuts[node], tuple) and any(
            u not in region.cuts or region.needs[u].get(node) is None for u in node.users
        ):
            work.whole(node)
    for node in order:
        for user in [u for u in node.users if u not in region.cuts]:
            user.replace_input_with(node, work.wholes[node])
    for node in reversed(order):
        gm.graph.erase_node(node)


class _Chunks:
    def __init__(self, put: Put, region: Region, parts: Parts):
        self.put, self.region, self.parts = put, region, parts
        self.chunks: dict[fx.Node, list[fx.Node]] = {}
        self.wholes: dict[fx.Node, fx.Node] = {}
        self.taken: dict[Any, fx.Node] = {}

    def chunk(self, node: fx.Node, i: int) -> fx.Node:
        """Node ``node`` for chunk ``i``."""
        needs = self.region.needs[node]
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda s: self._input(node, s, needs.get(s), i))
        if i and self._added_up(node):
            return self.put(node, aten.addmm.default, (self.chunks[node][-1], *args))
        args = self._sizes(node, list(args), i)
        if node.target in TO_SHAPE or is_start(node):
            args[0] = dense(self.put, node, args[0])
        new = self.put(node, node.target, tuple(args), kwargs)
        if is_start(node):
            new.meta[CHUNK] = True
        return new

    def whole(self, node: fx.Node) -> fx.Node:
        """The whole of a node of the region, in the layout that it had."""
        if node not in self.wholes:
            self.wholes[node] = self._whole(node)
        return self.wholes[node]

    def _whole(self, node: fx.Node) -> fx.Node:
        cut = self.region.cuts[node]
        if cut is None:
            return self.chunks[node][0]
        if is_view(node) and (
            isinstance(cut, tuple) or not is_packed(value(node))
        ):  # part of something larger, which no copy is
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda s: self.whole(s) if s in self.region.cuts else s)
            return self.put(node, node.target, args, kwargs)
        return (
            self.chunks[node][-1]
            if self._added_up(node)
            else together(self.put, node, self.chunks[node], cut, value(node))
        )

    def _added_up(self, node: fx.Node) -> bool:
        """The product of each chunk is added to those of the chunks before it, in one call."""
        return node.target is aten.mm.default and isinstance(self.region.cuts[node], Sum)

    def _input(self, node: fx.Node, source: fx.Node, cut: Any, i: int) -> fx.Node:
        if source in self.region.cuts:
            return self.chunks[source][i] if cut is not None else self.wholes[source]
        if cut is None:
            return source
        if cut.blocks > 1:
            source = self._once(("dense", source), lambda: dense(self.put, node, source))
        return self._once((source, cut, i), lambda: take(self.put, node, source, cut, i, self.parts))

    def _once(self, key: Any, make: Any) -> fx.Node:
        if key not in self.taken:
            self.taken[key] = make()
        return self.taken[key]

    def _sizes(self, node: fx.Node, args: list[Any], i: int) -> list[Any]:
        """Arguments that are sizes, for a chunk."""
        cut, part = self.region.cuts[node], lambda size: chunk_size(size, self.parts, i)
        if node.target in TO_SHAPE:
            args[1] = chunk_shape(value(node).shape, cut, self.parts, i)
        elif node.target in (aten.split.Tensor, aten.split_with_sizes.default):
            if argument(node, "dim") % value(node.args[0]).dim() == cut[0].dim:
                args[1] = part(args[1]) if isinstance(args[1], int) else [*map(part, args[1])]
        elif node.target is c10d.all_to_all_single.default and cut.dim == 0:
            args[1], args[2] = ([*map(part, sizes)] for sizes in args[1:3])
        return args
