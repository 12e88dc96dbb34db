"""Weight gradients added to one buffer on NPU: ``npu_grouped_matmul_add_``, of 16-bit factors and a float32 buffer."""

from __future__ import annotations

import torch

from mindspeed_fx.kernels.grouped_matmul_add import add, main_grad_product
from mindspeed_fx.kernels.npu import check_types, first, lowering, within
from mindspeed_fx.kernels.npu.grouped_matmul import INNER, _grouped_matmul, _supports_grouped

npu, OP = torch.ops.npu, "npu_grouped_matmul_add_"
NARROW = (torch.float16, torch.bfloat16)


def _supports(out, x, grad, offsets):
    return first(
        check_types((torch.float32,), out=out),
        check_types(NARROW, x=x, grad=grad),
        within(f"{OP}: groups", out.shape[0], 1, 1024),
        within(f"{OP}: k", x.shape[1], 1, INNER),
        within(f"{OP}: n", grad.shape[1], 1, INNER),
    )


@lowering(add, OP, _supports, (OP,))
def _add(out, x, grad, offsets):
    npu.npu_grouped_matmul_add_(out, x, grad, offsets.to(torch.int64))


@lowering(
    main_grad_product,
    "npu_grouped_matmul",
    lambda x, weight, offsets, main_grad: _supports_grouped(x, weight, offsets),
    ("npu_grouped_matmul",),
)
def _product(x, weight, offsets, main_grad):
    return _grouped_matmul(x, weight, offsets)
