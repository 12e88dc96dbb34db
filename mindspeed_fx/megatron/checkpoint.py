"""Megatron's activation checkpointing in a form that is captured: torch's own, whose recomputation the compiler
plans.
"""

from __future__ import annotations

import pickle
import signal
from typing import Any, Callable

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from mindspeed_fx.compat import dynamo
from mindspeed_fx.megatron import missing, patches


def allow_side_effects() -> Callable[[], None]:
    """Let Dynamo capture a checkpointed function that advances the random-number tracker; returns what takes that back.

    Recomputation inside a graph starts from the tracker's old state, which is an input of the operator that draws the
    noise, so that skipping the side effect there, as this allows, is what is wanted.
    """
    return dynamo.allow_side_effects_under_checkpoint()


def allow_signals() -> None:
    """Let a checkpoint be read that holds the signal of ``--exit-signal`` by its own name, as Python 3.10 writes it:
    Megatron-core names the class of signals alone to torch, and could not read its own checkpoints there."""
    if b"SIGTERM" in pickle.dumps(signal.SIGTERM):
        torch.serialization.add_safe_globals([(s, f"signal.{s.name}") for s in signal.Signals])


def checkpoint(function: Callable, distribute_saved_activations: bool, *args: Any) -> Any:
    """``tensor_parallel.checkpoint``; saved activations stay whole on every rank."""
    return torch_checkpoint(function, *args, use_reentrant=False)


WITHOUT_OUTPUT = "tensor_parallel.random:CheckpointWithoutOutput"


HAS_ENGINE = missing.has_transformer_engine()
"""Asked once: Dynamo reads what asks it below."""


def without_output_init(self: Any, fp8: Any = False) -> None:
    """``CheckpointWithoutOutput.__init__``, which takes False for a recipe of fp8 and asks TransformerEngine for it.
    Products of 8 bits that are ours round the same numbers alike again."""
    patches.original(f"{WITHOUT_OUTPUT}.__init__")(self, fp8 or None if HAS_ENGINE else None)


def checkpoint_without_output(self: Any, run_function: Callable, *args: Any) -> Any:
    """``CheckpointWithoutOutput.checkpoint``: an output that is recomputed is not kept either."""
    return torch_checkpoint(run_function, *args, use_reentrant=False)


def discard_output(self: Any, hook_tensor: Any) -> None:
    """``CheckpointWithoutOutput.discard_output_and_register_recompute``: nothing is left to do."""
