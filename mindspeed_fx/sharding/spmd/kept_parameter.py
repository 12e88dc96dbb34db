"""A parameter that a plan divides, and that is whole, for its ranks cannot share it evenly."""

from __future__ import annotations

from typing import Any

from mindspeed_fx.compat.dtensor import is_divided
from mindspeed_fx.sharding.plan import Plan, placement_of
from mindspeed_fx.sharding.spmd.redistribute import placements_of


def kept_parameter(value: Any, plan: Plan, mesh: Any) -> str:
    """Why a parameter is whole where the plan divides it; "" for others."""
    if not value.parameter or not plan.keep_whole:
        return ""
    where = f'parameter "{value.name}" of shape {tuple(value.shape)}'
    wanted = placements_of(placement_of(plan.parameters, value.name, "parameter"), mesh, len(value.shape), where)
    dims = [
        f'"{mesh.mesh_dim_names[i]}"'
        for i, p in enumerate(wanted)
        if is_divided(p) and value.placements[i].is_replicate()
    ]
    return f"{where}: the ranks of {', '.join(dims)} cannot share it evenly" if dims else ""
