"""``--reuse-fp32-param``: one copy of 16- and 32-bit weights.

A bfloat16 weight is the upper half of its float32 main weight, rounded to the nearest, ties to even. Beside it the
lower 16 bits are kept, and both give the float32 bits again: 4 bytes a weight between steps where Megatron has 2 + 4.
With the distributed optimizer the lower bits are those of the rank's shard: 2 bytes a weight of the shard are saved.

Rounding adds 1 to the upper half u where the lower half l is above 0x8000, or equal to it with u odd. So l tells u from
the rounded half h, except for l = 0x8000 and h even: 65,537 float32 values round to an even h, one more than 16 bits
can tell apart. Of the two values with l = 0x8000 that with u = h (the tie that rounds down) is found in a list of
positions: one weight in 2^17 where lower halves are arbitrary. MindSpeed keeps that bit in the sign of Adam's second
moment; a list serves every optimizer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_fx.megatron import lean_optimizer

TIE = -32768
"""The lower half 0x8000, as a signed number."""
QUIET = 0x40
"""The bit of a bfloat16 that makes a NaN of any payload."""
PARTS = 16
"""Parts of a step, as many as MindSpeed's --swap-optimizer-times has by default: a sixteenth of the main weights, or
one weight where that is larger, is whole at a time."""
FLAG = "--reuse-fp32-param"


def split(value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The bfloat16 values nearest to float32 ones, and what is left.

    Args:
        value: float32, [...].

    Returns:
        Nearest bfloat16 values, ties to even [...]; lower halves, int16 [numel]; positions of ties that round down,
        int32, or int64 where there are 2^31 weights.

    Of a NaN the payload stays, with the bit that bfloat16 needs to be a NaN.
    """
    halves = value.contiguous().view(-1).view(torch.int16)
    low, upper = halves[0::2].clone(memory_format=torch.contiguous_format), halves[1::2]
    is_nan = value.reshape(-1).isnan()
    is_tie_down = (low == TIE) & ((upper & 1) == 0)
    rounds_up = (low < 0) & ~is_tie_down & ~is_nan
    rounded = torch.where(is_nan, upper | QUIET, upper + rounds_up)
    ties = (is_tie_down & ~is_nan).nonzero().view(-1)
    if value.numel() < 2**31:
        ties = ties.int()
    return rounded.view(torch.bfloat16).view(value.shape), low, ties


def join(rounded: Tensor, low: Tensor, ties: Tensor) -> Tensor:
    """The float32 values [...] of which :func:`split` made these."""
    flat = rounded.contiguous().view(-1)
    upper = flat.view(torch.int16) - ((low < 0) & ~flat.isnan()).short()
    upper[ties.long()] += 1
    return torch.stack([low, upper], 1).view(torch.float32).view(rounded.shape)


class Residual:
    """Keeps a main weight as its bfloat16 weight and the lower halves (:class:`lean_optimizer.Keeper`)."""

    def __init__(self, model: Tensor, main: Tensor) -> None:
        self.model, self.main = model, main
        self.release()

    def prefetch(self) -> None:
        """Nothing is far away."""

    def restore(self) -> None:
        self.main.data = self.float32()

    @torch.no_grad()
    def release(self) -> None:
        rounded, self.low, self.ties = split(self.main.detach())
        self.model.detach().copy_(rounded)
        self.discard()

    def discard(self) -> None:
        self.main.data = lean_optimizer.absent(self.main)

    @torch.no_grad()
    def float32(self) -> Tensor:
        return join(self.model.detach(), self.low, self.ties)

    def keep_states(self) -> None:
        """States stay where they are."""

    def settle(self) -> None:
        """The device's order is enough."""


def reuse_weights(optimizer: Any) -> Any:
    """An optimizer of Megatron's that keeps no float32 copy of bfloat16 weights between its steps.

    Args:
        optimizer: what ``get_megatron_optimizer`` returns, before its first step; not to be used afterwards.

    Raises:
        OptionError: it is of a class that is not known here.
    """
    return lean_optimizer.make_lean(optimizer, FLAG, _residuals, PARTS)


def _residuals(optimizer: Any) -> list[lean_optimizer.Keeper]:
    return [Residual(model, main) for model, main in lean_optimizer.weight_pairs(optimizer)]
