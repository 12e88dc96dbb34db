"""Which entries a token sees, and the loss that the choice learns from (DeepSeek-V4, section 2.3; for single tokens
:mod:`mindspeed_fx.megatron.sparse_attention`).

With x the layer's normed input and c the normed latent of its queries, neither of which gets a gradient from here, and
e_j the entries of a compressor of its own,

    score_tj = sum over heads of w_th relu(q_th e_j),    q = rope(W_q c),    w = W_w x / sqrt(heads width).

A token sees the ``topk`` best entries whose pools end up to it. The loss is the mean over tokens of

    KL(a || softmax(score)) over these,    a_j = attention to them alone, added up over heads, over its sum.

The Hadamard rotation that MindSpeed-LLM puts before quantization is orthogonal: scores are the same without it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mindspeed_fx.megatron.deepseek4 import rotation
from mindspeed_fx.megatron.deepseek4.compressor import Compressor
from mindspeed_fx.megatron.deepseek4.parts import linear, wide
from mindspeed_fx.megatron.deepseek4.sequence import Ranks
from mindspeed_fx.megatron.deepseek4.settings import CHOSEN, Settings

EPSILON = 1e-9
"""Of both distributions of the loss."""


class Indexer(nn.Module):
    """Scores of entries; every tensor-parallel rank has all of it, and all tokens of its context-parallel rank.

    Args:
        config: an MLATransformerConfig.
        settings: of the layers.
        frequency: of the rotation.
        context: context-parallel ranks.
    """

    def __init__(self, config: Any, settings: Settings, frequency: list[float], context: Any) -> None:
        super().__init__()
        self.heads, self.width, self.topk = settings.index_heads, settings.index_width, settings.index_topk
        self.frequency = frequency
        self.wq_b = linear(config, config.q_lora_rank, self.heads * self.width, is_local=False)
        self.weights_proj = linear(config, config.hidden_size, self.heads, is_local=False)
        self.kv_compressor = Compressor(config, CHOSEN, self.width, frequency, Ranks(None, context), is_local=False)

    def forward(self, x: Tensor, latent: Tensor, positions: Tensor) -> Tensor:
        """Scores [batch, rows, entries] in float32 or better, of entries that are not over yet too.

        Args:
            x: [rows, batch, hidden]; latent: [rows, batch, q_lora_rank]; positions: [rows].
        """
        q = self.wq_b(latent).view(*latent.shape[:-1], self.heads, self.width)
        q = rotation.rotate(q, rotation.angles(positions, self.frequency))
        weights = self.weights_proj(x) * (self.heads * self.width) ** -0.5
        products = torch.einsum("sbhd,tbd->bhst", wide(q), wide(self.kv_compressor(x))).relu()
        return (products * weights.permute(1, 2, 0).unsqueeze(-1)).sum(1)

    def choose(self, scores: Tensor, is_over: Tensor) -> Tensor:
        """Bool [batch, rows, entries] where a token sees an entry.

        Args:
            scores: of :meth:`forward`.
            is_over: bool [rows, entries], whether the pool ends up to the token.
        """
        best = scores.detach().masked_fill(~is_over, float("-inf")).topk(min(self.topk, scores.shape[-1]), -1).indices
        return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True) & is_over


def loss_of(scores: Tensor, target: Tensor, chosen: Tensor) -> Tensor:
    """The mean of KL(target || softmax(scores)); tokens that see no entry count with 0.

    Args:
        scores: [batch, rows, entries].
        target: the same shape, zero where not chosen, adding up to 1 or to 0.
        chosen: bool.
    """
    likely = scores.masked_fill(~chosen, torch.finfo(scores.dtype).min).softmax(-1) + EPSILON
    return (target * (target.clamp(min=EPSILON).log() - likely.log())).sum(-1).mean()
