"""Torch's FSDP2 (``fully_shard``): its private state of a module, and its hooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Iterator

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class DividedWeight:
    """One parameter of a model that FSDP2 divides.

    Args:
        module, name: where it stands.
        parameter: the DTensor, of which this rank holds some of the rows.
        rows: of the whole, on every rank of ``group``.
        group: the ranks that hold one copy among them.
        copies: the ranks that hold the same rows, None where there is one copy.
        device: on which the model computes.
        compute_dtype: of the whole weight.
        reduce_dtype: in which gradients are added up; None for the gradient's own.
        is_freed: the whole is freed after the forward, and gathered again for the backward.
        fsdp: torch's own record of it.
    """

    module: nn.Module
    name: str
    parameter: Any
    rows: tuple[int, ...]
    group: Any
    copies: Any
    device: torch.device
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype | None
    is_freed: bool
    fsdp: Any

    def as_gradient(self, rows: Tensor) -> Any:
        """The DTensor of a gradient, of which this rank holds ``rows``."""
        return self.fsdp.to_sharded_dtensor(rows)


def weights(model: nn.Module) -> Iterator[DividedWeight]:
    """Every parameter that FSDP2 divides in ``model``, its root, once for each name it has."""
    for module, state in _states(model):
        for group in state._fsdp_param_groups:
            # as FSDP2 decides when it first runs: what its root holds is wanted at once by the backward
            is_kept = module is model and state._auto_reshard_after_forward
            is_freed = group.post_forward_mesh_info is not None and not is_kept
            for fsdp in group.fsdp_params:
                yield from _weight(fsdp, group, is_freed)


def _weight(fsdp: Any, group: Any, is_freed: bool) -> Iterator[DividedWeight]:
    parameter, policy, info, mesh = fsdp.sharded_param, group.mp_policy, fsdp._module_info, group.mesh_info
    ranks = mesh.shard_process_group
    longest = -(-parameter.shape[0] // ranks.size())
    rows = tuple(max(0, min(longest, parameter.shape[0] - r * longest)) for r in range(ranks.size()))
    places = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names)]
    for module, name in places:
        yield DividedWeight(
            module,
            name,
            parameter,
            rows,
            ranks,
            getattr(mesh, "replicate_process_group", None),
            group.device,
            policy.param_dtype or parameter.dtype,
            policy.reduce_dtype,
            is_freed,
            fsdp,
        )


def _states(model: nn.Module) -> list[tuple[nn.Module, Any]]:
    from torch.distributed.fsdp import FSDPModule

    return [(m, m._get_fsdp_state()) for m in model.modules() if isinstance(m, FSDPModule)]


def take_off_hooks(model: nn.Module) -> list[tuple[nn.Module, Any]]:
    """Have FSDP2 gather nothing in ``model`` any more; returns its modules with their MixedPrecisionPolicy."""
    results = []
    for module, state in _states(model):
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
        results.append((module, state._mp_policy))
    return results
