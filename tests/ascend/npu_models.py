"""Models to cross-compile: each function returns (model, args, kwargs), as ``mindspeed-fx cross npu_models.py:NAME``
wants it.
"""

import torch
import torch.nn.functional as F
from torch import nn

from tests import models


def llama():
    return models.Llama().bfloat16(), models.tokens()


class Gpt2Block(nn.Module):
    def __init__(self, hidden=32, heads=4, dropout=0.0):
        super().__init__()
        self.heads, self.drop = heads, nn.Dropout(dropout)
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj, self.up, self.down = (
            nn.Linear(hidden, 3 * hidden),
            nn.Linear(hidden, hidden),
            nn.Linear(hidden, 4 * hidden),
            nn.Linear(4 * hidden, hidden),
        )

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")))


class Gpt2(nn.Module):
    def __init__(self, layers=2, vocab=64, hidden=32, dropout=0.0):
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocab, hidden), nn.Embedding(64, hidden)
        self.blocks, self.norm = (
            nn.Sequential(*(Gpt2Block(hidden, dropout=dropout) for _ in range(layers))),
            nn.LayerNorm(hidden),
        )

    def forward(self, ids, labels):
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return F.cross_entropy(
            (self.norm(self.blocks(x)) @ self.embed.weight.t()).flatten(0, 1).float(), labels.flatten()
        )


def gpt2():
    return Gpt2().bfloat16(), models.tokens()


class Norms(nn.Module):
    """torch's own RMSNorm and attention with grouped heads, which npu and cpu decompose differently."""

    def __init__(self, hidden=64):
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.RMSNorm(hidden, eps=1e-6),
            nn.Linear(hidden, 2 * hidden, bias=False),
            nn.Linear(hidden, hidden, bias=False),
        )

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (8, 16)).split((4, 2, 2), -2)
        a = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        return x + self.out(a.transpose(1, 2).flatten(2))


def norms():
    return nn.Sequential(Norms(), Norms()), (torch.randn(2, 16, 64),)


def _transformers(name, attention):
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.zoo.architectures import SMALL

    known = AutoConfig.for_model(name)
    config = AutoConfig.for_model(
        name,
        **{
            k: v
            for k, v in SMALL.items()
            if hasattr(known, k) and not (k in ("n_inner", "sliding_window") and getattr(known, k) is None)
        },
    )
    ids = torch.randint(3, 100, (2, 16))
    return (
        AutoModelForCausalLM.from_config(config, attn_implementation=attention).bfloat16().train(),
        (),
        dict(input_ids=ids, labels=ids, use_cache=False),
    )


def hf_llama():
    return _transformers("llama", "sdpa")


def hf_llama_eager():
    return _transformers("llama", "eager")


def hf_gpt2():
    return _transformers("gpt2", "sdpa")


def hf_qwen3():
    return _transformers("qwen3", "sdpa")


def hf_mixtral():
    return _transformers("mixtral", "eager")
