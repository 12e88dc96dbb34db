"""Models for the plan search, by the sizes that were published, on the meta device: Llama 3 8B, 70B and 405B, a
DeepSeek-V3, Qwen3-235B.

Each function returns (model, args): ``mindspeed-fx plan benchmarks/plan_models.py:llama_8b --devices 64``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * self.weight


def rotated(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def angles(length: int, width: int, like, base: float):
    result = torch.outer(
        torch.arange(length, device=like.device).float(),
        1.0 / base ** (torch.arange(0, width, 2, device=like.device).float() / width),
    )
    return [torch.cat((f(result), f(result)), -1).to(like.dtype) for f in (torch.cos, torch.sin)]


class Attention(nn.Module):
    """Grouped-query attention; with ``normed`` queries and keys pass a norm by head (Qwen3)."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, width: int | None = None, normed: bool = False):
        super().__init__()
        self.heads, self.kv_heads, self.width = heads, kv_heads, width or hidden // heads
        self.q_proj = nn.Linear(hidden, heads * self.width, bias=False)
        self.o_proj = nn.Linear(heads * self.width, hidden, bias=False)
        self.q_norm, self.k_norm = (RMSNorm(self.width) if normed else nn.Identity() for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(hidden, kv_heads * self.width, bias=False) for _ in range(2))

    def forward(self, x, cos, sin):
        b, s, _ = x.shape
        q, k, v = (
            p(x).view(b, s, n, self.width).transpose(1, 2)
            for p, n in ((self.q_proj, self.heads), (self.k_proj, self.kv_heads), (self.v_proj, self.kv_heads))
        )
        q, k = rotated(self.q_norm(q), cos, sin), rotated(self.k_norm(k), cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(b, s, -1))


