"""Matrix products of bfloat16 and float16 on CPU, summed in float32.

Where the processor has no instruction for these types oneDNN and MKL have no product of them, and ATen's own loops take
4 to 80 times as long as the product in float32. Here blocks of both operands are widened as they are laid out for
oneDNN's small product in float32, so that no copy of either is made. Operands of mixed types are served too: a gradient
in float32 times a narrow weight.

Where it has the instruction, ATen's products are as fast, but round what they return to 16 bits: a sum over several of
them, or a loss of logits in float32, pays copies of the whole. There blocks stay pairs of bfloat16 (those of a float32
operand beside a bfloat16 one are rounded), and sums are written, or added, in float32.
Measured by benchmarks/narrow_product.py.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from mindspeed_fx.compat import cpp, dispatcher
from mindspeed_fx.compat.placements import PARTIAL, REPLICATED
from mindspeed_fx.cost.operators import product
from mindspeed_fx.kernels.base import accumulation_dtype, operator
from mindspeed_fx.kernels.cpu.attention_flash import NARROW, TYPES


class _Matrix(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), *((n, ctypes.c_int64) for n in ("type", "batch", "row", "col"))]


class _Product(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("batch", "m", "n", "k", "threads", "add", "pairs")),
        *((name, _Matrix) for name in ("a", "b", "out")),
        ("bias", ctypes.c_void_p),
        ("packed", ctypes.c_void_p),
        ("scale", ctypes.c_float),
    ]


def problem(dtype: torch.dtype, device: str) -> str | None:
    """Why products of ``dtype`` do not run here, or not faster than ATen's; None when they do. Begins to build the
    kernel when they do.
    """
    if dtype not in NARROW or device != "cpu":
        return f"{dtype} on {device}; bfloat16 and float16 on cpu only"
    if dispatcher.multiplies_narrow(dtype):
        return f"this processor multiplies {dtype} itself"
    if reason := cpp.problem():
        return reason
    cpp.start()
    return None


def unable_to_sum(dtype: torch.dtype, device: str) -> str | None:
    """Why products of ``dtype`` cannot leave their sums in float32 as fast as rounded ones; None when they can, by
    :func:`multiply`. Begins to build the kernel when they can.
    """
    reason = problem(dtype, device)
    return None if reason is None or (device == "cpu" and _in_pairs(dtype)) else reason


def _in_pairs(*types: torch.dtype) -> bool:
    """Whether operands of these types are multiplied as pairs of bfloat16."""
    return torch.bfloat16 in types and torch.float16 not in types and cpp.multiplies_pairs()


def multiply(
    a: Tensor,
    b: Tensor,
    out: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float = 1.0,
    add: bool = False,
) -> Tensor:
    """``scale * a @ b + bias``, rounded once; or, with ``add``, that added to ``out``.

    Args:
        a: [m, k] or [batch, m, k], float32, bfloat16 or float16, in any layout; float32 beside bfloat16 is rounded
            where the processor multiplies pairs of bfloat16.
        b: [k, n] or [batch, k, n], of any of these types, likewise.
        out: [m, n] or [batch, m, n], in any layout; a new tensor of the type of ``a`` where it is None.
        bias: [n], of any of these types, or None.
        scale: factor on the product.
        add: add to what is in ``out``.

    Returns:
        ``out``.
    """
    out = a.new_empty((*a.shape[:-1], b.shape[-1])) if out is None else out
    is_served = a.dtype in TYPES and b.dtype in TYPES and a.numel() and b.numel() and not cpp.problem()
    if not is_served or cpp.function("narrow_product") is None:
        return _in_torch(a, b, out, bias, scale, add)
    if _layout(out)[-1] != 1:
        if bias is not None or _layout(out)[-2] != 1:
            return _in_torch(a, b, out, bias, scale, add)
        multiply(b.mT, a.mT, out.mT, scale=scale, add=add)  # the kernel writes rows
        return out
    a, b = _one_stride(a), _one_stride(b)
    bias = None if bias is None else bias.float().contiguous()
    *batch, m, k = a.shape
    data = _Product(
        *batch or [1],
        m,
        b.shape[-1],
        k,
        torch.get_num_threads(),
        add,
        _in_pairs(a.dtype, b.dtype),
        _matrix(a),
        _matrix(b),
        _matrix(out),
    )
    floats = cpp.function("narrow_product_floats")
    floats.restype = ctypes.c_int64
    packed = torch.empty(floats(ctypes.byref(data)), dtype=torch.float32)
    data.bias, data.packed, data.scale = None if bias is None else bias.data_ptr(), packed.data_ptr(), scale
    cpp.call("narrow_product", ctypes.byref(data))
    return out


def _one_stride(x: Tensor) -> Tensor:
    """``x``, or a copy of it, with its rows or its columns contiguous."""
    *_, row, col = _layout(x)
    return x if 1 in (row, col) else x.contiguous()


def _layout(x: Tensor) -> tuple[int, int, int, int]:
    """Number of the type, strides of batch, row and column; a stride along one element is 1."""
    row, col = (1 if x.shape[d] == 1 else x.stride(d) for d in (-2, -1))
    return TYPES.index(x.dtype), x.stride(0) if x.dim() == 3 else 0, row, col


def _matrix(x: Tensor) -> _Matrix:
    return _Matrix(x.data_ptr(), *_layout(x))


def _in_torch(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None, scale: float, add: bool) -> Tensor:
    """Where the kernel could not be built, there is nothing to multiply, or the type is another."""
    wide = accumulation_dtype(torch.promote_types(a.dtype, b.dtype))
    result = a.to(wide) @ b.to(wide) * scale
    result = result if bias is None else result + bias.to(wide)
    return out.copy_(result + out.to(wide) if add else result)


# --------------------------------------------------------------------------- the operator that graphs call


def _fake(a, b, bias=None, dtype=None):
    return a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=dtype)


@operator("narrow_product(Tensor a, Tensor b, Tensor? bias=None, ScalarType? dtype=None) -> Tensor", _fake, opaque=True)
def narrow_product(a: Tensor, b: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """``a @ b + bias``, summed in float32 and rounded once.

    Args:
        a: [m, k] or [batch, m, k], bfloat16 or float16 on cpu, in any layout.
        b: [k, n] or [batch, k, n], of the same type.
        bias: [n], or None.
        dtype: of the result; None: that of ``a``.

    Returns:
        [m, n] or [batch, m, n], contiguous.
    """
    return multiply(a, b, a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=dtype), bias)


@narrow_product.shard
def _sharding_rule(a, b, bias=None, dtype=None):
    first = a.ndim - 2
    rows = ([first], [first, REPLICATED, REPLICATED])
    columns = ([first + 1], [REPLICATED, first + 1, 0])
    summands = ([PARTIAL], [first + 1, first, PARTIAL])
    return [rows, columns, summands] + ([([0], [0, 0, REPLICATED])] if first else [])


@narrow_product.costs
def _cost(out, a, b, bias=None, dtype=None):
    return product(out, a.shape[-1], a, b, bias, vector=out.numel if bias is not None else 0)
