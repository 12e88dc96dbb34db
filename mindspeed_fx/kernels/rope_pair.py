"""Queries and keys rotated together: two :mod:`mindspeed_fx.kernels.rope` that share their angles, by one launch.

Source: Su et al. 2021, "RoFormer"; ``npu_apply_rotary_pos_emb`` of torch_npu takes both too, and writes over its
arguments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_fx.compat.placements import REPLICATED
from mindspeed_fx.cost.operators import once
from mindspeed_fx.kernels import triton
from mindspeed_fx.kernels.base import operator
from mindspeed_fx.kernels.rope import divisible, refuse, rope, rope_backward
from mindspeed_fx.kernels.sharding import along


def _fake(q, k, cos, sin, interleaved, backward):
    dtype = q.dtype if backward else torch.promote_types(q.dtype, cos.dtype)
    return torch.empty_like(q, dtype=dtype), torch.empty_like(k, dtype=dtype)


@operator(
    "rope_pair(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved, bool backward) -> (Tensor, Tensor)", _fake
)
def rope_pair(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, backward: bool
) -> tuple[Tensor, Tensor]:
    """Rotary position embedding of two tensors, or with ``backward`` its gradients.

    Args:
        q, k: [..., dim], dim even and equal; any layouts of the leading dimensions.
        cos, sin: broadcast against both, last dimension ``dim``.
        interleaved: layout of the pairs.
        backward: q and k are gradients, and turn the other way.

    Returns:
        both, each in the shape and memory layout of its argument and, forward, the promoted type of it and ``cos``.
    """
    if backward:
        first, second = (rope_backward.reference(g, g, cos, sin, interleaved, False)[0] for g in (q, k))
    else:
        first, second = (rope.reference(x, cos, sin, interleaved) for x in (q, k))
    return first, second


@rope_pair.costs
def _cost(out, q, k, cos, sin, interleaved, backward):
    return once(out, q, k, cos, sin, vector=3 * (q.numel + k.numel))


@rope_pair.shard
def _sharding_rule(q, k, cos, sin, interleaved, backward):
    """Each is divided as it likes, where both want the same of the angles."""

    def strategies(x):
        for d in (REPLICATED, *divisible(x, interleaved)):
            yield d, tuple(REPLICATED if d == REPLICATED else along(t, d, x.ndim) for t in (cos, sin))

    return [
        ([own, other], [own, other, *angles])
        for own, angles in strategies(q)
        for other, wanted in strategies(k)
        if angles == wanted and (own, other) != (REPLICATED, REPLICATED)
    ]


def _supports(q, k, cos, sin, interleaved, backward):
    if q.dtype != k.dtype or q.shape[-1] != k.shape[-1]:
        return "q and k have two types or two widths"
    return refuse(q, cos, sin) or refuse(k, cos, sin)


triton.kernel(rope_pair, _fake, "rope_pair.rotate", "q and k in one launch", _supports, beats_codegen=False)
triton.on_npu(rope_pair)
