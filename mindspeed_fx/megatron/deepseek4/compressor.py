"""Entries that stand for several tokens: a softmax, channel by channel, over r tokens (DeepSeek-V4, section 2.3).

Entry j of a head of width d, with k = W_k x and g = W_g x + a of each token, a learnt for each place in a pool,

    rope(norm(sum of softmax(g)_t k_t over tokens t of pool j)),    at the position of the pool's first token.

With r = 4 pools overlap: k and g have 2 d channels, and entry j takes the first d of the tokens of pool j - 1 together
with the last d of those of its own. Tokens behind the last whole pool are in none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mindspeed_fx.megatron.deepseek4 import rotation, sequence
from mindspeed_fx.megatron.deepseek4.parts import linear, norm, wide
from mindspeed_fx.megatron.deepseek4.settings import CHOSEN


class Compressor(nn.Module):
    """Entries of one layer.

    Args:
        config: an MLATransformerConfig.
        ratio: tokens of a pool.
        width: of an entry.
        frequency: of the rotation of its last channels.
        ranks: who has the rest of the sequence.
        is_local: whether a rank's gradient is a part of it: of its own tokens, and of its own heads.
    """

    def __init__(
        self, config: Any, ratio: int, width: int, frequency: list[float], ranks: sequence.Ranks, is_local: bool
    ) -> None:
        super().__init__()
        self.ratio, self.width, self.frequency, self.ranks = ratio, width, frequency, ranks
        self.overlaps = ratio == CHOSEN
        channels = width * (1 + self.overlaps)
        self.wkv = linear(config, config.hidden_size, channels, is_local)
        self.wgate = linear(config, config.hidden_size, channels, is_local)
        self.norm = norm(config, width, is_local)
        placed = dict(device=torch.cuda.current_device(), dtype=config.params_dtype)
        self.ape = nn.Parameter(torch.empty(ratio, channels, **placed))
        if config.perform_initialization:
            config.init_method(self.ape)
        self.ape.sequence_parallel = config.sequence_parallel and is_local

    def forward(self, x: Tensor) -> Tensor:
        """[entries, batch, width] of all ranks' x [rows, batch, hidden]; no entries where the sequence is short."""
        kind = wide(x).dtype
        both = torch.cat([self.wkv.weight, self.wgate.weight]).to(kind)
        k, g = self.ranks.gather(functional.linear(wide(x), both)).chunk(2, -1)
        entries = k.shape[0] // self.ratio
        if not entries:
            return x.new_zeros(0, x.shape[1], self.width)
        k, g = (t[: entries * self.ratio].view(entries, self.ratio, *t.shape[1:]) for t in (k, g))
        g = g + wide(self.ape).unsqueeze(1)
        if self.overlaps:
            k, g = self._overlap(k, 0.0), self._overlap(g, float("-inf"))
        pooled = (k * g.softmax(1)).sum(1)
        normed = functional.rms_norm(pooled, (self.width,), self.norm.weight.to(kind), self.norm.eps).to(x.dtype)
        first = torch.arange(entries, device=x.device) * self.ratio
        return rotation.rotate(normed, rotation.angles(first, self.frequency))

    def _overlap(self, x: Tensor, before: float) -> Tensor:
        """[entries, 2 ratio, batch, width] of x [entries, ratio, batch, 2 width]: the pool before, and the own."""
        earlier, own = x.chunk(2, -1)
        earlier = torch.cat([torch.full_like(earlier[:1], before), earlier[:-1]])
        return torch.cat([earlier, own], 1)
