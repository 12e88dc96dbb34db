"""RMSNorm of heads and their rotation in Triton: a tile is some heads of one token, which share one row of cos and sin.

A head is read as the pairs that turn and the rest that passes. The gradient of the weight is summed per program, in a
fixed
order, and then over programs. Source: the formulas of mindspeed_fx/kernels/qk_norm_rope.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed_fx.kernels.qk_norm_rope import result_dtype
from mindspeed_fx.kernels.triton import column_sums
from mindspeed_fx.kernels.triton.launch import launch, power_of_two, programs, warps
from mindspeed_fx.kernels.triton.rope import element_place, leading, load_pairs, store_pairs

TILE = 4096
"""Elements that a tile aims at."""

FORWARD_THREAD, BACKWARD_THREAD, BACKWARD_INTERLEAVED_THREAD = 128, 32, 16
"""Elements of a thread: many, so that it reads the angles for several heads; the backward holds two tensors and the
sums of the weight's gradient, and moves neighbours apart. Measured: benchmarks/results/2026-11-27-gpu_launches.txt.
"""


@triton.jit
def qk_norm_rope_forward(
    x_ptr,
    w_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    rstd_ptr,
    outer,
    inner,
    heads,
    x0,
    x1,
    x2,
    y0,
    y1,
    y2,
    c0,
    c1,
    c2,
    s0,
    s1,
    s2,
    r0,
    r1,
    r2,
    eps,
    DIM: tl.constexpr,
    TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WEIGHT: tl.constexpr,
    SHARED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    """y of x, both [outer, inner, heads, DIM] with strides x0 ... of their own; cos, sin and rstd likewise. SHARED: the
    heads have one row of angles. HALF, REST: tiles of TURNED / 2 and DIM - TURNED, no REST where that is zero."""
    tiles = (heads + HEADS - 1) // HEADS
    ANGLES: tl.constexpr = 1 if SHARED else HEADS
    one = tl.arange(0, 1)[:, None]
    if WEIGHT:
        wa, wb = load_pairs(w_ptr + one, one < 1, TURNED, INTERLEAVED, 1, HALF)
    for item in tl.range(tl.program_id(0), outer * inner * tiles, tl.num_programs(0), num_stages=2):
        o, i, h, lines, remaining = element_place(item, inner, heads, HEADS)
        in_rows = lines < remaining
        x = x_ptr + o * x0 + i * x1 + h * x2 + lines * x2
        y = y_ptr + o * y0 + i * y1 + h * y2 + lines * y2
        a, b = load_pairs(x, in_rows, TURNED, INTERLEAVED, HEADS, HALF)
        squares = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)
        if REST:
            cols = tl.arange(0, REST)[None, :]
            inside = in_rows & (cols < DIM - TURNED)
            c = tl.load(x + TURNED + cols, mask=inside, other=0.0).to(tl.float32)
            squares += tl.sum(c * c, axis=1)
        rstd = 1.0 / tl.sqrt(squares / DIM + eps)[:, None]
        tl.store(rstd_ptr + o * r0 + i * r1 + h * r2 + lines * r2, rstd, mask=in_rows)
        a *= rstd
        b *= rstd
        if WEIGHT:
            a *= wa
            b *= wb
        angles = tl.arange(0, ANGLES)[:, None]
        known = angles < remaining
        ca, cb = load_pairs(cos_ptr + o * c0 + i * c1 + h * c2 + angles * c2, known, TURNED, INTERLEAVED, ANGLES, HALF)
        sa, sb = load_pairs(sin_ptr + o * s0 + i * s1 + h * s2 + angles * s2, known, TURNED, INTERLEAVED, ANGLES, HALF)
        store_pairs(y, a * ca - b * sa, b * cb + a * sb, in_rows, TURNED, INTERLEAVED, HEADS, HALF)
        if REST:
            c *= rstd
            if WEIGHT:
                c *= tl.load(w_ptr + TURNED + cols, mask=cols < DIM - TURNED, other=0.0).to(tl.float32)
            tl.store(y + TURNED + cols, c.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def qk_norm_rope_backward(
    g_ptr, x_ptr, w_ptr, rstd_ptr, cos_ptr, sin_ptr, dx_ptr, partial_ptr,
    outer, inner, heads,
    g0, g1, g2,
    d0, d1, d2,
    x0, x1, x2,
    c0, c1, c2,
    s0, s1, s2,
    r0, r1, r2,
    DIM: tl.constexpr, TURNED: tl.constexpr, INTERLEAVED: tl.constexpr, WEIGHT: tl.constexpr,
    NEED_WEIGHT: tl.constexpr, SHARED: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """dx [outer, inner, heads, DIM] of the gradient g, and a row of partial [programs, DIM]."""
    tiles = (heads + HEADS - 1) // HEADS
    ANGLES: tl.constexpr = 1 if SHARED else HEADS
    one = tl.arange(0, 1)[:, None]
    if WEIGHT:
        wa, wb = load_pairs(w_ptr + one, one < 1, TURNED, INTERLEAVED, 1, HALF)
    dwa = tl.zeros([HEADS, HALF], tl.float32)
    dwb = tl.zeros([HEADS, HALF], tl.float32)
    if REST:
        cols = tl.arange(0, REST)[None, :]
        dwc = tl.zeros([HEADS, REST], tl.float32)
    for item in range(tl.program_id(0), outer * inner * tiles, tl.num_programs(0)):
        o, i, h, lines, remaining = element_place(item, inner, heads, HEADS)
        in_rows = lines < remaining
        g = g_ptr + o * g0 + i * g1 + h * g2 + lines * g2
        x = x_ptr + o * x0 + i * x1 + h * x2 + lines * x2
        dx = dx_ptr + o * d0 + i * d1 + h * d2 + lines * d2
        rstd = tl.load(rstd_ptr + o * r0 + i * r1 + h * r2 + lines * r2, mask=in_rows, other=0.0)
        angles = tl.arange(0, ANGLES)[:, None]
        known = angles < remaining
        ca, cb = load_pairs(cos_ptr + o * c0 + i * c1 + h * c2 + angles * c2, known, TURNED, INTERLEAVED, ANGLES, HALF)
        sa, sb = load_pairs(sin_ptr + o * s0 + i * s1 + h * s2 + angles * s2, known, TURNED, INTERLEAVED, ANGLES, HALF)
        ga, gb = load_pairs(g, in_rows, TURNED, INTERLEAVED, HEADS, HALF)
        ha = ga * ca + gb * sb
        hb = gb * cb - ga * sa
        na, nb = load_pairs(x, in_rows, TURNED, INTERLEAVED, HEADS, HALF)
        na *= rstd
        nb *= rstd
        if NEED_WEIGHT:
            dwa += ha * na
            dwb += hb * nb
        if WEIGHT:
            ha *= wa
            hb *= wb
        mean = tl.sum(ha * na, axis=1) + tl.sum(hb * nb, axis=1)
        if REST:
            inside = in_rows & (cols < DIM - TURNED)
            hc = tl.load(g + TURNED + cols, mask=inside, other=0.0).to(tl.float32)
            nc = tl.load(x + TURNED + cols, mask=inside, other=0.0).to(tl.float32) * rstd
            if NEED_WEIGHT:
                dwc += hc * nc
            if WEIGHT:
                hc *= tl.load(w_ptr + TURNED + cols, mask=cols < DIM - TURNED, other=0.0).to(tl.float32)
            mean += tl.sum(hc * nc, axis=1)
        mean = (mean / DIM)[:, None]
        store_pairs(dx, rstd * (ha - na * mean), rstd * (hb - nb * mean), in_rows, TURNED, INTERLEAVED, HEADS, HALF)
        if REST:
            tl.store(dx + TURNED + cols, (rstd * (hc - nc * mean)).to(dx_ptr.dtype.element_ty), mask=inside)
    if NEED_WEIGHT:
        row = partial_ptr + tl.program_id(0) * DIM
        store_pairs(
            row + one, tl.sum(dwa, axis=0)[None, :], tl.sum(dwb, axis=0)[None, :], one < 1, TURNED, INTERLEAVED, 1, HALF
        )
        if REST:
            tl.store(row + TURNED + cols, tl.sum(dwc, axis=0)[None, :], mask=cols < DIM - TURNED)


def forward(
    x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float, cast_first: bool, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """``mindspeed::qk_norm_rope``: y in the layout of x, and rstd [..., 1] float32."""
    x, cos, sin = _rows(x, cos, sin)
    y = torch.empty_like(x, dtype=result_dtype(x, weight, cos, cast_first))
    rstd = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    (outer, inner, heads), strides = leading(x, y, cos, sin, rstd)
    constants = _constants(x, weight, cos, interleaved, strides[8] == strides[11] == 0)
    tile, num_warps = _tile(heads, constants, FORWARD_THREAD)
    grid = programs(x, outer * inner * -(-heads // tile["HEADS"]), num_warps, 32)
    w = x if weight is None else weight.contiguous()
    launch(
        qk_norm_rope_forward,
        grid,
        x,
        w,
        cos,
        sin,
        y,
        rstd,
        outer,
        inner,
        heads,
        *strides,
        eps,
        num_warps=num_warps,
        **constants,
        **tile,
    )
    return y, rstd


def backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor]:
    """``mindspeed::qk_norm_rope_backward``: dx in the layout of x, dweight [dim] (empty unless ``need_weight``)."""
    grad, x, cos, sin = _rows(grad, x, cos, sin)
    dx = torch.empty_like(x)
    (outer, inner, heads), strides = leading(grad, dx, x, cos, sin, rstd)
    constants = _constants(x, weight, cos, interleaved, strides[11] == strides[14] == 0)
    tile, num_warps = _tile(heads, constants, BACKWARD_INTERLEAVED_THREAD if interleaved else BACKWARD_THREAD)
    # Every program leaves a partial sum of the weight's gradient: as few programs as keep the registers full.
    grid = programs(x, outer * inner * -(-heads // tile["HEADS"]), num_warps, 24)
    partial = x.new_empty((grid if need_weight else 0, x.shape[-1]), dtype=torch.float32)
    w = x if weight is None else weight.contiguous()
    args = (grad, x, w, rstd, cos, sin, dx, partial if need_weight else rstd, outer, inner, heads, *strides)
    launch(qk_norm_rope_backward, grid, *args, num_warps=num_warps, NEED_WEIGHT=need_weight, **constants, **tile)
    return dx, column_sums.sums(partial, weight.dtype) if need_weight else x.new_empty(0)


def _rows(*tensors: Tensor) -> list[Tensor]:
    return [t if t.stride(-1) == 1 else t.contiguous() for t in tensors]


def _constants(x: Tensor, weight: Tensor | None, cos: Tensor, interleaved: bool, shared: bool) -> dict[str, int]:
    return {
        "DIM": x.shape[-1],
        "TURNED": cos.shape[-1],
        "INTERLEAVED": interleaved,
        "WEIGHT": weight is not None,
        "SHARED": shared,
    }


def _tile(heads: int, constants: dict[str, int], thread: int) -> tuple[dict[str, int], int]:
    half, rest = power_of_two(constants["TURNED"] // 2), constants["DIM"] - constants["TURNED"]
    rest = power_of_two(rest) if rest else 0
    block = min(power_of_two(heads), max(1, TILE // power_of_two(2 * half + rest)))
    return {"HEADS": block, "HALF": half, "REST": rest}, warps(block * (2 * half + rest), thread)
