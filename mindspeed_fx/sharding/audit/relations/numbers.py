"""Integers that decide which rows go where, in numbers: choices of experts are drawn, and what follows is computed.

Which rows are sent to whom is data, and no rule about parts speaks of it. A walk leaves such integers open
(:class:`Numeric`); what reads them asks here. Everything follows from the choices of a ``topk``, from token numbers and
from constants.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Sequence

import torch
import torch.fx as fx
from torch import Tensor
from torch.utils import _pytree as pytree

from mindspeed_fx.sharding.audit.relations.parts import Dim, Part, Terms, Unknown, Unproved

LIKE = frozenset("new_zeros zeros_like ones_like zeros ones full new_full full_like".split())


@dataclass(frozen=True)
class Numeric:
    """Integers, or what is made of integers alone, of which no relation of parts is known."""


@dataclass(frozen=True)
class Place:
    """Where a rank is, and who shares a mesh dimension with it."""

    rank: int
    at: dict[str, int]


def whole_index(dim: Dim, at: dict[str, int]) -> Tensor:
    """int64 [local size]: where each element of a rank's dimension stands in the whole one."""
    index = torch.zeros(1, dtype=torch.int64)
    for d in dim:
        if d.mesh:
            index = index * d.size + at[d.mesh]
        else:
            index = (index[:, None] * d.size + torch.arange(d.size)).flatten()
    return index


def root_index(dims: Sequence[Dim], at: dict[str, int]) -> dict[int, Tensor]:
    """Root -> [1 or local size, ...]: the element of that dimension of the term, broadcast over the rank's tensor."""
    indices: dict[int, Tensor] = {}
    for i, dim in enumerate(dims):
        parts: dict[int, Tensor] = {}
        for d in dim:
            step = torch.tensor([at[d.mesh]]) if d.mesh else torch.arange(d.size)
            parts = {root: x.repeat_interleave(len(step)) for root, x in parts.items()}
            length = len(next(iter(parts.values()))) // len(step) if parts else 1
            parts[d.root] = parts.get(d.root, 0) + d.stride * step.repeat(length)
        for root, x in parts.items():
            shape = [len(x) if j == i else 1 for j in range(len(dims))]
            indices[root] = indices.get(root, torch.zeros(1, dtype=torch.int64)) + x.view(shape)
    return indices


@dataclass
class Numbers:
    """What ranks compute of integers; each value once."""

    terms: Terms
    places: Sequence[Place]
    values: Any
    """Of a walk: node -> its relation."""
    column: Any
    """Node -> the nodes of all ranks in its place."""
    members: Any
    """Node of a collective, rank -> the ranks of its group, in order."""
    memo: dict[fx.Node, Any] = field(default_factory=dict)

    def of(self, nodes: Sequence[fx.Node]) -> list[Tensor]:
        """For each rank."""
        return [self.value(p, n) for p, n in zip(self.places, nodes)]

    def chosen_part(self, part: Part, place: Place) -> Tensor | None:
        """A rank's part of a term that is drawn."""
        if part.picked or part.partial or part.term not in self.terms.choices:
            return None
        roots, whole = self.terms.draw(part.term)
        index = root_index(part.dims, place.at)
        every = [index.get(r, torch.zeros(1, dtype=torch.int64)) for r in roots]
        return whole[tuple(every)].expand(part.local)

    def value(self, place: Place, node: fx.Node) -> Any:
        if node not in self.memo:
            self.memo[node] = self._computed(place, node)
        return self.memo[node]

    def _computed(self, place: Place, node: fx.Node) -> Any:
        relation = self.values(node)
        if isinstance(relation, Part):
            known = self.chosen_part(relation, place)
            if known is not None:
                return known
        if node.op == "get_attr":
            return getattr(node.graph.owning_module, str(node.target))
        name = getattr(node.target, "_opname", "")
        if node.op != "call_function" or name in ("topk", "rms_norm", "linear"):
            raise Unknown(f"which rows go where depends on {node.target}")
        if getattr(node.target, "namespace", "") == "_c10d_functional":
            return self._sent(place, node, name)
        if name in LIKE:
            val = node.meta["val"]
            fill = node.args[2] if name == "new_full" else node.args[1] if "full" in name else int("ones" in name)
            return torch.full(val.shape, fill, dtype=val.dtype)
        if name == "moe_permute":
            ids = self.value(place, node.args[1])  # type: ignore[arg-type]
            return torch.ops.mindspeed.moe_permute(torch.zeros(node.args[0].meta["val"].shape[0], 1), ids)  # type: ignore[union-attr]
        args = pytree.tree_map_only(fx.Node, lambda n: self.value(place, n), list(node.args))
        kwargs = {k: v for k, v in node.kwargs.items() if k not in ("device", "pin_memory", "layout")}
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _sent(self, place: Place, node: fx.Node, name: str) -> Tensor:
        if name == "wait_tensor":
            return self.value(place, node.args[0])  # type: ignore[arg-type]
        ranks = self.members(node, place.rank)
        nodes = self.column(node)
        every = [self.value(self.places[r], nodes[r].args[0]) for r in ranks]
        mine = ranks.index(place.rank)
        if name == "all_gather_into_tensor":
            return torch.cat(every)
        if name == "all_reduce" and node.args[1] == "sum":
            return torch.stack(every).sum(0)
        if name == "all_to_all_single":
            come = [x.split(list(nodes[r].args[2]))[mine] for r, x in zip(ranks, every)]
            if [len(x) for x in come] != list(node.args[1]):  # type: ignore[call-overload]
                raise Unproved("an all_to_all receives other lengths than are sent")
            return torch.cat(come)
        raise Unknown(f"{name} of integers: no rule")
