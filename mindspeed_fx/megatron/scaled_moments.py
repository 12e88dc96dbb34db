"""``--quant-states``: Adam's moments in 8 bits between steps, each block of numbers with a scale of its own.

First moments are numbers of e4m3 (3 bits of fraction), second ones of e5m2 (2 bits, a larger range), multiplied by the
power of two that brings the largest of a block next below the largest of the type: 128 numbers share a scale in "fp8",
32 in "mxfp8". A moment takes 1.01 or 1.03 bytes, in float32 4. Types and blocks are MindSpeed's; its scales of "fp8"
are no powers of two, and it rounds to the nearest number. A second moment, of which a step changes a thousandth, less
than half a unit of its last place, hardly moves then: it stays far below Adam's, and steps are too large. Here the bits
that are left off are rounded up as often as they say (stochastic rounding; Gupta et al. 2015), by noise that is made of
the step and the number's place, so that a run is the same every time. A second moment above zero stays above it: a step
divides by its root.

Checkpoints hold the moments in float32, of which the same numbers are made again.
"""

from __future__ import annotations

import math
from typing import Any, Iterable

import torch
from torch import Tensor

from mindspeed_fx.compat.stored_tensor import StoredTensor

BLOCKS = {"fp8": 128, "mxfp8": 32}
"""What ``--quant-states`` may be: how many numbers share a scale."""
TYPES = {"exp_avg": torch.float8_e4m3fn, "exp_avg_sq": torch.float8_e5m2}
AT_ONCE = 1 << 24
"""Numbers that are rounded together: so many are whole beside what is kept."""
KEY = "_mindspeed_fx_wide_moments"


class ScaledMoment(StoredTensor):
    """A float32 tensor to others, held as numbers of 8 bits and scales.

    Args:
        like: its shape and device; float32.
        numbers: [blocks, numbers of a block], of 8 bits, float; the last ones are padding.
        exponents: [blocks] int8, of the powers of two that the numbers were multiplied by.
        is_positive: no number is below zero, and what is above it stays so.
    """

    def __init__(self, like: Tensor, numbers: Tensor, exponents: Tensor, is_positive: bool) -> None:
        self.numbers, self.exponents, self.is_positive = numbers, exponents, is_positive

    def same(self, is_copy: bool) -> ScaledMoment:
        parts = self.numbers, self.exponents
        return ScaledMoment(self, *(p.clone() if is_copy else p for p in parts), self.is_positive)

    def whole(self) -> Tensor:
        values = self.numbers.float() * _power_of_two(-self.exponents.int()).unsqueeze(1)
        return values.view(-1)[: self.numel()].view(self.shape)

    def keep(self, values: Tensor, step: int = 0) -> None:
        """Round ``values``.

        Args:
            step: what the noise of the rounding is made of, beside the places of the numbers.
        """
        count, width = self.numbers.shape
        flat = values.detach().reshape(-1)
        for first in range(0, count, rows := AT_ONCE // width):
            part = flat[first * width : (first + rows) * width].float()
            blocks = torch.nn.functional.pad(part, (0, -part.numel() % width)).view(-1, width)
            noise = _noise(blocks, first * width, step)
            numbers, exponents = _rounded(blocks, noise, self.numbers.dtype, self.is_positive)
            self.numbers[first : first + rows] = numbers
            self.exponents[first : first + rows] = exponents


def scaled(form: str, parameter: Tensor, name: str, moment: Tensor) -> Tensor:
    """A moment of a parameter as it is kept.

    Args:
        form: one of :data:`BLOCKS`.
        name: one of :data:`TYPES`.
        moment: of any form.
    """
    if isinstance(moment, ScaledMoment) or getattr(parameter, KEY, False):
        return moment
    blocks = -(-moment.numel() // BLOCKS[form])
    numbers = torch.zeros(blocks, BLOCKS[form], dtype=TYPES[name], device=moment.device)
    exponents = torch.zeros(blocks, dtype=torch.int8, device=moment.device)
    kept = ScaledMoment(moment.detach().float(), numbers, exponents, name == "exp_avg_sq")
    kept.keep(moment)
    return kept


def keep_wide(part: Any, chunks: Iterable[torch.nn.Module]) -> None:
    """Have an optimizer of Megatron's keep the moments of embeddings and of the last projection in float32, as
    MindSpeed does."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if "embedding" in name or "output_layer" in name:
                setattr(_stepped(part, parameter), KEY, True)


def _stepped(part: Any, parameter: Tensor) -> Tensor:
    """What the optimizer steps of a parameter, or the parameter."""
    places = getattr(part, "model_param_group_index_map", None)
    if places is None:
        main = getattr(parameter, "main_param", None)
        return parameter if main is None else main
    if parameter not in places:
        return parameter
    group, order = places[parameter]
    return part.optimizer.param_groups[group]["params"][order]


def _noise(blocks: Tensor, first: int, step: int) -> Tensor:
    """int32 [blocks, n], 24 random-looking bits each: a hash of the step and of each number's place, counted from
    ``first``, by shifts and multiplications of 31 bits."""
    x = torch.arange(first, first + blocks.numel(), device=blocks.device).add_(step * 0x9E3779B9).bitwise_and_(_MASK)
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        x = (x ^ (x >> shift)).mul_(factor).bitwise_and_(_MASK)
    return (x ^ (x >> 15)).bitwise_and_(0xFFFFFF).int().view_as(blocks)


_MASK = 0x7FFFFFFF


def _power_of_two(exponents: Tensor) -> Tensor:
    """float32 of int32 from -126 to 126, by its bits: powers that are computed need not be exact."""
    return ((exponents + 127) << 23).view(torch.float32)


def _rounded(blocks: Tensor, noise: Tensor, dtype: torch.dtype, is_positive: bool) -> tuple[Tensor, Tensor]:
    """(numbers of 8 bits, exponents) of float32 blocks [blocks, n].

    Infinities and NaN make their block NaN.
    """
    limits = torch.finfo(dtype)
    smallest = limits.smallest_normal * limits.eps
    fraction, top = math.frexp(limits.max)
    largest = blocks.abs().amax(1).view(torch.int32)
    is_above = (largest & (1 << 23) - 1) > int((2 * fraction - 1) * (1 << 23))  # the fraction of the largest number
    exponents = (top + 126 - (largest >> 23) - is_above.int()).clamp(-126, 126)
    scaled_up = blocks * _power_of_two(exponents).unsqueeze(1)
    size = scaled_up.abs()
    # normal numbers: what is added to the bits that are left off carries into those that stay
    bits = 23 - round(-math.log2(limits.eps))
    normal = ((size.view(torch.int32) + (noise >> (24 - bits))) >> bits << bits).view(torch.float32)
    small = (size / smallest + noise * 2.0**-24).floor() * smallest
    size = torch.where(size >= limits.smallest_normal, normal, small)
    if is_positive:
        size = torch.where((scaled_up > 0) & (size == 0), smallest, size)
    size = torch.where(blocks.isfinite().all(1, keepdim=True), size.clamp(max=limits.max), math.nan)
    return torch.copysign(size, scaled_up).to(dtype), exponents.to(torch.int8)
