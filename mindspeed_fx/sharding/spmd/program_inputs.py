"""What a rank's program is told of its inputs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Sequence

import torch
import torch.fx as fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from mindspeed_fx.compat import dtensor, symbols
from mindspeed_fx.sharding.plan import Plan, placement_of
from mindspeed_fx.sharding.spmd.redistribute import placements_of

ITEM = torch.ops.aten.item.default


@dataclass
class Value:
    """How one input of the program becomes a DTensor."""

    placements: tuple[Placement, ...]
    """Of the local tensor that is given; for inputs of the model, given whole, what it is divided to."""
    shape: torch.Size
    stride: tuple[int, ...]
    parameter: bool
    name: str = ""
    """Of the parameter, or of an input of which each rank gives its part."""
    part: bool = False
    """Whether an input of the model is given as the part that ``placements`` say."""
    kept: str = ""
    """Why it is not divided as the plan says."""
    read: tuple[Placement, ...] | None = None
    """How the program takes what ``placements`` say of a part; None: as it is given."""


def is_number(node: fx.Node) -> bool:
    """Whether a node is a number that Dynamo hands in as a tensor, for it may change (``dynamic=True``). The tensor
    itself, and no DTensor of it, remembers its symbol."""
    return node.op == "placeholder" and bool(node.users) and all(u.target is ITEM for u in node.users)


def with_numbers(graph: fx.GraphModule, values: Sequence[Value | None]) -> list[Value | None]:
    """``values`` without those of numbers; sizes are ints where they are no symbols any more, for a trace knows only
    symbols that it has met."""
    numbers = map(is_number, graph.graph.find_nodes(op="placeholder"))
    return [None if number or v is None else _settled(v) for number, v in zip(numbers, values, strict=True)]


def _settled(value: Value) -> Value:
    shape, stride = (map(symbols.as_number, sizes) for sizes in (value.shape, value.stride))
    return dataclasses.replace(value, shape=torch.Size(shape), stride=tuple(stride))


def kept_parameter(value: Value, plan: Plan, mesh: DeviceMesh) -> str:
    """Why a parameter is whole where the plan divides it; "" for others."""
    if not value.parameter or not plan.keep_whole:
        return ""
    where = f'parameter "{value.name}" of shape {tuple(value.shape)}'
    wanted = placements_of(placement_of(plan.parameters, value.name, "parameter"), mesh, len(value.shape), where)
    dims = [
        f'"{mesh.mesh_dim_names[i]}"'
        for i, p in enumerate(wanted)
        if dtensor.is_divided(p) and value.placements[i].is_replicate()
    ]
    return f"{where}: the ranks of {', '.join(dims)} cannot share it evenly" if dims else ""
