"""What a rank's program is told of its inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from mindspeed_fx.compat import dtensor
from mindspeed_fx.sharding.plan import Plan, placement_of
from mindspeed_fx.sharding.spmd.redistribute import placements_of


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
