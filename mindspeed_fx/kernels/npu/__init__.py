"""NPU kernels of the operators: which call of ``torch.ops.npu`` each becomes, and when it cannot.

One file per family. Every limit that torch_npu's documentation states is checked before a call is made and is named,
with the value that broke it, where the call is not. Where torch_npu is not installed the calls are emulated on CPU
(:mod:`mindspeed_fx.kernels.npu.emulation.registry`). The kernels of a real device have been traced, never run.
"""

from __future__ import annotations

import contextlib
import importlib.util
from typing import Any, Callable, Iterator, Sequence

import torch
from torch import Tensor

from mindspeed_fx.compat.fake import hint
from mindspeed_fx.kernels.base import Operator
from mindspeed_fx.kernels.npu.emulation import registry

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def lowering(
    of: Operator, kernel: str, supports: Callable[..., str | None], needs: tuple[str, ...] = ()
) -> Callable[[Callable], Callable]:
    """Decorator: the function is a kernel of ``of`` on "npu".

    Args:
        kernel: what runs, for reports.
        supports: the reason why these fake arguments are not for it, or None.
        needs: the ``npu::`` operators that it calls.
    """
    return of.lower("npu")(kernel, lambda *args, **kwargs: missing(needs) or supports(*args, **kwargs))


def missing(needs: tuple[str, ...]) -> str | None:
    """Why these ``npu::`` operators can't be called; None when they can, torch_npu's or ours."""
    if not needs:
        return None
    if not registry.present():
        if importlib.util.find_spec("torch_npu") is not None:
            return "torch_npu is installed but not imported"
        registry.define()
    registry.repair()
    absent = [name for name in needs if not hasattr(torch.ops.npu, name)]
    return f"this torch_npu has no {absent[0]}" if absent else None


_acl_graph = False


@contextlib.contextmanager
def acl_graph(on: bool) -> Iterator[None]:
    """Graphs that are lowered inside are captured as ACL graphs (codegen "npugraph_ex"), for which some operators take
    less.
    """
    global _acl_graph
    before, _acl_graph = _acl_graph, on
    try:
        yield
    finally:
        _acl_graph = before


def in_acl_graph() -> bool:
    """Whether the graph that is being lowered will be captured."""
    return _acl_graph


# --------------------------------------------------------------------------- what limits are written with


def first(*reasons: str | None) -> str | None:
    """The first limit that is broken."""
    return next((r for r in reasons if r is not None), None)


def within(what: str, value: Any, low: int, high: int) -> str | None:
    """``value`` in [low, high]; a symbolic size is judged by the size it was traced with."""
    return None if low <= hint(value) <= high else f"{what} is {hint(value)}; valid: {low} to {high}"


def check_types(allowed: tuple[torch.dtype, ...] = FLOATS, **tensors: Tensor | None) -> str | None:
    """Every tensor has one of the ``allowed`` types."""
    for name, x in tensors.items():
        if x is not None and x.dtype not in allowed:
            return f"{name} is {x.dtype}; valid: {', '.join(map(str, allowed))}".replace("torch.", "")
    return None


def promote_types(*tensors: Tensor | None) -> torch.dtype:
    """The common type of those that are there."""
    arguments = [x.dtype for x in tensors if x is not None]
    out = arguments[0]
    for dtype in arguments[1:]:
        out = torch.promote_types(out, dtype)
    return out


def dense_order(strides: Sequence[Any]) -> list[int]:
    """Dimensions from the outermost to the innermost in memory: permuted so, a dense tensor is contiguous."""
    return sorted(range(len(strides)), key=lambda i: (-hint(strides[i]), i))
