"""mindspeed_fx: MindSpeed as a ``torch.compile`` backend.

    step = torch.compile(model, backend="mindspeed")

Importing this package is optional (the backend is found by its entry point) and cheap; it gives :func:`accumulate`, :func:`compile`,
:func:`explain`, :func:`in_parts`, :func:`parallelize` with its :class:`Plan`, :func:`pipeline_stage`, :func:`plan`, :func:`register_with_accelerate`, :func:`simulate`, :func:`split_backward`, :func:`step_in_backward`, :mod:`mindspeed_fx.passes` and the version.
"""

from __future__ import annotations

import importlib
from typing import Any

from mindspeed_fx._version import __version__
from mindspeed_fx.torch_compile import compile, restore_torch_compile

__all__ = ["Plan", "__version__", "accumulate", "compile", "cross_compile", "explain", "in_parts", "parallelize", "passes", "pipeline_stage", "plan", "register_with_accelerate", "restore_torch_compile", "simulate", "split_backward", "step_in_backward"]


def __getattr__(name: str) -> Any:
    if name in ("parallelize", "simulate"):
        return getattr(importlib.import_module(f"mindspeed_fx.passes.sharding.{name}"), name)
    if name == "accumulate":
        return importlib.import_module("mindspeed_fx.training.accumulation").accumulate
    if name == "register_with_accelerate":
        return importlib.import_module("mindspeed_fx.integrations").register_with_accelerate
    if name == "pipeline_stage":
        return importlib.import_module("mindspeed_fx.planning.pipeline_stage").pipeline_stage
    if name == "plan":
        return importlib.import_module("mindspeed_fx.planning.search").plan
    if name == "Plan":
        return importlib.import_module("mindspeed_fx.sharding.plan").Plan
    if name == "explain":
        return importlib.import_module("mindspeed_fx.planning.explain").explain
    if name == "cross_compile":
        return importlib.import_module("mindspeed_fx.ascend.compile").cross_compile
    if name == "in_parts":
        return importlib.import_module("mindspeed_fx.training.in_parts").in_parts
    if name == "step_in_backward":
        return importlib.import_module("mindspeed_fx.training.optimizer_in_backward").step_in_backward
    if name == "split_backward":
        return importlib.import_module("mindspeed_fx.planning.split_backward").split_backward
    if name == "passes":
        return importlib.import_module("mindspeed_fx.passes")
    raise AttributeError(f"module 'mindspeed_fx' has no attribute {name!r}")
