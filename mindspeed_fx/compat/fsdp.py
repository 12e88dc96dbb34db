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
        fsdp: torch's own record of it.
        group: the ranks that hold one copy among them.
        copies: the ranks that hold the same rows, None where there is one copy.
        device: on which the model computes.
        compute_dtype: of the whole weight.
        reduce_dtype: in which gradients are added up; None for the gradient's own.
        is_freed: the whole is freed after the forward, and gathered again for the backward.
    """

    module: nn.Module
    name: str
    fsdp: Any
    group: Any
    copies: Any
    device: torch.device
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype | None
    is_freed: bool

    @property
    def parameter(self) -> Any:
        """The DTensor, of which this rank holds some of the rows."""
        return self.fsdp.sharded_param

    def rows(self) -> Tensor:
        """The memory of this rank's rows, with what lengthens it to the longest of the ranks; the same memory until
        something gives the parameter another, as a checkpoint may."""
        self.fsdp.reset_sharded_param()
        return self.fsdp._sharded_param_data.view(self.fsdp.padded_sharded_param_size)

    def as_gradient(self, rows: Tensor) -> Any:
        """The DTensor of a gradient, of which :meth:`rows` are this rank's."""
        return self.fsdp.to_sharded_dtensor(rows[: self.fsdp.sharded_size[0]])


def weights(model: nn.Module) -> Iterator[DividedWeight]:
    """Every parameter that FSDP2 divides in ``model``, its root, once for each name it has."""
    for module, state in _states(model):
        for group in _groups(state):
            # as FSDP2 decides when it first runs: what its root holds is wanted at once by the backward
            is_kept = module is model and state._auto_reshard_after_forward
            is_freed = group.post_forward_mesh_info is not None and not is_kept
            for fsdp in group.fsdp_params:
                yield from _weight(fsdp, group, is_freed)


def _groups(state: Any) -> list[Any]:
    several = getattr(state, "_fsdp_param_groups", None)  # from torch 2.12 on a module may have more than one
    return [state._fsdp_param_group] if several is None and state._fsdp_param_group else several or []


def _weight(fsdp: Any, group: Any, is_freed: bool) -> Iterator[DividedWeight]:
    policy, info, mesh = group.mp_policy, fsdp._module_info, group.mesh_info
    places = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names)]
    for module, name in places:
        yield DividedWeight(
            module,
            name,
            fsdp,
            mesh.shard_process_group,
            getattr(mesh, "replicate_process_group", None),
            group.device,
            policy.param_dtype or fsdp.sharded_param.dtype,
            policy.reduce_dtype,
            is_freed,
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
