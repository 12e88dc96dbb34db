"""Modules that Megatron imports by habit and that cannot be imported here: each is answered by one that says, when it
is called, which flag asked for it.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any, Callable

BATCH_INVARIANT = "megatron.core.transformer.custom_layers.batch_invariant_kernels"


def answer_for_triton() -> Callable[[], None]:
    """Megatron's training imports its batch-invariant kernels, which need Triton, in every run; returns what takes the
    answer back.
    """
    if importlib.util.find_spec("triton") is not None or BATCH_INVARIANT in sys.modules:
        return lambda: None
    module = ModuleType(BATCH_INVARIANT, "Stands for kernels that need Triton.")
    module.is_batch_invariant_mode_enabled = lambda: False  # type: ignore[attr-defined]
    for name in ("enable_batch_invariant_mode", "disable_batch_invariant_mode", "set_batch_invariant_mode"):
        setattr(module, name, _refuse)
    sys.modules[BATCH_INVARIANT] = module
    return lambda: sys.modules.pop(BATCH_INVARIANT, None) and None


def has_transformer_engine() -> bool:
    """Whether it is installed."""
    return importlib.util.find_spec("transformer_engine") is not None


def is_te_min_version(version: str, check_equality: bool = True) -> bool:
    """``is_te_min_version`` where TransformerEngine is not installed: no version of it is there."""
    return False


def _refuse(*args: Any, **kwargs: Any) -> None:
    raise ImportError("--batch-invariant-mode needs Triton, which is not installed; leave the flag away")
