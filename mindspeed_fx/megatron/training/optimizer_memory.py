"""The optimizer that Megatron's training builds, with the memory that flags ask for."""

from __future__ import annotations

from typing import Any

import torch

from mindspeed_fx.megatron import averages, host_states, patches, residual
from mindspeed_fx.megatron.optimizer import Adam
from mindspeed_fx.megatron.run_arguments import loop_arguments

TARGET = "megatron.training.training:get_megatron_optimizer"


def get_megatron_optimizer(*args: Any, **kwargs: Any) -> Any:
    """``get_megatron_optimizer``, as ``--optimizer-selection``, ``--o2-optimizer``, ``--reuse-fp32-param`` or
    ``--swap-optimizer`` have it."""
    optimizer, flags = patches.original(TARGET)(*args, **kwargs), loop_arguments()
    if getattr(flags, "optimizer_selection", None) == "fused_ema_adamw":
        averages.keep_averages(optimizer, flags.ema_decay)
    if getattr(flags, "o2_optimizer", False):
        narrow_moments(optimizer)
    if getattr(flags, "reuse_fp32_param", False) and flags.bf16:
        optimizer = residual.reuse_weights(optimizer)
    if getattr(flags, "swap_optimizer", False):
        optimizer = host_states.swap_states(optimizer, flags.swap_optimizer_times)
    return optimizer


def narrow_moments(optimizer: Any) -> None:
    """Adam keeps its moments in bfloat16 between steps: 4 bytes a main weight less.

    Raises:
        ValueError: the optimizer is another package's, whose moments have one type.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = part.optimizer
        if not isinstance(inner, Adam):
            raise ValueError(
                f"--o2-optimizer narrows the moments of mindspeed_fx's Adam, and this is {type(inner).__module__}'s "
                f"{type(inner).__name__}; give --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype "
                "bf16, or --optimizer adam"
            )
        inner.moment_dtype = torch.bfloat16
