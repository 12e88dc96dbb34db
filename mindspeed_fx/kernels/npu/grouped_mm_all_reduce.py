"""Several products and one sum over ranks on NPU: ``npu_grouped_matmul`` of pairs, and one all-reduce."""

from __future__ import annotations

import torch

from mindspeed_fx.kernels.grouped_mm_all_reduce import grouped, join
from mindspeed_fx.kernels.npu import check_types, first, lowering, within

npu, OP = torch.ops.npu, "npu_grouped_matmul"


def _supports(x, weight, bias, group):
    return first(
        within(f"{OP}: pairs", len(x), 1, 64),
        *(check_types((torch.float16, torch.bfloat16), x=a, weight=w) for a, w in zip(x, weight)),
    )


@lowering(grouped, f"{OP} of pairs, and an all-reduce", _supports, (OP,))
def _grouped(x, weight, bias, group):
    return join(npu.npu_grouped_matmul(x, weight, split_item=0, group_type=-1), bias, group)
