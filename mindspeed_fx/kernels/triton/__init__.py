"""Triton kernels of the operators, one file each; triton itself is imported by the first launch, never by this package.

The kernels are plain ``tl`` in the subset that triton-ascend shares: a one-dimensional grid of persistent programs, row
width and tile as compile-time constants, partial sums instead of atomics, scalar 64-bit bases with 32-bit offsets. What
depends on a device (programs, tile, warps) is chosen by the launchers, with the help of ``launch.py``.

Each kernel is an opaque operator ``mindspeed::<operator>_triton``, so that Inductor calls it as one call, its caches
see only the call, and the same call runs in Triton's interpreter on CPU tensors.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from typing import Any, Callable

import torch
from torch import Tensor

from mindspeed_fx.compat.symbols import statically_known_true
from mindspeed_fx.kernels.base import Operator, operator
from mindspeed_fx.kernels.triton.launch import is_redirected

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

WIDTH = 2**18
"""Widest row: no kernel was compiled or checked beyond it."""


def kernel(
    of: Operator,
    fake: Callable[..., Any],
    launcher: str,
    what: str,
    supports: Callable[..., str | None],
    beats_codegen: bool | Callable[..., str | None] = True,
) -> None:
    """Give ``of`` a Triton kernel on "cuda"; :func:`on_npu` gives it to "npu" too.

    Args:
        of: the operator; the kernel takes and returns the same.
        fake: the operator's fake.
        launcher: "<file>.<function>" under this package.
        what: the kernel in a few words, for reports.
        supports: reason why these fake arguments are not for this kernel, or None. That triton is there is checked
            here.
        beats_codegen: whether to take it where Inductor could generate code that fuses with its neighbours, or the
            reason why not for these fake arguments, or None.
    """
    name = of.overload._schema.name
    schema = str(of.overload._schema).replace(name, f"{name}_triton", 1).removeprefix("mindspeed::")

    def run(*args: Any, **kwargs: Any) -> Any:
        if all(x.device.type == "cpu" for x in args if isinstance(x, torch.Tensor)) and unable(torch.device("cpu")):
            return of.reference(*args, **kwargs)  # a graph of another target run on cpu
        return load(launcher)(*args, **kwargs)

    result = operator(schema, fake, opaque=True)(run)
    result.shard(lambda *args: of.sharding(*args))
    result.costs(lambda *args, **kwargs: of.cost(*args, **kwargs))

    def refused(*args: Any, **kwargs: Any) -> str | None:
        return missing() or supports(*args, **kwargs)

    if callable(why := beats_codegen):
        beats_codegen = False
        of.lower("cuda")(f"triton, {what}", lambda *args, **kwargs: refused(*args, **kwargs) or why(*args, **kwargs))(
            result.overload
        )
    of.lower("cuda")(f"triton, {what}", refused, beats_codegen)(result.overload)
    KERNELS[of.name] = what, supports, beats_codegen, result


KERNELS: dict[str, tuple] = {}
"""Operator -> its kernel in words, what it supports, whether it beats generated code, and the operator that runs it."""


def on_npu(
    of: Operator,
    only: Callable[..., str | None] = lambda *args, **kwargs: None,
    through: Callable[[Callable], Callable] = lambda kernel: kernel,
) -> None:
    """The kernel of ``of`` on "npu" too, after the kernels that it has there already: where torch_npu has none.

    Args:
        of: an operator that has a :func:`kernel`.
        only: reason why these fake arguments are for torch_npu, or None.
        through: from the kernel's operator to what is called, where its arguments need a change.
    """
    what, supports, beats_codegen, result = KERNELS[of.name]
    of.lower("npu")(
        f"triton, {what}",
        lambda *args, **kwargs: missing_on_npu() or only(*args, **kwargs) or supports(*args, **kwargs),
        beats_codegen,
    )(through(result.overload))


@functools.cache
def missing() -> str | None:
    return None if importlib.util.find_spec("triton") else "triton is not installed"


STUBBED = "MINDSPEED_FX_STUB"
"""Set in a process whose torch_npu has stubs for CANN (mindspeed_fx.ascend.stub): graphs are made there for another
machine.
"""


@functools.cache
def missing_on_npu() -> str | None:
    """Why a real NPU of this process cannot run Triton; None also where graphs are only made, or run on cpu by
    references.
    """
    if "torch_npu" not in sys.modules or STUBBED in os.environ:
        return None
    if importlib.util.find_spec("triton") is None:
        return "triton-ascend is not installed"
    return None if importlib.util.find_spec("triton.backends.ascend") else "the installed triton is not triton-ascend"


def unable(device: torch.device) -> str | None:
    """Why Triton cannot run on tensors of ``device``; on cpu it can where launches are interpreted or go elsewhere."""
    if device.type == "cpu":
        return None if os.environ.get("TRITON_INTERPRET") == "1" or is_redirected() else "the tensors are on cpu"
    return {"cuda": missing, "npu": missing_on_npu}.get(device.type, lambda: f"no kernels for {device.type}")()


def load(name: str) -> Callable[..., Any]:
    """The function "<file>.<function>" of this package, which imports triton."""
    file, function = name.split(".")
    return getattr(importlib.import_module(f"{__name__}.{file}"), function)


PARTS = {"linear_cross_entropy_chunk": "linear_cross_entropy.chunk", "adamw": "adamw.step"}
"""Launchers that are no operator's, or that one calls on its way, by the name that
:func:`mindspeed_fx.ascend.kernels.call` gives them.
"""


LARGE = 2**24
"""Elements from which on a kernel faster than generated code takes longer than its launch, 0.1 ms of the host."""


def small(x: Tensor) -> str | None:
    """Why a kernel that is faster than generated code would be no gain, or None.

    On an H200 (benchmarks/results/2026-11-27-gpu_3.txt) the gradients of norms took 0.8 to 0.9 of the time of generated
    code at 64 million elements; at 8 million the launches of 25 kernels added 2.8 ms to a step of 13 ms, whose kernels
    took 11: from twice as many elements on the device computes for longer than the host launches.
    """
    return None if statically_known_true(x.numel() >= LARGE) else f"fewer than {LARGE} elements, or an unknown number"


APART = "generated code writes two gradients as fast"


def refuse(width: Any, **tensors: Tensor | None) -> str | None:
    """Why a kernel over rows of ``width`` elements cannot take ``tensors``, by name; None when it can.

    Each tensor must have one of :data:`DTYPES` and be [..., n] with rows of adjacent elements, the rows evenly spaced.
    """
    uneven = (
        f"the rows of {name} are not contiguous or not evenly spaced"
        for name, x in tensors.items()
        if x is not None and not _evenly_spaced_rows(x)
    )
    return refuse_types(width, **tensors) or next(uneven, None)


def refuse_types(width: Any, **tensors: Tensor | None) -> str | None:
    """:func:`refuse` for a kernel that takes any strides."""
    if not isinstance(width, int):
        return "the row width is symbolic"
    if not 0 < width <= WIDTH:
        return f"rows of {width} elements, the kernel takes 1 to {WIDTH}"
    others = (
        f"{name} is {x.dtype}".replace("torch.", "")
        for name, x in tensors.items()
        if x is not None and x.dtype not in DTYPES
    )
    return next(others, None)


def _evenly_spaced_rows(x: Tensor) -> bool:
    if not statically_known_true(x.stride(-1) == 1):
        return statically_known_true(x.shape[-1] == 1)
    dims = [(n, s) for n, s in zip(x.shape[:-1], x.stride()[:-1]) if not statically_known_true(n == 1)]
    return all(statically_known_true(outer == n * inner) for (_, outer), (n, inner) in zip(dims, dims[1:]))
