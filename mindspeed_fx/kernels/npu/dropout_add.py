"""Dropout on NPU: a kernel of our own, or where it is not taken torch's operator and additions around it.

The mask of ``native_dropout`` is bits there (see passes/fusion/dropout_add_seeded.py), so that its first result, for
ones, says what it
kept: the numbers are those of the unfused model, the mask is one bool an element.
"""

from __future__ import annotations

import torch

from mindspeed_fx.kernels import triton
from mindspeed_fx.kernels.dropout_add import dropout_add
from mindspeed_fx.kernels.dropout_add_seeded import dropout_add_seeded, dropout_add_seeded_backward
from mindspeed_fx.kernels.npu import check_types, lowering

triton.on_npu(dropout_add_seeded)
triton.on_npu(dropout_add_seeded_backward)


@lowering(
    dropout_add,
    "aten native_dropout, products and additions",
    lambda x, bias, residual, p: check_types(x=x, bias=bias, residual=residual),
)
def _dropout_add(x, bias, residual, p):
    y = x if bias is None else x + bias
    mask = torch.native_dropout(torch.ones_like(y), p, True)[0] != 0
    return (residual + y * (mask.to(y.dtype) * (1 / (1 - p)))).contiguous(), mask
