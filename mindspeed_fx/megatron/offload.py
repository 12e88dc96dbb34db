"""``--optimizer-cpu-offload`` where the device is the CPU.

Megatron asks of every parameter whether it lies on CUDA; where none does, its hybrid optimizer steps parameters whose
gradients it does not find. Here the share that Megatron would offload has a copy of its own, as on CUDA, and the rest
is stepped where it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_fx.megatron import patches

OPTIMIZER = "optimizer.cpu_offloading.hybrid_optimizer:HybridDeviceOptimizer"
INIT, PARAM_GROUPS = f"{OPTIMIZER}._init_sub_optimizers", f"{OPTIMIZER}._get_sub_optimizer_param_groups"


def init_sub_optimizers(self: Any) -> None:
    """``HybridDeviceOptimizer._init_sub_optimizers``; without an accelerator there is no memory to pin."""
    self.pin_cpu_grads = self.pin_cpu_params = False
    patches.original(INIT)(self)


def param_groups(self: Any, offload_fraction: float) -> tuple[list, list, dict, dict, dict]:
    """``HybridDeviceOptimizer._get_sub_optimizer_param_groups``.

    Returns:
        Groups of the offloaded parameters and of the others; offloaded parameter -> copy, copy -> parameter, and
        parameter -> its float32 copy where the update is in float32.
    """
    total = sum(p.numel() for group in self.param_groups for p in group["params"])
    offloaded_numel = 0
    offloaded_groups: list[dict[str, Any]] = []
    other_groups: list[dict[str, Any]] = []
    copies: dict[Tensor, Tensor] = {}
    float32_params: dict[Tensor, Tensor] = {}
    for group in self.param_groups:
        offloaded: list[Tensor] = []
        others: list[Tensor] = []
        for param in group["params"]:
            is_offloaded = offloaded_numel < total * offload_fraction
            inner = param.detach().clone() if is_offloaded else param
            if self.param_update_in_fp32 and param.dtype != torch.float32:
                inner = float32_params[param] = param.detach().clone().float()
            if is_offloaded:
                offloaded_numel += param.numel()
                copies[param] = inner
            (offloaded if is_offloaded else others).append(inner)
        offloaded_groups += [{**group, "params": offloaded}] if offloaded else []
        other_groups += [{**group, "params": others}] if others else []
    return offloaded_groups, other_groups, copies, {copy: p for p, copy in copies.items()}, float32_params
