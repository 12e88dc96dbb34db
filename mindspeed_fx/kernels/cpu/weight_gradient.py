"""Products with a transposed left operand on CPU, ``a^T b`` in float32: what weight gradients are.

oneDNN copies such an operand before it begins, and MKL's kernels for other vendors' processors leave part of the vector
units idle; here tiles of it are transposed into the cache and multiplied by oneDNN's small matrix product. Products
without a transposed operand run as fast in oneDNN itself (:mod:`mindspeed_fx.kernels.cpu.gemm`). Measured by
benchmarks/weight_gradient.py.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from mindspeed_fx.compat import cpp, dispatcher, symbols


def problem(a: Tensor, b: Tensor) -> str | None:
    """Why ``a.t() @ b`` cannot run here, or not faster than in MKL; None when it can. Begins to build the kernel when
    it can.

    Args:
        a: [k, m], real or fake.
        b: [k, n].
    """
    if not a.dtype == b.dtype == torch.float32 or a.device.type != "cpu":
        return f"{a.dtype} and {b.dtype} on {a.device.type}; float32 on cpu only"
    if not all(
        symbols.statically_known_true(x.stride(1) == 1) and symbols.statically_known_true(x.stride(0) == x.shape[1])
        for x in (a, b)
    ):
        return "an operand is not contiguous"
    if not dispatcher.onednn_beats_blas():
        return "measured on other vendors' processors only"
    if reason := cpp.problem():
        return reason
    cpp.start()
    return None


def weight_gradient(a: Tensor, b: Tensor, out: Tensor | None = None, scale: float = 1.0, add: bool = False) -> Tensor:
    """``out = scale * a.t() @ b``, or, with ``add``, ``out += ...``; for operands of which :func:`problem` says None.

    Args:
        a: [k, m], float32, contiguous.
        b: [k, n], float32, contiguous.
        out: [m, n], float32, contiguous; a new tensor where it is None.
        scale: factor on the product.
        add: keep what is in ``out`` and add to it.

    Returns:
        ``out``.
    """
    (k, m), n = a.shape, b.shape[1]
    out = a.new_empty((m, n)) if out is None else out
    if k == 0:
        return out if add else out.zero_()
    if cpp.function("weight_gradient") is None:
        return torch.addmm(out, a.t(), b, beta=int(add), alpha=scale, out=out)
    packed = torch.empty_like(b)
    size, data = ctypes.c_int64, ctypes.c_void_p
    cpp.call(
        "weight_gradient",
        size(m),
        size(n),
        size(k),
        data(a.data_ptr()),
        data(b.data_ptr()),
        data(out.data_ptr()),
        data(packed.data_ptr()),
        ctypes.c_float(scale),
        size(add),
        size(torch.get_num_threads()),
    )
    return out
