"""Part of :mod:`mindspeed_fx.compat`: the gradients of convolutions on the CPU as Inductor calls them.

Inductor 2.13 lays out the operands of a convolution's gradient as the gradient of its *weights* would be stored, for
kernels in Triton that it does not take on the CPU: both are copied, in an order in which ATen's kernel is slow. Where
one of the weights' sizes is 1, as in depthwise convolutions, that order is neither rows nor channels last.
"""

from __future__ import annotations

import contextlib
from typing import Any, Iterator
from unittest import mock

import torch


@contextlib.contextmanager
def inputs_as_stored() -> Iterator[None]:
    """Meanwhile Inductor gives the input of a convolution on the CPU to its gradient as it is stored, and the result's
    gradient in channels last where the input is so: ATen would copy it."""
    from torch._inductor.kernel import conv
    from torch._inductor.lowering import lowerings

    target = torch.ops.aten.convolution_backward.default
    templates = lowerings[target]
    fallback = getattr(conv, "aten_convolution_backward_fallback", templates)

    def lower(grad: Any, x: Any, *rest: Any) -> Any:
        if x.get_device().type != "cpu":
            return templates(grad, x, *rest)
        return fallback(_laid_out_as(grad, x), x, *rest)

    with mock.patch.dict(lowerings, {target: lower}):
        yield


def _laid_out_as(grad: Any, x: Any) -> Any:
    from torch._inductor import ir

    x.realize()
    strides = x.maybe_get_stride()
    if strides is None or len(strides) != 4 or ir.get_stride_order(strides) != ir.NHWC_STRIDE_ORDER:
        return grad
    return ir.ExternKernel.require_channels_last(grad)
