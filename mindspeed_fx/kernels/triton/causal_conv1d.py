"""Causal depthwise convolution in Triton, and its gradients: a tile is some tokens of some channels, read once for each
weight from where it lies; that dimension of memory which is last is the tile's last.

The gradient of the sums is written in float32 where there is an activation, and dx is the same convolution the other
way; sums over tokens are left per chunk of them and added by one sum: deterministic, no atomics. Source: the formulas
of mindspeed_fx/kernels/causal_conv1d.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed_fx.kernels.triton import column_sums
from mindspeed_fx.kernels.triton.launch import launch, power_of_two, programs

TILES = {"rows": (32, 128), "float32": (32, 64), "sums": (4, 1024)}
"""Tokens and channels of a tile, for memory whose last dimension are the channels (the other way round where it is the
sequence): of a 16-bit sequence, of one in float32, and of the sums over tokens, which a thread adds up for its channels
alone. Measured: benchmarks/results/2026-11-27-gpu_sweeps.txt.
"""

WARPS = {"rows": 8, "float32": 4, "sums": 4}


@triton.jit
def conv_place(item, batch, seq, C: tl.constexpr, LAST: tl.constexpr, T_TILE: tl.constexpr, C_TILE: tl.constexpr):
    """(index in the batch, tile among those of the tokens of all of it, first token and first channel of the tile, and
    tokens and channels in it). What can pass 2^31 elements is added to pointers as a scalar of 64 bits.
    """
    C_TILES: tl.constexpr = (C + C_TILE - 1) // C_TILE
    t_tiles = (seq + T_TILE - 1) // T_TILE
    lines = item // C_TILES
    first_t, first_c = (lines % t_tiles) * T_TILE, (item % C_TILES) * C_TILE
    if LAST:
        t, c = tl.arange(0, T_TILE)[:, None], tl.arange(0, C_TILE)[None, :]
    else:
        t, c = tl.arange(0, T_TILE)[None, :], tl.arange(0, C_TILE)[:, None]
    return tl.cast(lines // t_tiles, tl.int64), tl.cast(lines, tl.int64), first_t, first_c, t, c


@triton.jit
def conv_tile(ptr, first_t, first_c, T: tl.constexpr, CS: tl.constexpr):
    """Where a tile begins."""
    return ptr + tl.cast(first_t, tl.int64) * T + tl.cast(first_c, tl.int64) * CS


@triton.jit
def conv_sums(
    x, w_ptr, b_ptr, first_t, first_c, t, c, seq, T: tl.constexpr, CS: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
    BIAS: tl.constexpr, BACK: tl.constexpr
):  # fmt: skip
    """bias + sum over j of w[j] x[t - K + 1 + j], or with BACK x[t + K - 1 - j]; zero outside of the sequence."""
    x = conv_tile(x, first_t, first_c, T, CS)
    channel = first_c + c
    total = (t * 0 + c * 0).to(tl.float32)
    if BIAS:
        total += tl.load(b_ptr + channel, mask=channel < C, other=0.0).to(tl.float32)
    for j in tl.static_range(K):
        at = t + (K - 1 - j) if BACK else t - (K - 1 - j)
        inside = (first_t + at >= 0) & (first_t + at < seq) & (channel < C)
        near = tl.load(x + at * T + c * CS, mask=inside, other=0.0).to(tl.float32)
        total += near * tl.load(w_ptr + j * C + channel, mask=channel < C, other=0.0).to(tl.float32)
    return total


@triton.jit
def causal_conv1d_rows(
    x_ptr, w_ptr, b_ptr, y_ptr, batch, seq, x0,
    C: tl.constexpr, K: tl.constexpr, XT: tl.constexpr, XC: tl.constexpr, YT: tl.constexpr, YC: tl.constexpr,
    Y0: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, BACK: tl.constexpr, LAST: tl.constexpr,
    T_TILE: tl.constexpr, C_TILE: tl.constexpr
):  # fmt: skip
    """y [batch, C, seq] of x and w [K, C]; strides of x are x0, XC, XT, of y seq * Y0, YC, YT."""
    items = batch * ((seq + T_TILE - 1) // T_TILE) * ((C + C_TILE - 1) // C_TILE)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        n, _, first_t, first_c, t, c = conv_place(item, batch, seq, C, LAST, T_TILE, C_TILE)
        total = conv_sums(x_ptr + n * x0, w_ptr, b_ptr, first_t, first_c, t, c, seq, XT, XC, C, K, BIAS, BACK)
        if SILU:
            total *= tl.sigmoid(total)
        y = conv_tile(y_ptr + n * seq * Y0, first_t, first_c, YT, YC)
        inside = (first_t + t < seq) & (first_c + c < C)
        tl.store(y + t * YT + c * YC, total.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def causal_conv1d_sums(
    grad_ptr, x_ptr, w_ptr, b_ptr, g_ptr, partial_ptr, batch, seq, chunks, grad0, x0,
    C: tl.constexpr, K: tl.constexpr, GT: tl.constexpr, GC: tl.constexpr, XT: tl.constexpr, XC: tl.constexpr,
    YT: tl.constexpr, YC: tl.constexpr, Y0: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, LAST: tl.constexpr,
    T_TILE: tl.constexpr, C_TILE: tl.constexpr, SUMS: tl.constexpr
):  # fmt: skip
    """partial [chunks, K + 1, C]: sums of g x[t - K + 1 + j], and of g, the gradient of the sums; g itself with SILU.
    A chunk takes every ``chunks``-th tile of tokens. SUMS: a power of two of at least K + 1.
    """
    AXIS: tl.constexpr = 0 if LAST else 1
    C_TILES: tl.constexpr = (C + C_TILE - 1) // C_TILE
    lines = batch * ((seq + T_TILE - 1) // T_TILE)
    which = tl.arange(0, SUMS)[:, None]
    channels = tl.arange(0, C_TILE)[None, :]
    for work in range(tl.program_id(0), chunks * C_TILES, tl.num_programs(0)):
        chunk = work // C_TILES
        sums = tl.zeros([SUMS, C_TILE], tl.float32)
        for line in range(chunk, lines, chunks):
            n, _, first_t, first_c, t, c = conv_place(
                line * C_TILES + work % C_TILES, batch, seq, C, LAST, T_TILE, C_TILE
            )
            inside = (first_t + t < seq) & (first_c + c < C)
            grad = conv_tile(grad_ptr + n * grad0, first_t, first_c, GT, GC)
            g = tl.load(grad + t * GT + c * GC, mask=inside, other=0.0).to(tl.float32)
            if SILU:
                y = conv_sums(x_ptr + n * x0, w_ptr, b_ptr, first_t, first_c, t, c, seq, XT, XC, C, K, BIAS, False)
                half = tl.sigmoid(y)
                g *= half * (1.0 + y * (1.0 - half))
                tl.store(conv_tile(g_ptr + n * seq * Y0, first_t, first_c, YT, YC) + t * YT + c * YC, g, mask=inside)
            x = conv_tile(x_ptr + n * x0, first_t, first_c, XT, XC)
            for j in tl.static_range(K):
                at = t - (K - 1 - j)
                here = (first_t + at >= 0) & (first_t + at < seq) & (first_c + c < C)
                near = tl.load(x + at * XT + c * XC, mask=here, other=0.0).to(tl.float32)
                sums += tl.where(which == j, tl.sum(g * near, axis=AXIS)[None, :], 0.0)
            sums += tl.where(which == K, tl.sum(g, axis=AXIS)[None, :], 0.0)
        first_c = (work % C_TILES) * C_TILE
        out = partial_ptr + tl.cast(chunk, tl.int64) * (K + 1) * C + first_c
        tl.store(out + which * C + channels, sums, mask=(which <= K) & (first_c + channels < C))


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """``mindspeed::causal_conv1d``."""
    y = _like(x)
    _convolve(x, weight, bias, y, silu, False)
    return y


def backward(grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> tuple[Tensor, Tensor, Tensor]:
    """``mindspeed::causal_conv1d_backward``: (dx, dweight, dbias), dbias empty without a bias."""
    (batch, channels, seq), size = x.shape, weight.shape[1]
    last, dx, grad = _channels_last(x), _like(x), _tight(grad)
    x, turned = _tight(x), weight.t().contiguous()
    g = _like(x, torch.float32) if silu else grad
    tile = _tile("sums", last, channels)
    lines, tiles = batch * -(-seq // tile["T_TILE"]), -(-channels // tile["C_TILE"])
    # Every chunk leaves sums: as few programs as keep the registers full.
    chunks = max(1, programs(x, lines * tiles, WARPS["sums"], 8) // tiles)
    partial = x.new_empty((chunks, size + 1, channels), dtype=torch.float32)
    launch(
        causal_conv1d_sums,
        chunks * tiles,
        grad, x, turned, turned if bias is None else bias, g, partial, batch, seq, chunks, grad.stride(0), x.stride(0),
        num_warps=WARPS["sums"],
        C=channels, K=size, GT=grad.stride(2), GC=grad.stride(1), XT=x.stride(2), XC=x.stride(1),
        YT=dx.stride(2), YC=dx.stride(1), Y0=channels, BIAS=bias is not None, SILU=silu, LAST=last,
        SUMS=power_of_two(size + 1), **tile,
    )  # fmt: skip
    _convolve(g, weight, None, dx, False, True)
    sums = column_sums.sums(partial.flatten(1), torch.float32).view(size + 1, channels)
    dbias = x.new_empty(0) if bias is None else sums[size].to(bias.dtype)
    return dx, sums[:size].t().contiguous().to(weight.dtype), dbias


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, silu: bool, back: bool) -> None:
    (batch, channels, seq), x = x.shape, _tight(x)
    last, turned = _channels_last(y), weight.t().contiguous()
    kind = "float32" if x.dtype == torch.float32 else "rows"
    tile = _tile(kind, last, channels)
    items = batch * -(-seq // tile["T_TILE"]) * -(-channels // tile["C_TILE"])
    launch(
        causal_conv1d_rows,
        programs(x, items, WARPS[kind], None if kind == "float32" else 64),
        x, turned, turned if bias is None else bias, y, batch, seq, x.stride(0),
        num_warps=WARPS[kind],
        C=channels, K=weight.shape[1], XT=x.stride(2), XC=x.stride(1), YT=y.stride(2), YC=y.stride(1), Y0=channels,
        BIAS=bias is not None, SILU=silu, BACK=back, LAST=last, **tile,
    )  # fmt: skip


def _tile(kind: str, last: bool, channels: int) -> dict[str, int]:
    """A tile of :data:`TILES`, with no more channels than there are, and no more tokens than REACH allows."""
    if not last:
        return {"T_TILE": 128, "C_TILE": 32}
    tokens, wide = TILES[kind]
    block = min(wide, power_of_two(channels))
    return {"T_TILE": min(32, tokens * wide // block), "C_TILE": block}


def _channels_last(x: Tensor) -> bool:
    return x.stride(1) == 1 and x.stride(2) != 1


def _like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Empty [batch, channels, seq], dense, with that dimension last in memory which is last in x."""
    batch, channels, seq = x.shape
    if not _channels_last(x):
        return x.new_empty(x.shape, dtype=dtype or x.dtype)
    return x.new_empty((batch, seq, channels), dtype=dtype or x.dtype).transpose(1, 2)


def _tight(x: Tensor) -> Tensor:
    """``x`` with adjacent elements in one of its dimensions: what is laid out otherwise is copied."""
    return x if 1 in (x.stride(1), x.stride(2)) else x.contiguous()
