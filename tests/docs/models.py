"""Small models for the pages' hidden setups, under the names that the pages use."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

LAUNCH = (
    "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 1 --global-batch-size 512 --tensor-model-parallel-size 2 --vocab-size 32000 --bf16 --swiglu"
).split()
"""Arguments of a Megatron launch."""


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in layers)
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """A layer of attention and an MLP four times as wide, as the textbooks count it."""

    def __init__(self, hidden: int = 32, heads: int = 4):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.attention = Attention(hidden, heads)
        self.up_proj, self.down_proj = (
            nn.Linear(hidden, 4 * hidden, bias=False),
            nn.Linear(4 * hidden, hidden, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down_proj(F.gelu(self.up_proj(self.norm2(x))))


class Decoder(nn.Module):
    """Layers between an embedding and a loss."""

    def __init__(self, layers: int = 2, vocabulary: int = 64, hidden: int = 32, heads: int = 4):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(Layer(hidden, heads) for _ in range(layers))
        self.norm, self.lm_head = nn.RMSNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.lm_head(self.norm(x)).flatten(0, 1), labels.flatten())


class Mixture(nn.Module):
    """Experts without a capacity, each row by itself."""

    def __init__(self, hidden: int, experts: int = 2):
        super().__init__()
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        return sum(e(x) * weights[..., i : i + 1] for i, e in enumerate(self.experts))
