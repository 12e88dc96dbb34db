"""Which nodes around a collective are computed chunk by chunk with it.

"pair": the collective, the products at its side (after all_gather, before reduce_scatter and all_reduce, on both sides
of all_to_all) and the views, casts and pointwise work between. "pipeline": everything that works row by row and lies
between products and collectives, through further collectives, up to what needs the whole sequence (attention, unless
whole samples are cut). Experts are cut along their capacity, or one by one, between the all_to_all that brings their
tokens and the one that takes them back.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
from torch.utils._pytree import tree_leaves

from mindspeed_fx.graph.collectives import is_start, is_wait, kind
from mindspeed_fx.graph.storage import is_view
from mindspeed_fx.passes.overlap.chunking.chunk_rules import PRODUCTS, agree, complete_specs, inputs, results
from mindspeed_fx.passes.overlap.chunking.chunk_spec import ChunkSpec, Parts, is_packed

REACHES = ("pair", "pipeline")
KINDS = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single")


@dataclass
class Region:
    """Nodes and how their results are cut; an input that is cut and comes from elsewhere is taken apart."""

    cuts: dict[fx.Node, Any] = field(default_factory=dict)
    needs: dict[fx.Node, dict[fx.Node, Any]] = field(default_factory=dict)

    @property
    def starts(self) -> list[fx.Node]:
        return [n for n in self.cuts if is_start(n)]

    @property
    def products(self) -> list[fx.Node]:
        return [n for n in self.cuts if is_product(n)]

    def most_parts(self, parts: tuple[Parts, ...]) -> list[Parts]:
        """Which of these numbers, or sizes, of chunks every value allows."""
        tensors = []
        for node, cut in [*self.cuts.items(), *((s, c) for need in self.needs.values() for s, c in need.items())]:
            values = node.meta["val"] if isinstance(cut, tuple) else (node.meta["val"],)
            tensors += [
                (v.shape, c)
                for v, c in zip(values, cut if isinstance(cut, tuple) else (cut,))
                if isinstance(c, ChunkSpec)
            ]
        return [p for p in parts if all(c.fits(shape, p) for shape, c in tensors)]


def is_product(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in PRODUCTS


def has_static_sizes(node: fx.Node) -> bool:
    """Whether the sizes of the result are numbers, not symbols."""
    return all(
        isinstance(s, int) for v in tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor) for s in v.shape
    )


def regions(start: fx.Node, reach: str) -> list[Region]:
    """The region of a collective for every dimension along which it can be cut: most collectives and products first."""
    if not has_static_sizes(start) or not has_static_sizes(start.args[0]):
        return []
    scattered = kind(start) == "reduce_scatter_tensor"
    local = start.meta["val"] if scattered else start.args[0].meta["val"]
    matches = []
    for dim in range(max(local.dim() - 1, 1)):
        cut = ChunkSpec(dim)
        if scattered or kind(start) == "all_reduce":
            out = cut
        else:
            out = next(results(start, start.args[0], cut), None)
            if out is None:  # blocks of ranks, each cut
                ranks = len(start.args[1]) if kind(start) == "all_to_all_single" else 0
                out = ChunkSpec(dim, ranks) if ranks and inputs(start, ChunkSpec(dim, ranks)) is not None else None
        region = _grown(start, out, reach) if out is not None and inputs(start, out) is not None else None
        if region is not None and region.starts and region.products:
            matches.append(region)
    return sorted(matches, key=lambda r: (-(len(r.starts) + len(r.products)), -len(r.most_parts((2, 4, 8)))))


def _grown(start: fx.Node, out: ChunkSpec, reach: str) -> Region:
    region, todo = Region(), []

    def add(node: fx.Node, out: Any) -> bool:
        if node in region.cuts:
            return agree(region.cuts[node], out)
        if (is_start(node) and kind(node) not in KINDS) or not all(
            map(has_static_sizes, (node, *node.all_input_nodes))
        ):
            return False
        needs = inputs(node, out)
        if needs is None or not any(c is not None for c in needs.values()):
            return False
        if any(c is not None and s in region.cuts and not agree(region.cuts[s], c) for s, c in needs.items()):
            return False
        whole_out = complete_specs(node, out)
        read = [region.needs[u].get(node) for u in node.users if u in region.cuts]
        if any(c is not None and not agree(whole_out, c) for c in read):
            return False
        region.cuts[node], region.needs[node] = whole_out, needs
        todo.append(node)
        return True

    add(start, out)
    while todo:
        node = todo.pop(0)
        down, up = True, True
        if reach == "pair":
            at_end = is_product(node) or (is_start(node) and node is not start)
            backward = kind(start) in ("reduce_scatter_tensor", "all_reduce")
            down, up = not at_end and not backward, not at_end and kind(start) != "all_gather_into_tensor"
            if node is start:
                for wait in node.users:
                    add(wait, out)
            elif is_wait(node) and backward:
                down = up = False
        if up:
            for source, cut in region.needs[node].items():
                if cut is not None and source.op == "call_function":
                    add(source, cut)
        if down:
            for user in node.users:
                for cut in results(user, node, region.cuts[node]) if user.op == "call_function" else ():
                    if add(user, cut):
                        break
    return _trim(region)


def _only_inside(node: fx.Node, cut: Any) -> bool:
    """Chunks of it cannot be put together for who reads it outside of the region: several results, or gaps between its
    elements that no view made.
    """
    return isinstance(cut, tuple) or (
        isinstance(cut, ChunkSpec) and not is_view(node) and not is_packed(node.meta["val"])
    )


def _trim(region: Region) -> Region:
    """Without what does not lie between products and collectives, or has nothing to do with a collective."""
    order = sorted(region.cuts)
    while True:
        inside = set(order)
        before: dict[fx.Node, tuple[bool, bool]] = {}
        after: dict[fx.Node, tuple[bool, bool]] = {}

        def flags(node: fx.Node, near: list[tuple[bool, bool]]) -> tuple[bool, bool]:
            return is_start(node) or is_product(node) or any(a for a, _ in near), is_start(node) or any(
                c for _, c in near
            )

        for n in order:
            before[n] = flags(n, [before[s] for s, c in region.needs[n].items() if c is not None and s in inside])
        for n in reversed(order):
            after[n] = flags(n, [after[u] for u in n.users if u in inside])
        kept = []
        for n in order:
            between = before[n][0] and after[n][0] and (before[n][1] or after[n][1])
            if between or (is_wait(n) and n.args[0] in inside):
                kept.append(n)
        keep = set(kept)
        for n in order:  # of several results each stands for itself, also where nothing inside reads it
            if n.target is operator.getitem and n.args[0] in keep:
                keep.add(n)
        for n in [n for n in keep if any(u not in keep for u in n.users) and _only_inside(n, region.cuts[n])]:
            keep.discard(n)
        if len(keep) == len(order):
            break
        order = [n for n in order if n in keep]
    return Region({n: region.cuts[n] for n in order}, {n: region.needs[n] for n in order})
