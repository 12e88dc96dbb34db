"""The feed-forward layer of inference on NPU: ``npu_ffn``, which takes gates in float16 alone and without experts."""

from __future__ import annotations

import torch

from mindspeed_fx.kernels.ffn import GATED, ffn
from mindspeed_fx.kernels.npu import check_types, first, lowering, within

npu, OP = torch.ops.npu, "npu_ffn"


def _supports(x, weight1, weight2, bias1, bias2, counts, activation):
    is_gate = activation in GATED
    return first(
        check_types((torch.float16, torch.bfloat16), x=x, weight1=weight1, weight2=weight2),
        f"{OP}: {activation} with experts; valid: without" if is_gate and counts is not None else None,
        f"{OP}: {activation} of {x.dtype}; valid: float16".replace("torch.", "")
        if is_gate and x.dtype != torch.float16
        else None,
        None if counts is None else within(f"{OP}: experts", len(counts), 1, 256),
        f"{OP}: {x.shape[0] - sum(counts)} rows without an expert" if counts and sum(counts) != x.shape[0] else None,
    )


@lowering(ffn, OP, _supports, (OP,))
def _ffn(x, weight1, weight2, bias1, bias2, counts, activation):
    # biases are float32 beside bfloat16
    wide = torch.float32 if x.dtype == torch.bfloat16 else x.dtype
    biases = {n: b.to(wide) for n, b in (("bias1", bias1), ("bias2", bias2)) if b is not None}
    return npu.npu_ffn(x, weight1, weight2, activation, expert_tokens=counts, **biases)
