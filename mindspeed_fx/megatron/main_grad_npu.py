"""Weight gradients added to ``main_grad`` on NPU: ``npu_grouped_matmul_add_`` with one group.

It multiplies 16-bit factors and adds in float32, as MindSpeed's ``npu_matmul_add_fp32`` does, which torch_npu does not
have: nothing is widened, and no gradient of the size of the weight is written. It takes rows of less than 65536
elements, so that a head with a larger vocabulary is added part by part.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_fx.compat.fake import hint
from mindspeed_fx.kernels.npu import FLOATS, check_types, first, lowering, within
from mindspeed_fx.kernels.npu.grouped_matmul import INNER
from mindspeed_fx.megatron.main_grad import added, product_of

npu, OP = torch.ops.npu, "npu_grouped_matmul_add_"


def _supports(main_grad: Tensor, grad: Tensor, x: Tensor, key: int) -> str | None:
    return first(
        check_types((torch.float32,), main_grad=main_grad),
        check_types((torch.float16, torch.bfloat16), grad=grad),
        check_types((grad.dtype,), x=x),
        f"{OP}: main_grad is not contiguous in memory" if not main_grad.is_contiguous() else None,
        within(f"{OP}: columns of the weight", x.shape[1], 1, INNER),
    )


@lowering(added, OP, _supports, (OP,))
def _add(main_grad, grad, x, key):
    ends = torch.full((1,), grad.shape[0], dtype=torch.int64, device=grad.device)
    parts = -(-hint(grad.shape[1]) // INNER)
    for into, rows in zip(main_grad.chunk(parts), grad.chunk(parts, 1)) if parts > 1 else [(main_grad, grad)]:
        npu.npu_grouped_matmul_add_(into.unsqueeze(0), rows, x, ends)
    _announce(main_grad, key)


@lowering(
    added,
    "aten addmm_",
    lambda main_grad, grad, x, key: first(
        check_types(FLOATS, main_grad=main_grad), check_types((main_grad.dtype,), grad=grad, x=x)
    ),
)
def _addmm(main_grad, grad, x, key):
    main_grad.addmm_(grad.t(), x)
    _announce(main_grad, key)


def _announce(main_grad: Tensor, key: int) -> None:
    if key >= 0:
        torch.ops.mindspeed.announce_gradient(main_grad, key)


@lowering(
    product_of,
    "aten linear",
    lambda x, weight, main_grad, dummy, key: first(check_types(x=x), check_types((x.dtype,), weight=weight)),
)
def _linear(x, weight, main_grad, dummy, key):
    return torch.mm(x.flatten(0, -2), weight.t()).view(*x.shape[:-1], weight.shape[0])
