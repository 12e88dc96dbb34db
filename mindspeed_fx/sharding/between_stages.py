"""What goes from one stage of a pipeline to the next, where other mesh dimensions divide the stages: parts.

Each rank sends its part of a value to its peer, and gets the peer's part of the gradient. Both sides know the division
from the plan and the value's shape alone: as the plan's inputs are divided (the batch over dp and ep, the sequence over
cp), and the sequence over tp too. (A value that is whole on the ranks of tp is cut for nothing, and the next stage
gathers it: Megatron's scatter-gather; one that sequence parallelism has in parts stays as it is.)
"""

from __future__ import annotations

from typing import Any, Sequence

import torch
from torch.distributed.tensor import Placement, Replicate, Shard

from mindspeed_fx.sharding.plan import Placed, Plan, parse_placement, placement_of

RECEIVED = "received_"
"""How the arguments of a stage begin that the stage before sends."""

SEQUENCE = 1
"""The dimension that tp divides: [batch, sequence, ...]."""


def placements_between(plan: Plan, mesh: Any, shape: Sequence[int]) -> tuple[Placement, ...] | None:
    """How a value of this shape is divided on its way; None: it goes whole, for ranks cannot share it evenly."""
    words, parts, placements = placement_of(plan.inputs, RECEIVED, "input"), list(shape), []
    for name, ranks in zip(mesh.mesh_dim_names, mesh.shape, strict=True):
        dim = parse_placement(words[name], "received") if name in words else None
        if dim is not None and dim >= len(parts):
            dim = None
        if name == "tp" and name not in words and len(parts) > 2 and parts[SEQUENCE] % ranks == 0:
            dim = SEQUENCE
        if dim is None:
            placements.append(Replicate())
            continue
        if parts[dim] % ranks:
            return None
        parts[dim] //= ranks
        placements.append(Shard(dim))
    return tuple(placements)


def placements_received(plan: Plan, mesh: Any, sent: Sequence[Placement]) -> tuple[Placement, ...]:
    """How a stage computes on what is ``sent`` to it: whole over tp, unless the plan has the sequence in parts between
    modules. (Else attention would be divided along the sequence where no plan says so.)"""
    edges = [placed for edge in plan.modules.values() for placed in (edge.input, edge.output)]
    edges += [edge.output for edge in plan.operators.values()]
    if "tp" in placement_of(plan.inputs, RECEIVED, "input") or any(map(_divides_sequence, edges)):
        return tuple(sent)
    return tuple(Replicate() if name == "tp" else p for p, name in zip(sent, mesh.mesh_dim_names, strict=True))


def _divides_sequence(placed: Placed) -> bool:
    return "tp" in placed and parse_placement(placed["tp"], "edge") == SEQUENCE


def part_like(value: torch.Tensor, plan: Plan, mesh: Any) -> torch.Tensor:
    """A tensor without values, of the shape of a rank's part of ``value``."""
    placements = placements_between(plan, mesh, value.shape) or ()
    shape = list(value.shape)
    for p, ranks in zip(placements, mesh.shape):
        if isinstance(p, Shard):
            shape[p.dim] //= ranks
    return value.detach().new_empty(shape).requires_grad_(value.requires_grad)
