"""Gradients of SwiGLU and of SwiGLU times a weight per row on CPU, in one pass over the rows.

Code generated from the formulas goes over the rows two or three times, once for each gradient, and keeps float32 values
of the whole tensor between, since Inductor computes a sigmoid that several loops read once. Measured by
benchmarks/moe_gloo.py.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from mindspeed_fx.compat import cpp
from mindspeed_fx.kernels import swiglu, weighted_swiglu
from mindspeed_fx.kernels.base import as_rows, operator
from mindspeed_fx.kernels.cpu.attention_flash import TYPES


class _Gate(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "width", "threads", "type")),
        *((name, ctypes.c_void_p) for name in ("grad", "gate", "up")),
        *((name, ctypes.c_int64) for name in ("grad_row", "gate_row", "up_row")),
        *((name, ctypes.c_void_p) for name in ("dgate", "dup")),
        *((name, ctypes.c_int64) for name in ("dgate_row", "dup_row")),
        *((name, ctypes.c_void_p) for name in ("weight", "dweight")),
    ]


def problem(grad: Tensor, x: Tensor, up: Tensor | None, weight: Tensor) -> str | None:
    """Why the kernel cannot run on these, real or fake; None when it can. Begins to build it when it can."""
    types = {t.dtype for t in (grad, x, up) if t is not None}
    if len(types) > 1 or x.dtype not in TYPES or x.device.type != "cpu":
        return f"{', '.join(sorted(map(str, types)))} on {x.device.type}; one of float32, bfloat16, float16 on cpu only"
    if weight.dtype not in TYPES:
        return f"weights of type {weight.dtype}"
    if reason := cpp.problem():
        return reason
    cpp.start()
    return None


@operator(
    "gate_gradient(Tensor grad, Tensor x, Tensor? up, Tensor weight) -> (Tensor, Tensor, Tensor)",
    weighted_swiglu.fake_backward,
    opaque=True,
)
def gate_gradient(grad: Tensor, x: Tensor, up: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``mindspeed::weighted_swiglu_backward``, whose reference runs where the kernel cannot.

    Args:
        grad: [..., ffn], float32, bfloat16 or float16 on cpu.
        x: gate [..., ffn], or gate and up packed [..., 2 * ffn] where ``up`` is None, of the same type.
        up: [..., ffn], of the same type, or None.
        weight: [..., 1], any of these types.

    Returns:
        dx, dup (empty where ``up`` is None) and dweight, computed in float32, of their arguments' types.
    """
    if problem(grad, x, up, weight) or not grad.numel() or cpp.function("gate_gradient") is None:
        return weighted_swiglu.weighted_swiglu_backward.reference(grad, x, up, weight)
    dx, dup, dweight = weighted_swiglu.fake_backward(grad, x, up, weight)
    rows = [_rows(t) for t in (grad, *swiglu.halves(x, up))]
    results = [as_rows(t) for t in swiglu.halves(dx, None if up is None else dup)]
    scale = weight.reshape(-1).float().contiguous()
    total = torch.empty_like(scale)
    data = _Gate(
        *rows[0].shape,
        torch.get_num_threads(),
        TYPES.index(x.dtype),
        *(t.data_ptr() for t in rows),
        *(t.stride(0) for t in rows),
        *(t.data_ptr() for t in results),
        *(t.stride(0) for t in results),
        scale.data_ptr(),
        total.data_ptr(),
    )
    cpp.call("gate_gradient", ctypes.byref(data))
    return dx, dup, dweight.copy_(total.view(dweight.shape))


def _rows(x: Tensor) -> Tensor:
    rows = as_rows(x)
    return rows if rows.stride(1) == 1 else rows.contiguous()


gate_gradient.shard(weighted_swiglu.weighted_swiglu_backward.sharding)
gate_gradient.costs(weighted_swiglu.weighted_swiglu_backward.cost)


@weighted_swiglu.weighted_swiglu_backward.lower("cpu")("one pass over the rows", problem)
def _weighted(grad, x, up, weight):
    return gate_gradient.overload(grad, x, up, weight)
