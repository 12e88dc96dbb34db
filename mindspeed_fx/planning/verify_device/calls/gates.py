"""Calls of gates, activations and dropout."""

from __future__ import annotations

import itertools
from typing import Iterator

import torch

from mindspeed_fx.planning.verify_device.calls.makers import normal
from mindspeed_fx.planning.verify_device.calls.table import Call

ops = torch.ops.mindspeed


def glu_cases(dtype: torch.dtype) -> Iterator[Call]:
    """Gates, packed and of two tensors."""
    x, up, grad = normal(3, 5, 16, dtype=dtype), normal(3, 5, 8, dtype=dtype), normal(3, 5, 8, dtype=dtype)
    yield "swiglu-packed", ops.swiglu, (x,), "npu_swiglu"
    yield "swiglu_backward-packed", ops.swiglu_backward, (grad, x), "npu_swiglu_backward"
    yield "swiglu-two", ops.swiglu, (up, grad), "triton, one read"
    yield "swiglu_backward-two", ops.swiglu_backward, (grad, up, up + 1), "triton, both gradients in one read"
    for activation in ("gelu", "gelu_tanh", "relu", "sigmoid"):
        kernel = "npu_geglu" if activation.startswith("gelu") else "triton, one read"
        backward = (
            "npu_geglu, npu_geglu_grad" if activation.startswith("gelu") else "triton, both gradients in one read"
        )
        yield f"glu-packed-{activation}", ops.glu, (x, None, activation), kernel
        yield f"glu_backward-packed-{activation}", ops.glu_backward, (grad, x, None, activation), backward
        yield f"glu-two-{activation}", ops.glu, (up, up + 1, activation), "triton, one read"
        yield (
            f"glu_backward-two-{activation}",
            ops.glu_backward,
            (grad, up, up + 1, activation),
            "triton, both gradients in one read",
        )
    for wide in (False, True):
        weight = normal(3, 5, 1, dtype=torch.float32 if wide else dtype)
        yield f"weighted_swiglu-packed-{wide}", ops.weighted_swiglu, (x, None, weight), "npu_swiglu and product"
        yield (
            f"weighted_swiglu_backward-packed-{wide}",
            ops.weighted_swiglu_backward,
            (grad, x, None, weight),
            "npu_swiglu, npu_swiglu_backward and products",
        )
        yield f"weighted_swiglu-two-{wide}", ops.weighted_swiglu, (up, up + 1, weight), "aten silu and products"
        yield (
            f"weighted_swiglu_backward-two-{wide}",
            ops.weighted_swiglu_backward,
            (grad, up, up + 1, weight),
            "aten silu_backward and products",
        )


def activation_cases(dtype: torch.dtype) -> Iterator[Call]:
    """Activations, clipped gates, dropout."""
    x, grad = normal(3, 5, 8, dtype=dtype), normal(3, 5, 8, dtype=dtype)
    turned = normal(5, 3, 8, dtype=dtype).transpose(0, 1)  # results are stored in order all the same
    yield "activation-quick", ops.activation, (turned, "quick_gelu"), "npu_fast_gelu"
    yield "activation_backward-quick", ops.activation_backward, (grad, turned, "quick_gelu"), "npu_fast_gelu_backward"
    yield "activation-squared", ops.activation, (x, "squared_relu"), "aten relu and product"
    yield "activation_backward-squared", ops.activation_backward, (grad, x, "squared_relu"), "aten relu and products"
    packed = normal(3, 5, 16, dtype=dtype)
    for alpha, (gate, up), interleaved in itertools.product((1.702, 1.0), ((packed, None), (x, x + 1)), (False, True)):
        if up is not None and interleaved:
            continue
        name, settings = f"{alpha}-{'packed' if up is None else 'two'}-{interleaved}", (alpha, 0.7, 1.0, interleaved)
        quick = alpha == 1.702
        yield (
            f"clipped_swiglu-{name}",
            ops.clipped_swiglu,
            (gate, up, *settings),
            "npu_fast_gelu, aten clamps and products" if quick else "aten clamps, sigmoid and products",
        )
        yield (
            f"clipped_swiglu_backward-{name}",
            ops.clipped_swiglu_backward,
            (grad, gate, up, *settings),
            "npu_fast_gelu and its backward, aten clamps and products"
            if quick
            else "aten clamps, sigmoid and products",
        )
    for bias in (None, normal(8, dtype=dtype)):
        yield (
            f"dropout_add-{bias is None}",
            ops.dropout_add,
            (x, bias, grad, 0.0),
            "aten native_dropout, products and additions",
        )
        seed = torch.tensor([3, 5], dtype=torch.int32)
        yield (
            f"dropout_add_seeded-{bias is None}",
            ops.dropout_add_seeded,
            (x, bias, grad, seed, 0.3),
            "triton, mask drawn in place",
        )
        yield (
            f"dropout_add_seeded_backward-{bias is None}",
            ops.dropout_add_seeded_backward,
            (grad, seed, 0.3),
            "triton, mask drawn again",
        )
