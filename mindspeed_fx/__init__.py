"""mindspeed_fx: MindSpeed as a ``torch.compile`` backend.

    step = torch.compile(model, backend="mindspeed")

Importing this package is optional (the backend is found by its entry point) and cheap; it gives :func:`accumulate`, :func:`compile`,
:func:`explain`, :func:`in_parts`, :func:`parallelize` with its :class:`Plan`, :func:`pipeline_stage`, :func:`plan`, :func:`register_with_accelerate`, :func:`simulate`, :func:`split_backward`, :func:`step_in_backward`, :mod:`mindspeed_fx.passes` and the version.
"""

from __future__ import annotations

import importlib
import os
from typing import Any, Callable

import torch

from mindspeed_fx._version import __version__

__all__ = ["Plan", "__version__", "accumulate", "compile", "cross_compile", "explain", "in_parts", "parallelize", "passes", "pipeline_stage", "plan", "register_with_accelerate", "restore_torch_compile", "simulate", "split_backward", "step_in_backward"]


def compile(model: Callable, *, options: dict[str, Any] | None = None, fullgraph: bool = False, dynamic: bool | None = None) -> Callable:
    """``torch.compile(model, backend="mindspeed", ...)``, also where another library has replaced ``torch.compile``.

    Args:
        model: module or function.
        options: see :class:`mindspeed_fx.options.Options`.
        fullgraph, dynamic: as in ``torch.compile``.
    """
    from mindspeed_fx import compat

    return compat.compile_with_backend(model, options=options, fullgraph=fullgraph, dynamic=dynamic)


def restore_torch_compile() -> None:
    """Put torch's own ``torch.compile`` back after another library replaced it by a pass-through."""
    torch.compile = _torch_compile


def _is_torchs_own(function: Any) -> bool:
    return getattr(function, "__module__", None) == "torch" and getattr(function, "__qualname__", None) == "compile"


def _replacement_error() -> str:
    found = f"{getattr(torch.compile, '__module__', '?')}.{getattr(torch.compile, '__qualname__', torch.compile)}"
    return (
        f'torch.compile has been replaced by {found}, so torch.compile(model, backend="mindspeed") would silently do nothing '
        "(mindspeed.megatron_adaptor installs such a pass-through). Ways out: import mindspeed_fx before it and use "
        "mindspeed_fx.compile(model) or mindspeed_fx.restore_torch_compile(); or set MINDSPEED_FX_RESTORE_COMPILE=1, and "
        "importing mindspeed_fx puts torch's own back."
    )


def _torch_compile(model: Callable | None = None, **kwargs: Any) -> Callable:
    """Stands in for torch's own function when that was lost before we were imported."""
    from mindspeed_fx import compat

    if model is None:
        return lambda m: _torch_compile(m, **kwargs)
    return compat.rebuilt_torch_compile(model, **kwargs)


# A reference under a name that a patch sweeping for attributes called "compile" does not touch.
if _is_torchs_own(torch.compile):
    _torch_compile = torch.compile  # noqa: F811
elif os.environ.get("MINDSPEED_FX_RESTORE_COMPILE") == "1":
    restore_torch_compile()
elif getattr(torch.compile, "__name__", "") != "_torch_compile":
    raise RuntimeError(_replacement_error())


def __getattr__(name: str) -> Any:
    if name in ("parallelize", "simulate"):
        return getattr(importlib.import_module(f"mindspeed_fx.passes.sharding.{name}"), name)
    if name == "accumulate":
        return importlib.import_module("mindspeed_fx.accumulation").accumulate
    if name == "register_with_accelerate":
        return importlib.import_module("mindspeed_fx.integrations").register_with_accelerate
    if name == "pipeline_stage":
        return importlib.import_module("mindspeed_fx.passes.sharding.pipeline").pipeline_stage
    if name == "plan":
        return importlib.import_module("mindspeed_fx.passes.sharding.search").plan
    if name == "Plan":
        return importlib.import_module("mindspeed_fx.passes.sharding.plan").Plan
    if name == "explain":
        return importlib.import_module("mindspeed_fx.report.explain").explain
    if name == "cross_compile":
        return importlib.import_module("mindspeed_fx.cross.compile").cross_compile
    if name == "in_parts":
        return importlib.import_module("mindspeed_fx.passes.overlap.parts").in_parts
    if name == "step_in_backward":
        return importlib.import_module("mindspeed_fx.passes.overlap.optimizer").step_in_backward
    if name == "split_backward":
        return importlib.import_module("mindspeed_fx.pipelining").split_backward
    if name == "passes":
        return importlib.import_module("mindspeed_fx.passes")
    raise AttributeError(f"module 'mindspeed_fx' has no attribute {name!r}")
