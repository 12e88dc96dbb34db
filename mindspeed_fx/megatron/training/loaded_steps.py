"""A checkpoint of ``--ckpt-format torch_dist`` that FSDP2 reads: the number of steps too.

Megatron loads weights and moments into the tensors that are there and gives the optimizer nothing more
(``skip_load_to_model_and_opt``), so that Adam would begin to count its steps at one again: its first steps after a
resume would be several times as long.
"""

from __future__ import annotations

from typing import Any

from mindspeed_fx.megatron import patches
from mindspeed_fx.megatron.patches import EVERYWHERE, Patch

LOAD = "megatron.training.checkpointing:load_checkpoint"
READ = "megatron.training.checkpointing:_load_base_checkpoint"

_loading: list[Any] = []
"""Optimizers whose tensors are loaded where they lie, while a checkpoint is."""


def load_checkpoint(model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """``load_checkpoint``, which also sets the number of steps."""
    load = patches.original(LOAD)
    if not kwargs.get("skip_load_to_model_and_opt") or optimizer is None:
        return load(model, optimizer, *args, **kwargs)
    _loading.append(optimizer)
    try:
        return load(model, optimizer, *args, **kwargs)
    finally:
        _loading.pop()


def load_base_checkpoint(*args: Any, **kwargs: Any) -> Any:
    """``_load_base_checkpoint``: (states, ...), with ``rank0`` those alone that are not tensors."""
    result = patches.original(READ)(*args, **kwargs)
    states = result[0] or {}
    if _loading and "optimizer" in states and not kwargs.get("rank0"):
        set_steps(_loading[-1], states["optimizer"])
    return result


def set_steps(optimizer: Any, saved: Any) -> None:
    """Give the groups of Megatron's optimizer the number of steps in its saved state."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    for number, part in enumerate(parts):
        state = saved if len(parts) == 1 else saved[number]
        state = state.get("optimizer", state)
        groups = part._filter_and_reorder_param_groups(part.optimizer.param_groups, state["param_groups"])
        common = state.get("state", {}).get("common_step")
        for group, before in zip(part.optimizer.param_groups, groups, strict=True):
            if "step" in before:
                group["step"] = before["step"]
            elif common is not None:
                for parameter in group["params"]:
                    part.optimizer.state[parameter]["step"] = common.clone()


def table() -> list[Patch]:
    """The patches of Megatron's checkpoints."""
    reason = "FSDP2 loads tensors where they lie, and would count steps from one again"
    return [Patch(LOAD, load_checkpoint, reason, EVERYWHERE), Patch(READ, load_base_checkpoint, reason, EVERYWHERE)]
