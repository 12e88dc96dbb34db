"""``torch.compile`` as torch has it, also where another package has put its own in the place."""

from __future__ import annotations

import os
from typing import Any, Callable

import torch

from mindspeed_fx import arguments


def compile(
    model: Callable, *, options: dict[str, Any] | None = None, fullgraph: bool = False, dynamic: bool | None = None
) -> Callable:
    """``torch.compile(model, backend="mindspeed", ...)``, also where another library has replaced ``torch.compile``.

    Args:
        model: module or function.
        options: see :class:`mindspeed_fx.options.Options`.
        fullgraph, dynamic: as in ``torch.compile``.

    Raises:
        ArgumentError: no module or function, options that are no mapping, a switch that is none. What is wrong with an
            option is said when the first graph is compiled.
    """
    arguments.check_callable("compile", "model", model)
    arguments.check_options("compile", options)
    arguments.check_bool("compile", "fullgraph", fullgraph)
    arguments.check_bool("compile", "dynamic", dynamic, optional=True)
    return compile_with_backend(model, options=options, fullgraph=fullgraph, dynamic=dynamic)


def compile_with_backend(
    model: Callable,
    *,
    backend: Any = "mindspeed",
    options: dict | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
) -> Callable:
    """Torch's own ``torch.compile`` with our backend, whatever ``torch.compile`` is now."""
    return _torch_compile(model, backend=backend, options=options, fullgraph=fullgraph, dynamic=dynamic)


def restore_torch_compile() -> None:
    """Put torch's own ``torch.compile`` back after another library replaced it by a pass-through."""
    torch.compile = _torch_compile


def torch_compile_replaced() -> str | None:
    """Why ``torch.compile`` is not torch's own, as after ``import mindspeed.megatron_adaptor``; None when it is."""
    ours = torch.compile is _torch_compile
    return None if ours or _is_torchs_own(torch.compile) else _replacement_error()


def _is_torchs_own(function: Any) -> bool:
    return getattr(function, "__module__", None) == "torch" and getattr(function, "__qualname__", None) == "compile"


def _replacement_error() -> str:
    result = f"{getattr(torch.compile, '__module__', '?')}.{getattr(torch.compile, '__qualname__', torch.compile)}"
    return (
        f'torch.compile has been replaced by {result}, so torch.compile(model, backend="mindspeed") would silently do '
        "nothing "
        "(mindspeed.megatron_adaptor installs such a pass-through). Ways out: import mindspeed_fx before it and use "
        "mindspeed_fx.compile(model) or mindspeed_fx.restore_torch_compile(); or set MINDSPEED_FX_RESTORE_COMPILE=1, "
        "and "
        "importing mindspeed_fx puts torch's own back."
    )


def _torch_compile(model: Callable | None = None, **kwargs: Any) -> Callable:
    """Stands in for torch's own function when that was lost before we were imported."""
    from mindspeed_fx.compat import dynamo

    if model is None:
        return lambda m: _torch_compile(m, **kwargs)
    return dynamo.rebuilt_torch_compile(model, **kwargs)


# A reference under a name that a patch sweeping for attributes called "compile" does not touch.
if _is_torchs_own(torch.compile):
    _torch_compile = torch.compile  # noqa: F811
elif os.environ.get("MINDSPEED_FX_RESTORE_COMPILE") == "1":
    restore_torch_compile()
elif getattr(torch.compile, "__name__", "") != "_torch_compile":
    raise RuntimeError(_replacement_error())
