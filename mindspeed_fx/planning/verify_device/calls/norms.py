"""Calls of RMSNorm and LayerNorm, alone and with the addition before them."""

from __future__ import annotations

import itertools
from typing import Iterator

import torch

from mindspeed_fx.planning.verify_device.calls.makers import normal, stored
from mindspeed_fx.planning.verify_device.calls.table import Call

ops = torch.ops.mindspeed


def norm_cases(dtype: torch.dtype) -> Iterator[Call]:
    """RMSNorm and LayerNorm."""
    for cast_first, weight in itertools.product((True, False), (None, dtype, torch.float32)):
        w = None if weight is None else normal(16, dtype=weight)
        name = f"{cast_first}-{str(weight)[6:]}"
        x = normal(3, 2, 16, dtype=dtype).transpose(0, 1)  # results are stored in order all the same
        y, rstd = ops.rms_norm(x, w, 1e-5, cast_first)
        yield f"rms_norm-{name}", ops.rms_norm, (x, w, 1e-5, cast_first), "npu_rms_norm"
        yield (
            f"rms_norm_backward-{name}",
            ops.rms_norm_backward,
            (torch.randn_like(y), x, w, rstd, cast_first, w is not None),
            "npu_rms_norm_backward",
        )
        residual = normal(3, 2, 16, dtype=dtype).transpose(0, 1)
        y, s, rstd = ops.add_rms_norm(x, residual, w, 1e-5, cast_first)
        plain = w is None or w.dtype == dtype
        yield (
            f"add_rms_norm-{name}",
            ops.add_rms_norm,
            (x, residual, w, 1e-5, cast_first),
            "npu_add_rms_norm" if plain else "addition and npu_rms_norm",
        )
        for grad_sum in (None, torch.randn_like(s)):
            args = (torch.randn_like(y), grad_sum, s, w, rstd, cast_first, w is not None)
            yield (
                f"add_rms_norm_backward-{name}-{grad_sum is None}",
                ops.add_rms_norm_backward,
                args,
                "npu_rms_norm_backward and addition",
            )
    for weight, bias in itertools.product((None, normal(16, dtype=dtype)), repeat=2):
        x, residual, name = (
            normal(2, 3, 16, dtype=dtype),
            normal(2, 3, 16, dtype=dtype),
            f"{weight is None}-{bias is None}",
        )
        y, mean, rstd = ops.layer_norm(x, weight, bias, 1e-5)
        needs = (weight is not None, bias is not None)
        yield f"layer_norm-{name}", ops.layer_norm, (x, weight, bias, 1e-5), "aten native_layer_norm"
        yield (
            f"layer_norm_backward-{name}",
            ops.layer_norm_backward,
            (torch.randn_like(y), x, weight, mean, rstd, *needs),
            "aten native_layer_norm_backward",
        )
        y, s, mean, rstd = ops.add_layer_norm(x, residual, weight, bias, 1e-5)
        yield f"add_layer_norm-{name}", ops.add_layer_norm, (x, residual, weight, bias, 1e-5), "npu_add_layer_norm"
        args = (torch.randn_like(y), torch.randn_like(s), s, weight, mean, rstd, *needs)
        yield (
            f"add_layer_norm_backward-{name}",
            ops.add_layer_norm_backward,
            args,
            "aten native_layer_norm_backward and addition",
        )
    strided = stored((4, 3, 16), (1, 0, 2), dtype)
    yield "rms_norm-strided", ops.rms_norm, (strided, normal(16, dtype=dtype), 1e-5, False), "npu_rms_norm"
