"""The optimizer that Megatron's training builds, with the memory that flags ask for."""

from __future__ import annotations

from typing import Any

from mindspeed_fx.megatron import host_states, patches, residual

TARGET = "megatron.training.training:get_megatron_optimizer"


def get_megatron_optimizer(*args: Any, **kwargs: Any) -> Any:
    """``get_megatron_optimizer``, as ``--reuse-fp32-param`` or ``--swap-optimizer`` have it."""
    from megatron.training import get_args

    optimizer, flags = patches.original(TARGET)(*args, **kwargs), get_args()
    if getattr(flags, "reuse_fp32_param", False) and flags.bf16:
        optimizer = residual.reuse_weights(optimizer)
    if getattr(flags, "swap_optimizer", False):
        optimizer = host_states.swap_states(optimizer, flags.swap_optimizer_times)
    return optimizer
