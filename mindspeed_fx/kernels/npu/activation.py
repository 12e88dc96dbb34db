"""Activations on NPU: quick GELU, squared ReLU, clipped SwiGLU.

torch_npu's ``npu_fast_gelu`` is ``x / (1 + exp(-1.702 x))``: quick GELU, and the gate of gpt-oss' clipped SwiGLU. For
squared ReLU it has nothing. Its ``npu_clipped_swiglu`` has no gradient and is documented for inference products alone,
so that training calls the parts: what they are made of has kernels of its own, in the type of the model as the unfused
model runs them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_fx.kernels.activation import activation, activation_backward
from mindspeed_fx.kernels.npu import check_types, first, lowering, within

npu, aten = torch.ops.npu, torch.ops.aten

GELU, GELU_BACKWARD = ("npu_fast_gelu",), ("npu_fast_gelu_backward",)


# --------------------------------------------------------------------------- quick GELU, squared ReLU


def _quick(op: str, x: Tensor, kind: str, grad: Tensor | None = None) -> str | None:
    if kind != "quick_gelu":
        return f"{op}: the activation is {kind}; valid: quick_gelu"
    return first(check_types(x=x), check_types((x.dtype,), grad=grad), within(f"{op}: dimensions of x", x.dim(), 1, 8))


def _square(x: Tensor, kind: str, grad: Tensor | None = None) -> str | None:
    return first(
        f"the activation is {kind}; valid: squared_relu" if kind != "squared_relu" else None,
        check_types(x=x, grad=grad),
    )


@lowering(activation, "npu_fast_gelu", lambda x, kind: _quick("npu_fast_gelu", x, kind), GELU)
def _quick_gelu(x, kind):
    return npu.npu_fast_gelu(x).contiguous()


@lowering(
    activation_backward,
    "npu_fast_gelu_backward",
    lambda grad, x, kind: _quick("npu_fast_gelu_backward", x, kind, grad),
    GELU_BACKWARD,
)
def _quick_gelu_backward(grad, x, kind):
    return npu.npu_fast_gelu_backward(grad, x).contiguous()


@lowering(activation, "aten relu and product", _square)
def _squared_relu(x, kind):
    positive = torch.relu(x)
    return (positive * positive).contiguous()


@lowering(activation_backward, "aten relu and products", lambda grad, x, kind: _square(x, kind, grad))
def _squared_relu_backward(grad, x, kind):
    return torch.ops.aten.threshold_backward(grad * x * 2, x, 0).to(x.dtype).contiguous()
