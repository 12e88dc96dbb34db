"""The optimizer that Megatron's training builds, with the memory that flags ask for."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from mindspeed_fx.megatron import averages, host_states, patches, residual, scaled_moments
from mindspeed_fx.megatron.optimizer import adams_of
from mindspeed_fx.megatron.run_arguments import loop_arguments

TARGET = "megatron.training.training:get_megatron_optimizer"


def get_megatron_optimizer(*args: Any, **kwargs: Any) -> Any:
    """``get_megatron_optimizer``, as ``--optimizer-selection``, ``--o2-optimizer``, ``--quant-states``,
    ``--reuse-fp32-param`` or ``--swap-optimizer`` have it."""
    optimizer, flags = patches.original(TARGET)(*args, **kwargs), loop_arguments()
    if getattr(flags, "optimizer_selection", None) == "fused_ema_adamw":
        averages.keep_averages(optimizer, flags.ema_decay)
    if getattr(flags, "o2_optimizer", False):
        narrow_moments(optimizer)
    if form := getattr(flags, "quant_states", None):
        scale_moments(optimizer, form, args[1] if len(args) > 1 else kwargs["model_chunks"])
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
    for part in _adams(optimizer, "--o2-optimizer"):
        part.optimizer.narrowed = _in_bfloat16


def scale_moments(optimizer: Any, form: str, chunks: list[Any]) -> None:
    """Adam keeps its moments in 8 bits between steps (:mod:`mindspeed_fx.megatron.scaled_moments`): 6 bytes a main
    weight less, but of embeddings and of the last projection.

    Args:
        form: one of :data:`scaled_moments.BLOCKS`.
        chunks: the model.

    Raises:
        ValueError: the optimizer is another package's, whose moments have one type.
    """
    for part in _adams(optimizer, f"--quant-states {form}"):
        scaled_moments.keep_wide(part, chunks)
        part.optimizer.narrowed = functools.partial(scaled_moments.scaled, form)


def _in_bfloat16(parameter: Tensor, name: str, moment: Tensor) -> Tensor:
    return moment.to(torch.bfloat16)


def _adams(optimizer: Any, flag: str) -> list[Any]:
    types = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
    return adams_of(optimizer, f"{flag} narrows the moments of", f"{types}, or --optimizer adam")
