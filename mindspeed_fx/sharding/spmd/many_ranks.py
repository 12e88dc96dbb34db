"""Parts of many ranks are gathered, and sums scattered to them, by views: DTensor (2.13) takes what is gathered along
another dimension than the first apart and joins it again piece by piece, so that a graph is as long as there are ranks
(6,136 nodes for four layers under zero3 over 256 ranks; benchmarks/plan_scale.py)."""

from __future__ import annotations

import math
from typing import Sequence

from torch.distributed.tensor import DTensor, Partial, Placement, Shard

from mindspeed_fx.compat import dtensor

MANY = 16
"""Ranks of a mesh dimension up to which DTensor's way is taken: what reads graphs knows it."""


def applies(x: DTensor, placements: Sequence[Placement], i: int) -> bool:
    """Whether what changes, on mesh dimension ``i`` alone, are parts along another dimension than the first that become
    whole, or a sum that becomes such parts; all of one size."""
    mesh, old, new = x.device_mesh, x.placements[i], placements[i]
    gathers, scatters = type(old) is Shard and new.is_replicate(), old == Partial() and type(new) is Shard
    if mesh.size(i) <= MANY or not (gathers or scatters) or any(map(dtensor.is_strided, placements)):
        return False
    d = old.dim if gathers else new.dim
    others = [j for j, p in enumerate(placements) if j != i and dtensor.is_divided(p, d)]
    ranks = math.prod(mesh.size(j) for j in (i, *others))
    return d > 0 and all(j < i for j in others) and x.shape[d] % ranks == 0


def move(x: DTensor, placements: Sequence[Placement], i: int) -> DTensor:
    """One all-gather or reduce-scatter over mesh dimension ``i``."""
    old, new, mesh, local = x.placements[i], placements[i], x.device_mesh, x.to_local()
    ranks = mesh.size(i)
    if isinstance(old, Shard):
        parts = dtensor.all_gather(local, mesh, i).unflatten(0, (ranks, local.shape[0]))
        local = parts.movedim(0, old.dim).flatten(old.dim, old.dim + 1)
    elif isinstance(new, Shard):
        parts = local.unflatten(new.dim, (ranks, local.shape[new.dim] // ranks)).movedim(new.dim, 0)
        local = dtensor.reduce_scatter(parts.flatten(0, 1), mesh, i)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=x.shape, stride=x.stride())
