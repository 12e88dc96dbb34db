"""An operator run on each rank's own parts, by a rule, or on whole values where no rule divides what it reads.

A rule is a list of strategies: (dimension of every result that is divided, placement of every tensor argument), as in
:mod:`mindspeed_fx.kernels.sharding`. Autograd sees local tensors, so that any operator has the gradient that one device
computes; an argument that every rank reads whole and uses for its part gets a sum over the ranks.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.utils import _pytree as pytree

from mindspeed_fx.compat import dtensor
from mindspeed_fx.compat.placements import REPLICATED
from mindspeed_fx.sharding.spmd.redistribute import placed_at, summed_at

Strategy = tuple[Any, list[Any]]
"""Of every result a dimension, or PARTIAL: a sum over ranks that is not yet made; placement of every tensor argument (a
dimension or REPLICATED)."""


def run_in_parts(target: Callable, args: Sequence[Any], kwargs: dict[str, Any], strategies: Sequence[Strategy]) -> Any:
    """``target(*args, **kwargs)`` by one of ``strategies`` on every mesh dimension, or whole there.

    Args:
        target: an operator, or any function of tensors.
        args, kwargs: DTensors, which ``strategies`` place in this order, and anything else.

    Returns:
        What ``target`` returns, its tensors as DTensors.
    """
    leaves, spec = pytree.tree_flatten((tuple(args), kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, DTensor)]
    if not places:
        return target(*args, **kwargs)
    tensors = [leaves[i] for i in places]
    mesh = tensors[0].device_mesh
    chosen = [_choose(tensors, i, strategies) for i in range(mesh.ndim)]
    if not _is_even(tensors, chosen, mesh) or _is_ambiguous(chosen):
        chosen = [None] * mesh.ndim
    for k, (i, x) in enumerate(zip(places, tensors)):
        wanted = [Replicate() if c is None else _as_placed(c[1], c[0][1][k]) for c in chosen]
        gradient = [Partial() if c is not None and w.is_replicate() else w for c, w in zip(chosen, wanted)]
        leaves[i] = placed_at(x, wanted).to_local(grad_placements=tuple(gradient))
    local_args, local_kwargs = pytree.tree_unflatten(leaves, spec)
    results = target(*local_args, **local_kwargs)
    out = [Replicate() if c is None else _as_placed(c[1], c[0][0]) for c in chosen]
    return pytree.tree_map_only(torch.Tensor, lambda local: from_parts(local, mesh, out), results)


def run_whole(target: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``target(*args, **kwargs)`` as every rank computes it of whole values."""
    return run_in_parts(target, args, kwargs, ())


def from_parts(local: torch.Tensor, mesh: Any, placements: Sequence[Placement]) -> DTensor:
    """Equal parts as a DTensor, whose dimensions are stored in the order of the parts'."""
    if not any(map(dtensor.is_divided, placements)):
        # sizes that only data tells stay unread
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=local.shape, stride=local.stride())
    shape = list(local.shape)
    for i, p in enumerate(placements):
        if dtensor.is_divided(p):
            shape[p.dim] *= mesh.size(i)
    order = sorted(range(local.ndim), key=lambda d: -local.stride(d))
    stride = [0] * local.ndim
    step = 1
    for d in reversed(order):
        stride[d], step = step, step * max(1, shape[d])
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride))


def _choose(tensors: Sequence[DTensor], i: int, strategies: Sequence[Strategy]) -> tuple[Strategy, Placement] | None:
    """The strategy that keeps the most bytes where they are on mesh dimension ``i``, and a placement that it keeps;
    None: whole.
    """
    best, most = None, 0
    for strategy in strategies:
        kept, model = 0, None
        for x, wanted in zip(tensors, strategy[1]):
            own = x.placements[i]
            if own.is_replicate():
                continue
            size = x.numel() * x.dtype.itemsize
            if wanted == REPLICATED or not dtensor.is_divided(own, wanted):
                kept -= size
            elif model is None or _as_placed(model, wanted) == own:
                kept, model = kept + size, own
            else:
                kept, model = 0, None
                break
        if model is not None and kept > most:
            best, most = (strategy, model), kept
    return best


def _as_placed(model: Placement, wanted: Any) -> Placement:
    return dtensor.placement(wanted) if isinstance(wanted, str) else dtensor.along_dimension(model, wanted)


def _is_ambiguous(chosen: Sequence[Any]) -> bool:
    """Whether several mesh dimensions divide, one of them in several pieces: DTensor (2.13) reads such placements of a
    local tensor as an order of mesh dimensions, and would gather elements in another order."""
    return sum(c is not None for c in chosen) > 1 and any(c is not None and dtensor.is_strided(c[1]) for c in chosen)


def _is_even(tensors: Sequence[DTensor], chosen: Sequence[Any], mesh: Any) -> bool:
    for k, x in enumerate(tensors):
        parts = [1] * x.ndim
        for i, c in enumerate(chosen):
            if c is not None and c[0][1][k] != REPLICATED:
                parts[c[0][1][k]] *= mesh.size(i)
        if any(size % n for size, n in zip(x.shape, parts)):
            return False
    return True


def whole(x: torch.Tensor, like: DTensor) -> DTensor:
    """A plain tensor that every rank holds alike, as a DTensor on the mesh of ``like``."""
    return DTensor.from_local(x, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)


def sum_partials(x: DTensor) -> DTensor:
    """``x`` without partial sums; its gradient is whole where ``x`` was partial."""
    return summed_at(x, [Replicate() if p.is_partial() else p for p in x.placements])
