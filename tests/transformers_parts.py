"""What tests take of transformers, whose functions come and go between releases: there, or a skip that names it."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch


def part_of(module: str, name: str) -> Any:
    """``transformers.module.name``."""
    transformers = pytest.importorskip("transformers", reason="needs Hugging Face transformers")
    try:
        part = getattr(importlib.import_module(f"transformers.{module}"), name, None)
    except ModuleNotFoundError as error:
        if error.name != f"transformers.{module}":
            raise
        pytest.skip(f"transformers {transformers.__version__} has no {module}")
    if part is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name} in {module}")
    return part


def need_whole_experts() -> None:
    """Its experts as one module; those of earlier releases (4) loop over the experts that have tokens, at which Dynamo
    breaks the graph."""
    part_of("integrations.moe", "__name__")


def need_grouped_products() -> None:
    """Its experts' grouped product for every type; earlier releases (5.0) call ATen's, which is for bfloat16 alone."""
    part_of("integrations.moe", "__name__")
    if not hasattr(torch.ops.transformers, "grouped_mm_fallback"):
        pytest.skip("this transformers has grouped products of bfloat16 alone")
