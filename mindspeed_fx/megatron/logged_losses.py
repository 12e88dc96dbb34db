"""The places where Megatron adds up losses that it only logs: made before a graph is captured.

Megatron makes them in the first forward, which a graph would capture: the second forward would be another one.
"""

from __future__ import annotations

from typing import Any

import torch

from mindspeed_fx.megatron.groups import current_device

_GROUPS = {"reduce_group": None, "avg_group": None}
_MOE_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}


def prepare(config: Any) -> None:
    """Make the places for the losses of a model with Megatron's ``config``; those that exist stay."""
    layers, ahead = config.num_layers, config.mtp_num_layers or 0
    if ahead:
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

        _fill(MTPLossLoggingHelper.tracker, ahead)
    if not config.num_moe_experts:
        return
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

    for name in _moe_names(config):
        _fill(get_moe_layer_wise_logging_tracker().setdefault(name, {"reduce_group_has_dp": False}), layers + ahead)


def _moe_names(config: Any) -> list[str]:
    balancing = config.moe_router_load_balancing_type
    kinds = [balancing] if isinstance(balancing, str) else balancing
    names = [_MOE_NAMES[kind] for kind in kinds if kind in _MOE_NAMES]
    return names + ["z_loss"] * (config.moe_z_loss_coeff is not None)


def _fill(tracker: dict[str, Any], places: int) -> None:
    tracker.setdefault("values", torch.zeros(places, device=current_device()))
    for name, value in _GROUPS.items():
        tracker.setdefault(name, value)
