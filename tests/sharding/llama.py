"""A plain Llama with separate projections, for plans: every linear layer by a name that the named plans know."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.models import RMSNorm, rotate


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, bias: bool):
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, hidden // heads
        self.q_proj, self.o_proj = nn.Linear(hidden, hidden, bias=bias), nn.Linear(hidden, hidden, bias=bias)
        self.k_proj, self.v_proj = (nn.Linear(hidden, kv_heads * self.dim, bias=bias) for _ in range(2))

    def forward(self, x, cos, sin):
        b, s, _ = x.shape
        q, k, v = (
            p(x).view(b, s, n, self.dim).transpose(1, 2)
            for p, n in ((self.q_proj, self.heads), (self.k_proj, self.kv_heads), (self.v_proj, self.kv_heads))
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return self.o_proj(self.attend(q, k, v).transpose(1, 2).reshape(b, s, -1))

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class MLP(nn.Module):
    def __init__(self, hidden: int, ffn: int, bias: bool):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, ffn, bias=bias) for _ in range(2))
        self.down_proj = nn.Linear(ffn, hidden, bias=bias)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, ffn: int, bias: bool):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(hidden), RMSNorm(hidden)
        self.attention, self.mlp = Attention(hidden, heads, kv_heads, bias), MLP(hidden, ffn, bias)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    def __init__(
        self,
        layers: int = 2,
        hidden: int = 32,
        heads: int = 4,
        kv_heads: int = 4,
        ffn: int = 64,
        vocab: int = 64,
        bias: bool = False,
        tied: bool = False,
        z_loss: float = 0.0,
    ):
        super().__init__()
        self.z_loss = z_loss
        self.embed = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(Layer(hidden, heads, kv_heads, ffn, bias) for _ in range(layers))
        self.norm, self.head = RMSNorm(hidden), nn.Linear(hidden, vocab, bias=False)
        self.dim, self.checkpointed = hidden // heads, False
        if tied:
            self.head.weight = self.embed.weight

    def run_layers(self, ids):
        x = self.embed(ids)
        angles = torch.outer(
            torch.arange(ids.shape[1], device=ids.device).to(x.dtype),
            1.0 / 100.0 ** (torch.arange(0, self.dim, 2, device=ids.device) / self.dim),
        )
        cos, sin = (torch.cat((f(angles), f(angles)), -1).to(x.dtype) for f in (torch.cos, torch.sin))
        for layer in self.layers:
            x = (
                torch.utils.checkpoint.checkpoint(layer, x, cos, sin, use_reentrant=False)
                if self.checkpointed
                else layer(x, cos, sin)
            )
        return x

    def forward(self, ids, labels):
        logits = self.head(self.norm(self.run_layers(ids))).view(-1, self.head.weight.shape[0])
        loss = F.cross_entropy(logits, labels.view(-1))
        return loss + self.z_loss * logits.logsumexp(-1).square().mean() if self.z_loss else loss


class Masked(Llama):
    """Attention with the mask that ``mask(ids)`` [batch or 1, 1, queries, keys] makes."""

    def __init__(self, mask, layers: int = 1, **sizes: int):
        super().__init__(layers, **sizes)
        self.mask = mask
        for layer in self.layers:
            layer.attention.__class__ = MaskedAttention

    def forward(self, ids, labels):
        for layer in self.layers:
            layer.attention.allowed = self.mask(ids)
        return super().forward(ids, labels)


class MaskedAttention(Attention):
    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.allowed, enable_gqa=True)


def sliding_window(ids):
    i, j = torch.arange(ids.shape[1]).unsqueeze(1), torch.arange(ids.shape[1])
    return ((j <= i) & (i - j < 8))[None, None]
