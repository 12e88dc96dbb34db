"""The end of a layer of inference on NPU: ``npu_mm_all_reduce_base`` with the residual as its third factor, and
``npu_rms_norm``; torch_npu has no call for both."""

from __future__ import annotations

import torch

from mindspeed_fx.compat import npu as npu_compat
from mindspeed_fx.kernels.mm_all_reduce_add_rms_norm import layer_end
from mindspeed_fx.kernels.npu import check_types, first, lowering

npu, OP = torch.ops.npu, "npu_mm_all_reduce_base"


def _supports(x1, x2, residual, gamma, group, eps, bias):
    kinds = {t.dtype for t in (x1, x2, residual, gamma)}
    return first(
        check_types((torch.float16, torch.bfloat16), x1=x1, x2=x2),
        f"{OP}: {', '.join(sorted(map(str, kinds)))}; valid: one type".replace("torch.", "")
        if len(kinds) > 1
        else None,
        f"{OP}: x1 has {x1.dim()} dimensions; valid: 2, 3" if x1.dim() not in (2, 3) else None,
    )


@lowering(layer_end, f"{OP} and npu_rms_norm", _supports, (OP, "npu_rms_norm"))
def _layer_end(x1, x2, residual, gamma, group, eps, bias):
    y = npu.npu_mm_all_reduce_base(x1, x2, npu_compat.hcom(group), bias=bias, x3=residual)
    return y, npu.npu_rms_norm(y, gamma, eps)[0]
