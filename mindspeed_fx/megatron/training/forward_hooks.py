"""Hooks of ``--overlap-param-gather``, which wait for parameters before a module reads them, taken off and put on.

Megatron puts them on behind the first step that is taken, and takes them off and on around evaluation and saving,
whether they are there or not: in float16, while first steps are skipped, that is a KeyError.
"""

from __future__ import annotations

from typing import Any

from mindspeed_fx.megatron.patches import EVERYWHERE, Patch

TRAINING = "megatron.training.training"
REASON = "evaluation and saving while float16's first steps are skipped, with --overlap-param-gather"


def disable_forward_pre_hook(model_chunks: list[Any], param_sync: bool = True) -> None:
    """Take off the hooks of Megatron's DistributedDataParallel chunks that have them; gather parameters of all."""
    for chunk in model_chunks:
        if chunk.remove_forward_pre_hook_handles:
            chunk.disable_forward_pre_hook(param_sync=param_sync)
        elif param_sync:
            chunk.start_param_sync(force_sync=True)


def enable_forward_pre_hook(model_chunks: list[Any]) -> None:
    """Put hooks on chunks that have none."""
    for chunk in model_chunks:
        if not chunk.remove_forward_pre_hook_handles:
            chunk.enable_forward_pre_hook()


def table() -> list[Patch]:
    return [
        Patch(f"{TRAINING}:{function.__name__}", function, REASON, EVERYWHERE)
        for function in (disable_forward_pre_hook, enable_forward_pre_hook)
    ]
