"""A matrix product written into place, by what is fastest on this processor.

Chosen when it runs, since the rows of a group (tokens of an expert) are data: a kernel of our own from some size on
where MKL leaves part of the vector units idle or nothing multiplies 16-bit types, else ATen's. One thread of an EPYC
with AVX-512, 437 rows, [512, 2048]: 8.3 ms by MKL, 4.3 by ``multiply``, 3.9 by ``weight_gradient``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_fx.compat import cpp, dispatcher
from mindspeed_fx.kernels.cpu import narrow_product, weight_gradient

WORK = 1 << 20
"""Multiplications from which a kernel's call pays: at 2^19, [64, 64] times [64, 128], both take as long."""
ROWS = 32
"""Rows of the result from which laying out the right operand pays: at 33, of [512, 2048], 679 and 705 us."""


def product_of(a: Tensor, b: Tensor, out: Tensor) -> None:
    """``out = a @ b``.

    Args:
        a: [m, k], in any layout.
        b: [k, n], of the type of ``a``.
        out: [m, n], in any layout, of that type or a wider one, in which sums are then made.

    Raises:
        ValueError: sizes that do not fit.
    """
    if a.shape[1] != b.shape[0] or out.shape != (a.shape[0], b.shape[1]):  # our kernels do not look
        raise ValueError(f"product of {list(a.shape)} and {list(b.shape)} into {list(out.shape)}")
    if out.stride(1) != 1 and out.stride(0) == 1:
        a, b, out = b.t(), a.t(), out.t()
    ask = narrow_product.problem if out.dtype == a.dtype else narrow_product.unable_to_sum
    if ask(a.dtype, a.device.type) is None:
        narrow_product.multiply(a, b, out)
    elif not _is_slow_in_blas(a, out):
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)
    elif out.is_contiguous() and a.stride(1) != 1 and weight_gradient.problem(a.t(), b) is None:
        weight_gradient.weight_gradient(a.t(), b, out)
    elif out.shape[0] >= ROWS:
        narrow_product.multiply(a, b, out)
    else:
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def _is_slow_in_blas(a: Tensor, out: Tensor) -> bool:
    if out.dtype != torch.float32 or out.device.type != "cpu" or out.numel() * a.shape[1] < WORK:
        return False
    return dispatcher.onednn_beats_blas() and cpp.problem() is None
