"""SwiGLU times a weight per row and its gradients on CPU, in one pass over the rows each.

Code that Inductor generates from the formulas goes over the rows two or three times and keeps float32 values of whole
tensors between: those of up behind a cast, and a sigmoid that several loops read. Measured by benchmarks/moe_gloo.py.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from mindspeed_fx.compat import cpp
from mindspeed_fx.kernels import swiglu
from mindspeed_fx.kernels.base import as_rows, operator
from mindspeed_fx.kernels.cpu.attention_flash import TYPES
from mindspeed_fx.kernels.weighted_swiglu import (
    fake_backward,
    gradient_cost,
    product_cost,
    strategies,
    strategies_backward,
    weighted_swiglu,
    weighted_swiglu_backward,
)


class _Rows(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("stride", ctypes.c_int64)]


class _Gate(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "width", "threads", "type")),
        *((name, _Rows) for name in ("gate", "up", "out", "grad", "dgate", "dup")),
        *((name, ctypes.c_void_p) for name in ("weight", "dweight")),
    ]


def problem(x: Tensor, up: Tensor | None, weight: Tensor, grad: Tensor | None = None) -> str | None:
    """Why the kernels cannot run on these, real or fake; None when they can. Begins to build them when they can."""
    types = {t.dtype for t in (x, up, grad) if t is not None}
    if len(types) > 1 or x.dtype not in TYPES or x.device.type != "cpu":
        return f"{', '.join(sorted(map(str, types)))} on {x.device.type}; one of float32, bfloat16, float16 on cpu only"
    if weight.dtype not in TYPES:
        return f"weights of type {weight.dtype}"
    if reason := cpp.problem():
        return reason
    cpp.start()
    return None


@operator("gate_product(Tensor x, Tensor? up, Tensor weight) -> Tensor", lambda x, up, weight: swiglu.fake(x, up), True)
def gate_product(x: Tensor, up: Tensor | None, weight: Tensor) -> Tensor:
    """``mindspeed::weighted_swiglu``, whose reference runs where the kernel cannot.

    Args:
        x: gate [..., ffn], or gate and up packed [..., 2 * ffn] where ``up`` is None; float32, bfloat16 or float16 on
            cpu.
        up: [..., ffn], of the same type, or None.
        weight: [..., 1], any of these types.

    Returns:
        [..., ffn], contiguous, computed in float32, of the type of ``x``.
    """
    if problem(x, up, weight) or not _fit(x, up, weight) or cpp.function("gate_product") is None:
        return weighted_swiglu.reference(x, up, weight)
    out, scale = swiglu.fake(x, up), weight.reshape(-1).float().contiguous()
    _call("gate_product", scale, None, *swiglu.halves(x, up), out, None, None, None)
    return out


@operator(
    "gate_gradient(Tensor grad, Tensor x, Tensor? up, Tensor weight) -> (Tensor, Tensor, Tensor)", fake_backward, True
)
def gate_gradient(grad: Tensor, x: Tensor, up: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``mindspeed::weighted_swiglu_backward``, whose reference runs where the kernel cannot.

    Args:
        grad: [..., ffn], of the type of ``x``.
        x, up, weight: of :func:`gate_product`.

    Returns:
        dx, dup (empty where ``up`` is None) and dweight, computed in float32, of their arguments' types.
    """
    if problem(x, up, weight, grad) or not _fit(x, up, weight, grad) or cpp.function("gate_gradient") is None:
        return weighted_swiglu_backward.reference(grad, x, up, weight)
    dx, dup, dweight = fake_backward(grad, x, up, weight)
    scale = weight.reshape(-1).float().contiguous()
    total = torch.empty_like(scale)
    results = swiglu.halves(dx, None if up is None else dup)
    _call("gate_gradient", scale, total, *swiglu.halves(x, up), None, grad, *results)
    return dx, dup, dweight.copy_(total.view(dweight.shape))


def _fit(x: Tensor, up: Tensor | None, weight: Tensor, grad: Tensor | None = None) -> bool:
    """Whether there is something to compute and every size is that of the schema: the kernels do not look, and the
    references broadcast, or say what is wrong.
    """
    halves = swiglu.halves(x, up)
    shape = halves[0].shape
    others = (*halves[1:], *([] if grad is None else [grad]))
    return x.numel() > 0 and weight.shape == (*shape[:-1], 1) and all(t.shape == shape for t in others)


def _call(kernel: str, weight: Tensor, dweight: Tensor | None, gate: Tensor, *others: Tensor | None) -> None:
    """Run ``kernel`` on gate, up, out, grad, dgate and dup: [..., ffn], or None where it has no use for one."""
    rows = [_rows(gate), *(None if t is None else _rows(t) for t in others)]  # copies live until the kernel ends
    data = _Gate(
        weight.numel(),
        gate.shape[-1],
        torch.get_num_threads(),
        TYPES.index(gate.dtype),
        *(_Rows() if t is None else _Rows(t.data_ptr(), t.stride(0)) for t in rows),
        weight.data_ptr(),
        None if dweight is None else dweight.data_ptr(),
    )
    cpp.call(kernel, ctypes.byref(data))


def _rows(x: Tensor) -> Tensor:
    """[rows, ffn], each row contiguous; results are."""
    rows = as_rows(x)
    return rows if rows.stride(1) == 1 else rows.contiguous()


gate_product.shard(strategies)
gate_product.costs(product_cost)
gate_gradient.shard(strategies_backward)
gate_gradient.costs(gradient_cost)


@weighted_swiglu.lower("cpu")("one pass over the rows", problem)
def _product(x, up, weight):
    return gate_product.overload(x, up, weight)


@weighted_swiglu_backward.lower("cpu")(
    "one pass over the rows", lambda grad, x, up, weight: problem(x, up, weight, grad)
)
def _gradients(grad, x, up, weight):
    return gate_gradient.overload(grad, x, up, weight)
