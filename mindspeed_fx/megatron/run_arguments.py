"""The arguments of the run, as Megatron's training package has parsed them."""

from __future__ import annotations

import sys
from argparse import Namespace


def training_arguments() -> Namespace | None:
    """The namespace of Megatron's training script; None where there is none, or none yet."""
    module = sys.modules.get("megatron.training.global_vars")
    return getattr(module, "_GLOBAL_ARGS", None)


def loop_arguments() -> Namespace:
    """The arguments that functions of ``megatron.training.training`` get: its callers may exchange its ``get_args``."""
    from megatron.training import training

    return training.get_args()