class LatentAttention(nn.Module):
    """DeepSeek's multi-head latent attention: queries, keys and values from low-rank projections, a rotary part
    apart.
    """

    def __init__(
        self, hidden: int, heads: int, q_rank: int = 1536, kv_rank: int = 512, plain: int = 128, rotary: int = 64
    ):
        super().__init__()
        self.heads, self.plain, self.rotary, self.kv_rank = heads, plain, rotary, kv_rank
        self.q_a, self.q_norm, self.q_b = (
            nn.Linear(hidden, q_rank, bias=False),
            RMSNorm(q_rank),
            nn.Linear(q_rank, heads * (plain + rotary), bias=False),
        )
        self.kv_a, self.k_rope, self.kv_norm = (
            nn.Linear(hidden, kv_rank, bias=False),
            nn.Linear(hidden, rotary, bias=False),
            RMSNorm(kv_rank),
        )
        self.k_b, self.v_b = (nn.Linear(kv_rank, heads * plain, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(heads * plain, hidden, bias=False)

    def forward(self, x, cos, sin):
        b, s, _ = x.shape
        q = self.q_b(self.q_norm(self.q_a(x))).view(b, s, self.heads, -1).transpose(1, 2)
        q = torch.cat((q[..., : self.plain], rotated(q[..., self.plain :], cos, sin)), -1)
        latent = self.kv_norm(self.kv_a(x))
        shared = rotated(self.k_rope(x).view(b, s, 1, self.rotary).transpose(1, 2), cos, sin)
        k, v = (p(latent).view(b, s, self.heads, self.plain).transpose(1, 2) for p in (self.k_b, self.v_b))
        k = torch.cat((k, shared.expand(-1, self.heads, -1, -1)), -1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(b, s, -1))


class MLP(nn.Module):
    def __init__(self, hidden: int, ffn: int):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, ffn, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """Routed experts without dropping, and, unless ``shared`` is False, a shared one."""

    def __init__(self, hidden: int, ffn: int, experts: int, chosen: int, shared: bool = True):
        super().__init__()
        self.router, self.chosen, self.experts = nn.Linear(hidden, experts, bias=False), chosen, experts
        self.shared = MLP(hidden, ffn) if shared else None
        self.gate, self.up = (nn.Parameter(torch.empty(experts, hidden, ffn)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(experts, ffn, hidden))

    def forward(self, x):
        tokens = x.reshape(-1, x.shape[-1])
        weights, experts = torch.topk(torch.sigmoid(self.router(tokens).float()), self.chosen)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        order = experts.flatten().argsort(stable=True)
        ends = torch.histc(experts.flatten().float(), self.experts, 0, self.experts - 1).cumsum(0).to(torch.int32)
        rows = tokens[order // self.chosen]
        inner = F.silu(F.grouped_mm(rows, self.gate, offs=ends)) * F.grouped_mm(rows, self.up, offs=ends)
        out = F.grouped_mm(inner, self.down, offs=ends)
        routed = (out[order.argsort()].view(-1, self.chosen, out.shape[-1]) * weights.unsqueeze(-1)).sum(1)
        return routed.view(x.shape) + (0 if self.shared is None else self.shared(x))


class Layer(nn.Module):
    def __init__(self, hidden: int, attention: nn.Module, mlp: nn.Module):
        super().__init__()
        self.input_norm, self.post_norm = RMSNorm(hidden), RMSNorm(hidden)
        self.self_attention, self.mlp = attention, mlp

    def forward(self, x, cos, sin):
        x = x + self.self_attention(self.input_norm(x), cos, sin)
        return x + self.mlp(self.post_norm(x))


class Decoder(nn.Module):
    def __init__(self, vocab: int, hidden: int, rotary: int, layers: list[nn.Module], base: float = 500000.0):
        super().__init__()
        self.base = base
        self.embed, self.layers = nn.Embedding(vocab, hidden), nn.ModuleList(layers)
        self.norm, self.head, self.rotary = RMSNorm(hidden), nn.Linear(hidden, vocab, bias=False), rotary

    def forward(self, ids, labels):
        x = self.embed(ids)
        cos, sin = angles(ids.shape[1], self.rotary, x, self.base)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def _step(model: nn.Module, batch: int, length: int) -> tuple:
    return model.bfloat16(), (
        torch.zeros(batch, length, dtype=torch.long),
        torch.zeros(batch, length, dtype=torch.long),
    )


def llama_8b(layers: int = 32, batch: int = 64, length: int = 8192) -> tuple:
    with torch.device("meta"):
        return _step(
            Decoder(128256, 4096, 128, [Layer(4096, Attention(4096, 32, 8), MLP(4096, 14336)) for _ in range(layers)]),
            batch,
            length,
        )


def llama_70b(layers: int = 80, batch: int = 128, length: int = 8192) -> tuple:
    with torch.device("meta"):
        return _step(
            Decoder(128256, 8192, 128, [Layer(8192, Attention(8192, 64, 8), MLP(8192, 28672)) for _ in range(layers)]),
            batch,
            length,
        )


def llama_405b(layers: int = 126, batch: int = 2048, length: int = 8192) -> tuple:
    with torch.device("meta"):
        layer = [Layer(16384, Attention(16384, 128, 8), MLP(16384, 53248)) for _ in range(layers)]
        return _step(Decoder(128256, 16384, 128, layer), batch, length)


def qwen3_235b(layers: int = 94, batch: int = 2048, length: int = 4096) -> tuple:
    with torch.device("meta"):
        layer = [
            Layer(4096, Attention(4096, 64, 4, 128, normed=True), Experts(4096, 1536, 128, 8, shared=False))
            for _ in range(layers)
        ]
        return _step(Decoder(151936, 4096, 128, layer, 1e6), batch, length)


def deepseek_v3(dense: int = 3, sparse: int = 58, batch: int = 512, length: int = 4096) -> tuple:
    with torch.device("meta"):
        layers = [Layer(7168, LatentAttention(7168, 128), MLP(7168, 18432)) for _ in range(dense)]
        layers += [Layer(7168, LatentAttention(7168, 128), Experts(7168, 2048, 256, 8)) for _ in range(sparse)]
        return _step(Decoder(129280, 7168, 64, layers), batch, length)


def experts(layers: int = 24, batch: int = 64, length: int = 4096) -> tuple:
    """A mixture of experts of middle size: 64 experts of which 8 are chosen, grouped-query attention."""
    with torch.device("meta"):
        return _step(
            Decoder(
                128256,
                4096,
                128,
                [Layer(4096, Attention(4096, 32, 8), Experts(4096, 1536, 64, 8)) for _ in range(layers)],
            ),
            batch,
            length,
        )
