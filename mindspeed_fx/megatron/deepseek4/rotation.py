"""DeepSeek-V4's rotation (``--position-embedding-type deepseek4``): the last channels of a head, neighbours together.

Channels 2i and 2i + 1 of the last d turn by p f_i at position p: f_i = base^(-2i / d), and where YaRN changes them
(Peng et al. 2023, section 3.2) f_i (r_i + (1 - r_i) / factor), r_i the ramp from 1 to 0 between the channels that turn
beta_fast and beta_slow times within the original length. Cosines have no factor.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mindspeed_fx.megatron.deepseek4.parts import wide
from mindspeed_fx.megatron.deepseek4.settings import Settings


def frequencies(settings: Settings, width: int, is_pooled: bool) -> list[float]:
    """[width / 2], of layers that pool tokens or not."""
    base = settings.pooled_theta if is_pooled else settings.theta
    plain = [base ** (-2 * i / width) for i in range(width // 2)]
    if not is_pooled or not settings.original_length:
        return plain
    low = max(math.floor(_channel(settings.beta_fast, settings, width)), 0)
    high = min(math.ceil(_channel(settings.beta_slow, settings, width)), width - 1)
    span = high - low or 0.001
    kept = [1 - min(max((i - low) / span, 0.0), 1.0) for i in range(width // 2)]
    return [f * (r + (1 - r) / settings.factor) for f, r in zip(plain, kept)]


def _channel(rotations: float, settings: Settings, width: int) -> float:
    """Which pair of channels turns so many times within the original length."""
    turns = settings.original_length / (rotations * 2 * math.pi)
    return width * math.log(turns) / (2 * math.log(settings.pooled_theta))


def angles(positions: Tensor, frequency: list[float]) -> Tensor:
    """[positions, width / 2] in float32, of positions [positions]."""
    return torch.outer(positions.float(), torch.tensor(frequency, dtype=torch.float32, device=positions.device))


def rotate(x: Tensor, angle: Tensor, is_back: bool = False) -> Tensor:
    """Turn the last channels of x [positions, batch, ..., width] by angle [positions, channels / 2], or back."""
    angle = angle.view(angle.shape[0], *[1] * (x.dim() - 2), angle.shape[-1])
    kept, turned = x.split([x.shape[-1] - 2 * angle.shape[-1], 2 * angle.shape[-1]], -1)
    turned = wide(turned)
    cos, sin = angle.cos().to(turned.dtype), angle.sin().to(turned.dtype)
    if is_back:
        sin = -sin
    one, other = turned[..., 0::2], turned[..., 1::2]
    pairs = torch.stack([one * cos - other * sin, one * sin + other * cos], -1)
    return torch.cat([kept, pairs.flatten(-2).to(x.dtype)], -1)
