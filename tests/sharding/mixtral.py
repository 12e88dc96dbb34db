"""The Llama of ``llama.py`` with a mixture of experts in place of each feed-forward part, written as a loop-free
program of plain torch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.sharding.llama import MLP, Llama


class Experts(nn.Module):
    def __init__(self, hidden: int, ffn: int, experts: int):
        super().__init__()
        self.gate, self.up = (nn.Parameter(torch.randn(experts, hidden, ffn) / hidden**0.5) for _ in range(2))
        self.down = nn.Parameter(torch.randn(experts, ffn, hidden) / ffn**0.5)

    def forward(self, rows, ends):
        product = torch.ops.mindspeed.grouped_matmul  # torch's own takes no float64
        return product(F.silu(product(rows, self.gate, ends)) * product(rows, self.up, ends), self.down, ends)


class Mixture(nn.Module):
    """Dropless, with an expert that all tokens share if ``shared``."""

    def __init__(self, hidden: int, ffn: int, experts: int, chosen: int, shared: bool):
        super().__init__()
        self.router, self.experts, self.chosen = (
            nn.Linear(hidden, experts, bias=False),
            Experts(hidden, ffn, experts),
            chosen,
        )
        self.shared = MLP(hidden, ffn, False) if shared else None

    def forward(self, x):
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = torch.topk(self.router(tokens).softmax(-1), self.chosen)
        order = chosen.flatten().argsort(stable=True)
        count = self.router.weight.shape[0]
        ends = torch.histc(chosen.flatten().float(), count, 0, count - 1).cumsum(0).to(torch.int32)
        out = self.experts(tokens[order // self.chosen], ends)
        routed = (
            (out[order.argsort()].view(-1, self.chosen, out.shape[-1]) * weights.unsqueeze(-1)).sum(1).view(x.shape)
        )
        return routed + self.shared(x) if self.shared is not None else routed


class Mixtral(Llama):
    def __init__(
        self,
        layers: int = 2,
        hidden: int = 32,
        ffn: int = 64,
        experts: int = 4,
        chosen: int = 2,
        shared: bool = False,
        **sizes,
    ):
        super().__init__(layers, hidden=hidden, ffn=ffn, **sizes)
        for layer in self.layers:
            layer.mlp = Mixture(hidden, ffn, experts, chosen, shared)
