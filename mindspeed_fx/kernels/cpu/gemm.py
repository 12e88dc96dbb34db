"""Matrix product on CPU through oneDNN: ``a @ b`` in float32.

``aten.mm`` calls the BLAS that torch was built with; on x86 that is MKL, whose kernels for other vendors' processors
leave part of the vector units idle. oneDNN's code is chosen by instruction set alone. A transposed ``a``, a weight
gradient, is :mod:`mindspeed_fx.kernels.cpu.weight_gradient`'s. Source: oneDNN developer guide, inner product primitive;
measured in benchmarks/results.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_fx.compat.placements import PARTIAL, REPLICATED
from mindspeed_fx.cost.operators import product
from mindspeed_fx.kernels.base import operator
from mindspeed_fx.kernels.cpu import weight_gradient


def _fake(a, b):
    return a.new_empty((a.shape[0], b.shape[1]))


@operator("gemm(Tensor a, Tensor b) -> Tensor", _fake, opaque=True)
def gemm(a: Tensor, b: Tensor) -> Tensor:
    """Matrix product.

    Args:
        a: [m, k] float32 on cpu, row-major or the transpose of a row-major matrix.
        b: [k, n] float32, row-major or the transpose of a row-major matrix.

    Returns:
        [m, n], contiguous.
    """
    if not (a.numel() and b.numel()):  # oneDNN has no product of no elements
        return a @ b
    if a.stride(1) != 1 and weight_gradient.problem(a.t(), b) is None:
        return weight_gradient.weight_gradient(a.t(), b)
    return torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")


@gemm.shard
def _sharding_rule(a, b):
    return [([0], [0, REPLICATED]), ([1], [REPLICATED, 1]), ([PARTIAL], [1, 0])]


@gemm.costs
def _cost(out, a, b):
    return product(out, a.shape[-1], a, b)
