"""Rotary position embedding in Triton: a tile is some heads of one token, which share one row of cos and sin.

The gradient is the rotation the other way, so one kernel serves both; see mindspeed_fx/kernels/rope.py for the
formulas.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed_fx.kernels.triton.launch import launch, power_of_two, programs, warps

TILE = 4096
"""Elements that a tile aims at."""


@triton.jit
def load_pairs(rows, inside, DIM: tl.constexpr, INTERLEAVED: tl.constexpr, LINES: tl.constexpr, HALF: tl.constexpr):
    """Both members [LINES, HALF] float32 of the pairs of rows [LINES, 1]; memory is read in the order it lies in."""
    if INTERLEAVED:
        cols = tl.arange(0, 2 * HALF)[None, :]
        both = tl.load(rows + cols, mask=inside & (cols < DIM), other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(both, (LINES, HALF, 2)))
    else:
        cols = tl.arange(0, HALF)[None, :]
        a = tl.load(rows + cols, mask=inside & (cols < DIM // 2), other=0.0).to(tl.float32)
        b = tl.load(rows + DIM // 2 + cols, mask=inside & (cols < DIM // 2), other=0.0).to(tl.float32)
    return a, b


@triton.jit
def store_pairs(
    rows, a, b, inside, DIM: tl.constexpr, INTERLEAVED: tl.constexpr, LINES: tl.constexpr, HALF: tl.constexpr
):
    """Writes what :func:`load_pairs` reads, in the type of the rows."""
    if INTERLEAVED:
        cols = tl.arange(0, 2 * HALF)[None, :]
        both = tl.reshape(tl.join(a, b), (LINES, 2 * HALF))
        tl.store(rows + cols, both.to(rows.dtype.element_ty), mask=inside & (cols < DIM))
    else:
        cols = tl.arange(0, HALF)[None, :]
        tl.store(rows + cols, a.to(rows.dtype.element_ty), mask=inside & (cols < DIM // 2))
        tl.store(rows + DIM // 2 + cols, b.to(rows.dtype.element_ty), mask=inside & (cols < DIM // 2))


@triton.jit
def element_place(item, inner, heads, HEADS: tl.constexpr):
    """(outer and inner index, first head, lines [HEADS, 1] from it, heads that are left) of a tile of [outer, inner,
    heads].
    """
    tiles = (heads + HEADS - 1) // HEADS
    first = (item % tiles) * HEADS
    lines = tl.arange(0, HEADS)[:, None]
    return (
        tl.cast(item // tiles // inner, tl.int64),
        tl.cast((item // tiles) % inner, tl.int64),
        tl.cast(first, tl.int64),
        lines,
        heads - first,
    )


@triton.jit
def rotate_rows(
    x_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
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
    DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BACKWARD: tl.constexpr,
    SHARED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """y of x, both [outer, inner, heads, DIM] with strides x0 ... of their own; cos and sin likewise, with strides 0
    where they are broadcast. SHARED: they are broadcast over the heads. HALF: tile of DIM / 2."""
    tiles = (heads + HEADS - 1) // HEADS
    ANGLES: tl.constexpr = 1 if SHARED else HEADS
    for item in range(tl.program_id(0), outer * inner * tiles, tl.num_programs(0)):
        o, i, h, lines, remaining = element_place(item, inner, heads, HEADS)
        inside = lines < remaining
        xa, xb = load_pairs(x_ptr + o * x0 + i * x1 + h * x2 + lines * x2, inside, DIM, INTERLEAVED, HEADS, HALF)
        angles = tl.arange(0, ANGLES)[:, None]
        known = angles < remaining
        ca, cb = load_pairs(cos_ptr + o * c0 + i * c1 + h * c2 + angles * c2, known, DIM, INTERLEAVED, ANGLES, HALF)
        sa, sb = load_pairs(sin_ptr + o * s0 + i * s1 + h * s2 + angles * s2, known, DIM, INTERLEAVED, ANGLES, HALF)
        if BACKWARD:
            ya = xa * ca + xb * sb
            yb = xb * cb - xa * sa
        else:
            ya = xa * ca - xb * sa
            yb = xb * cb + xa * sb
        store_pairs(y_ptr + o * y0 + i * y1 + h * y2 + lines * y2, ya, yb, inside, DIM, INTERLEAVED, HEADS, HALF)


@triton.jit
def rope_rotate(
    x_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
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
    DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BACKWARD: tl.constexpr,
    SHARED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    rotate_rows(
        x_ptr,
        cos_ptr,
        sin_ptr,
        y_ptr,
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
        DIM,
        INTERLEAVED,
        BACKWARD,
        SHARED,
        HEADS,
        HALF,
    )


def forward(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """``mindspeed::rope``: x [..., dim] rotated, in the layout of x and the promoted type of x and cos."""
    y = torch.empty_like(x, dtype=torch.promote_types(x.dtype, cos.dtype))
    _run(x, cos, sin, y, interleaved, False)
    return y


def backward(
    grad: Tensor, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, need_angles: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """``mindspeed::rope_backward`` without gradients of the angles: (dx, empty, empty), dx in the layout of grad."""
    assert not need_angles
    dx = torch.empty_like(grad, dtype=x.dtype)
    _run(grad, cos, sin, dx, interleaved, True)
    return dx, x.new_empty(0), x.new_empty(0)


def _run(x: Tensor, cos: Tensor, sin: Tensor, y: Tensor, interleaved: bool, backward: bool) -> None:
    x, cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, cos, sin))
    (outer, inner, heads), strides, shared = place(x, cos, sin, y)
    dim = x.shape[-1]
    half = power_of_two(dim // 2)
    block = min(power_of_two(heads), max(1, TILE // (2 * half)))
    num_warps = warps(2 * half * block)
    grid = programs(x, outer * inner * -(-heads // block), num_warps, 64)
    constants = {
        "DIM": dim,
        "INTERLEAVED": interleaved,
        "BACKWARD": backward,
        "SHARED": shared,
        "HEADS": block,
        "HALF": half,
    }
    launch(rope_rotate, grid, x, cos, sin, y, outer, inner, heads, *strides, num_warps=num_warps, **constants)


def place(x: Tensor, cos: Tensor, sin: Tensor, y: Tensor) -> tuple[list[int], list[int], bool]:
    """What :func:`rotate_rows` has to know of its tensors: sizes, strides, and whether all heads share the angles."""
    # kernels/rope.py refuses this from the fake arguments; it guards a direct call of the operator.
    if y.stride(-1) != 1:
        raise NotImplementedError("rope: the last dimension of the result is not contiguous")
    sizes, strides = leading(x, y, cos, sin)
    return sizes, strides, strides[8] == strides[11] == 0


def leading(x: Tensor, y: Tensor, *others: Tensor) -> tuple[list[int], list[int]]:
    """Three leading dimensions, outermost in the memory of ``y`` first: their sizes, and their strides in x, y and each
    of the others.

    Dimensions of size one are dropped, and neighbours that every tensor strides over as over one are merged.

    Raises:
        NotImplementedError: more than three are left.
    """
    tensors = (x, y, *(t.expand(*x.shape[:-1], t.shape[-1]) for t in others))
    dims = [d for d in zip(x.shape[:-1], *(t.stride()[:-1] for t in tensors)) if d[0] != 1]
    merged: list[tuple[int, ...]] = []
    for size, *strides in sorted(dims, key=lambda d: -d[2]):
        if merged and all(outer == size * inner for outer, inner in zip(merged[-1][1:], strides)):
            size *= merged.pop()[0]
        merged.append((size, *strides))
    if len(merged) > 3:
        raise NotImplementedError("more than three independent leading dimensions")
    sizes, *each = zip(*[(1, *[0] * len(tensors))] * (3 - len(merged)), *merged)
    return list(sizes), [stride for strides in each for stride in strides]
