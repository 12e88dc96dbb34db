"""Queries and keys rotated by one launch: the two rotations of :mod:`mindspeed_fx.kernels.triton.rope`, one after the
other in each program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed_fx.kernels.triton.launch import launch, power_of_two, programs, warps
from mindspeed_fx.kernels.triton.rope import TILE, place, rotate_rows


@triton.jit
def rope_rotate_pair(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr,
    q_outer, q_inner, q_heads, q0, q1, q2, qy0, qy1, qy2, qc0, qc1, qc2, qs0, qs1, qs2,
    k_outer, k_inner, k_heads, k0, k1, k2, ky0, ky1, ky2, kc0, kc1, kc2, ks0, ks1, ks2,
    DIM: tl.constexpr, INTERLEAVED: tl.constexpr, BACKWARD: tl.constexpr, Q_SHARED: tl.constexpr,
    K_SHARED: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr
):  # fmt: skip
    """Both as in rotate_rows, with sizes and strides of their own and one table of angles."""
    rotate_rows(
        q_ptr, cos_ptr, sin_ptr, q_out_ptr, q_outer, q_inner, q_heads,
        q0, q1, q2, qy0, qy1, qy2, qc0, qc1, qc2, qs0, qs1, qs2,
        DIM, INTERLEAVED, BACKWARD, Q_SHARED, HEADS, HALF,
    )  # fmt: skip
    rotate_rows(
        k_ptr, cos_ptr, sin_ptr, k_out_ptr, k_outer, k_inner, k_heads,
        k0, k1, k2, ky0, ky1, ky2, kc0, kc1, kc2, ks0, ks1, ks2,
        DIM, INTERLEAVED, BACKWARD, K_SHARED, HEADS, HALF,
    )  # fmt: skip


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, backward: bool) -> tuple[Tensor, Tensor]:
    """``mindspeed::rope_pair``: q and k [..., dim] rotated, each in its own layout."""
    dtype = q.dtype if backward else torch.promote_types(q.dtype, cos.dtype)
    results = torch.empty_like(q, dtype=dtype), torch.empty_like(k, dtype=dtype)
    q, k, cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, cos, sin))
    places = [place(x, cos, sin, y) for x, y in zip((q, k), results)]
    dim = q.shape[-1]
    half = power_of_two(dim // 2)
    block = min(power_of_two(max(sizes[2] for sizes, _, _ in places)), max(1, TILE // (2 * half)))
    num_warps = warps(2 * half * block)
    work = max(outer * inner * -(-heads // block) for (outer, inner, heads), _, _ in places)
    numbers = [n for sizes, strides, _ in places for n in (*sizes, *strides)]
    launch(
        rope_rotate_pair,
        programs(q, work, num_warps, 64),
        q,
        k,
        cos,
        sin,
        *results,
        *numbers,
        num_warps=num_warps,
        DIM=dim,
        INTERLEAVED=interleaved,
        BACKWARD=backward,
        Q_SHARED=places[0][2],
        K_SHARED=places[1][2],
        HEADS=block,
        HALF=half,
    )
    return results
