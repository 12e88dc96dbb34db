"""Gated linear units on NPU.

torch_npu's kernels take gate and up as the halves of one tensor. Where they are two tensors, joining them moves more
bytes than it saves (passes over a tensor of the gate's size: joined 7 forward and 13 backward, activation and product 5
and 11, one kernel 3 and 5), so a Triton kernel takes them; without triton-ascend the activation and the product are
called, as the unfused model does.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_fx.kernels import triton
from mindspeed_fx.kernels.glu import glu, glu_backward
from mindspeed_fx.kernels.npu import check_types, first, lowering, promote_types, within
from mindspeed_fx.kernels.swiglu import halves, swiglu, swiglu_backward
from mindspeed_fx.kernels.weighted_swiglu import weighted_swiglu, weighted_swiglu_backward

npu, aten = torch.ops.npu, torch.ops.aten
APPROXIMATE = {"gelu": 0, "gelu_tanh": 1}
"""Activations of ``npu_geglu``, and its number for each."""

# --------------------------------------------------------------------------- SwiGLU


def _pack(op, x, up):
    if up is not None:
        return f"{op}: gate and up are two tensors; it takes one, and joining them moves more bytes than it saves"
    return first(check_types(x=x), within(f"{op}: dimensions of x", x.dim(), 1, 8))


@lowering(swiglu, "npu_swiglu", lambda x, up=None: _pack("npu_swiglu", x, up), ("npu_swiglu",))
def _swiglu(x, up=None):
    return npu.npu_swiglu(x, -1)


@lowering(
    swiglu_backward,
    "npu_swiglu_backward",
    lambda grad, x, up=None: first(_pack("npu_swiglu_backward", x, up), check_types(grad=grad)),
    ("npu_swiglu_backward",),
)
def _swiglu_backward(grad, x, up=None):
    return npu.npu_swiglu_backward(grad, x, -1).contiguous(), x.new_empty(0)


# --------------------------------------------------------------------------- GeGLU


def _supports_geglu(op, x, up, activation):
    if activation not in APPROXIMATE:
        return f"{op}: the activation is {activation}; valid: {', '.join(APPROXIMATE)}"
    return _pack(op, x, up)


@lowering(glu, "npu_geglu", lambda x, up, activation: _supports_geglu("npu_geglu", x, up, activation), ("npu_geglu",))
def _geglu(x, up, activation):
    return npu.npu_geglu(x, -1, APPROXIMATE[activation], True)[0]


@lowering(
    glu_backward,
    "npu_geglu, npu_geglu_grad",
    lambda grad, x, up, activation: _supports_geglu("npu_geglu_grad", x, up, activation),
    ("npu_geglu", "npu_geglu_grad"),
)
def _geglu_backward(grad, x, up, activation):
    # The activated half is recomputed: kept from the forward it would be one more saved tensor.
    approximate = APPROXIMATE[activation]
    gelu = npu.npu_geglu(x, -1, approximate, True)[1]
    return npu.npu_geglu_grad(grad, x, gelu, -1, approximate, True).contiguous(), x.new_empty(0)


# --------------------------------------------------------------------------- activation and product


def _activate(x: Tensor, activation: str) -> Tensor:
    return {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
        "relu": torch.relu,
        "sigmoid": torch.sigmoid,
    }[activation](x)


def _slope(grad: Tensor, x: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return aten.silu_backward(grad, x)
    if activation == "relu":
        return aten.threshold_backward(grad, x, 0)
    if activation == "sigmoid":
        return aten.sigmoid_backward(grad, torch.sigmoid(x))
    return aten.gelu_backward(grad, x, approximate="tanh" if activation == "gelu_tanh" else "none")


def _product(x, up, activation):
    gate, up = halves(x, up)
    return (_activate(gate, activation) * up).contiguous()


def _product_backward(grad, x, up, activation):
    gate, u = halves(x, up)
    dgate, dup = _slope((grad * u).to(gate.dtype), gate, activation), (grad * _activate(gate, activation)).to(u.dtype)
    return (torch.cat((dgate, dup), -1), x.new_empty(0)) if up is None else (dgate.contiguous(), dup.contiguous())


for _operator in (swiglu, swiglu_backward, glu, glu_backward):
    triton.on_npu(_operator)
lowering(swiglu, "aten silu and product", lambda x, up=None: check_types(x=x, up=up))(
    lambda x, up=None: _product(x, up, "silu")
)
lowering(swiglu_backward, "aten silu_backward and products", lambda grad, x, up=None: check_types(x=x, up=up))(
    lambda grad, x, up=None: _product_backward(grad, x, up, "silu")
)
lowering(glu, "aten activation and product", lambda x, up, activation: check_types(x=x, up=up))(_product)
lowering(
    glu_backward, "aten activation's backward and products", lambda grad, x, up, activation: check_types(x=x, up=up)
)(_product_backward)


# --------------------------------------------------------------------------- SwiGLU times a weight per row


def _gate(x: Tensor, up: Tensor | None) -> Tensor:
    """SwiGLU, by the kernel where gate and up are one tensor."""
    return npu.npu_swiglu(x, -1) if up is None else _product(x, up, "silu")


def _weight(x, up, weight):
    """The product with the weight in the wider type of the two, rounded once, as the model has it."""
    gated = _gate(x, up)
    return (gated * weight).to(gated.dtype).contiguous()


def _weighted_backward(grad, x, up, weight):
    # The product that the gradient of the weight needs is recomputed: kept, it would be one more saved tensor.
    gated, inner = _gate(x, up), (grad * weight).to(promote_types(x, up))
    # In float32: a sum over a row of thousands.
    dweight = (grad.float() * gated).sum(-1, keepdim=True).to(weight.dtype)
    if up is None:
        return npu.npu_swiglu_backward(inner, x, -1).contiguous(), x.new_empty(0), dweight
    return *_product_backward(inner, x, up, "silu"), dweight


lowering(
    weighted_swiglu,
    "npu_swiglu and product",
    lambda x, up, weight: first(_pack("npu_swiglu", x, up), check_types(weight=weight)),
    ("npu_swiglu",),
)(_weight)
lowering(
    weighted_swiglu_backward,
    "npu_swiglu, npu_swiglu_backward and products",
    lambda grad, x, up, weight: first(_pack("npu_swiglu_backward", x, up), check_types(grad=grad, weight=weight)),
    ("npu_swiglu", "npu_swiglu_backward"),
)(_weighted_backward)
lowering(weighted_swiglu, "aten silu and products", lambda x, up, weight: check_types(x=x, up=up, weight=weight))(
    _weight
)
lowering(
    weighted_swiglu_backward,
    "aten silu_backward and products",
    lambda grad, x, up, weight: check_types(x=x, up=up, grad=grad, weight=weight),
)(_weighted_backward)
