"""Calls of every operator that has an NPU kernel, both directions, and of steps, on tensors of the processor.

Types, layouts, masks and forms of arguments as models have them, at sizes of a few elements: what
``mindspeed-fx verify-device`` runs on a device, and the tests by emulation.
"""

from __future__ import annotations

from typing import Callable, Iterator

import torch

from mindspeed_fx.planning.verify_device.calls import (
    attention,
    convolutions,
    experts,
    gates,
    losses,
    norms,
    optimizers,
    recurrences,
    rotations,
    sparse,
)
from mindspeed_fx.planning.verify_device.calls.table import Call

FAMILIES: dict[str, Callable[[torch.dtype], Iterator[Call]]] = {
    "ring": attention.ring_cases,
    "norm": norms.norm_cases,
    "glu": gates.glu_cases,
    "activation": gates.activation_cases,
    "rope": rotations.rope_cases,
    "qk": rotations.qk_cases,
    "attention": attention.attention_cases,
    "statistics": attention.statistics_cases,
    "sparse": sparse.sparse_cases,
    "convolution": convolutions.convolution_cases,
    "recurrence": recurrences.recurrence_cases,
    "loss": losses.loss_cases,
    "moe": experts.moe_cases,
    "router": experts.router_cases,
    "inference": experts.inference_cases,
    "softmax": attention.softmax_cases,
    "megatron": experts.megatron_cases,
    "optimizer": optimizers.step_cases,
}


def cases(family: str, dtype: torch.dtype) -> list[Call]:
    """The calls of one family in one type, the same at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return list(FAMILIES[family](dtype))
