"""Log-sum-exp of attention's rows in Triton: a tile is all heads of some tokens, read by heads and written by tokens.

Source: the formula of mindspeed_fx/kernels/attention_lse.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mindspeed_fx.kernels.triton.launch import launch, power_of_two, programs, warps

TILE = 4096
"""Elements of the statistics that a tile aims at."""


@triton.jit
def attention_lse_rows(
    top_ptr,
    total_ptr,
    lse_ptr,
    batch,
    seq,
    N: tl.constexpr,
    REPEATED: tl.constexpr,
    ALL: tl.constexpr,
    ROWS: tl.constexpr,
):
    """lse [batch, seq, N] of top and total [batch, N, seq, REPEATED]; ALL: a power of two that holds N heads."""
    tiles = (seq + ROWS - 1) // ROWS
    heads = tl.arange(0, ALL)[:, None, None]
    rows = tl.arange(0, ROWS)[None, :, None]
    again = tl.arange(0, REPEATED)[None, None, :]
    for item in range(tl.program_id(0), batch * tiles, tl.num_programs(0)):
        first = (item % tiles) * ROWS
        whole = tl.cast(item // tiles, tl.int64) * N * seq
        place = heads * seq * REPEATED + (first + rows) * REPEATED + again
        mask = (heads < N) & (first + rows < seq)
        top = tl.max(tl.load(top_ptr + whole * REPEATED + place, mask=mask, other=0.0), axis=2)
        total = tl.max(tl.load(total_ptr + whole * REPEATED + place, mask=mask, other=1.0), axis=2)
        lse = tl.trans(top + tl.log(total))
        lines, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, ALL)[None, :]
        tl.store(lse_ptr + whole + (first + lines) * N + columns, lse, mask=(columns < N) & (first + lines < seq))


def forward(top: Tensor, total: Tensor) -> Tensor:
    """``mindspeed::attention_lse``."""
    batch, heads, seq, repeated = top.shape
    lse = top.new_empty((batch, seq, heads))
    block = power_of_two(heads)
    rows = max(1, min(power_of_two(seq), TILE // (block * repeated)))
    num_warps = warps(block * rows * repeated)
    launch(
        attention_lse_rows,
        programs(top, batch * -(-seq // rows), num_warps, 64),
        top,
        total,
        lse,
        batch,
        seq,
        num_warps=num_warps,
        N=heads,
        REPEATED=repeated,
        ALL=block,
        ROWS=rows,
    )
    return lse.transpose(1, 2)
