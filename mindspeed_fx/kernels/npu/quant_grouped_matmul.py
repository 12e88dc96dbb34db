"""8-bit grouped products on NPU: ``npu_grouped_matmul`` with scales. Rows without a group are undefined there."""

from __future__ import annotations

import torch

from mindspeed_fx.kernels.npu import check_types, first, lowering, within
from mindspeed_fx.kernels.npu.grouped_matmul import INNER, _zero_outside
from mindspeed_fx.kernels.quant_grouped_matmul import quant_grouped_matmul

npu, OP = torch.ops.npu, "npu_grouped_matmul"
SCALES = {torch.bfloat16: torch.bfloat16, torch.float16: torch.float32}
"""Type of the result -> that of the matrices' scales."""


def _supports(x, weight, offsets, scale, per_token_scale, dtype):
    return first(
        check_types((torch.int8,), x=x, weight=weight),
        f"{OP}: a result of {dtype}; valid: bfloat16, float16".replace("torch.", "") if dtype not in SCALES else None,
        within(f"{OP}: groups", weight.shape[0], 2, 1024),
        within(f"{OP}: k", weight.shape[1], 1, INNER),
        within(f"{OP}: n", weight.shape[2], 1, INNER),
    )


@lowering(quant_grouped_matmul, f"{OP} with scales", _supports, (OP,))
def _quant_grouped_matmul(x, weight, offsets, scale, per_token_scale, dtype):
    scales = {"scale": [scale.to(SCALES[dtype])]}
    if per_token_scale is not None:
        scales["per_token_scale"] = [per_token_scale.float()]
    out = npu.npu_grouped_matmul(
        [x],
        [weight],
        group_list=offsets.to(torch.int64),
        split_item=3,
        group_type=0,
        group_list_type=0,
        output_dtype=dtype,
        **scales,
    )[0]
    return _zero_outside(out, offsets)
