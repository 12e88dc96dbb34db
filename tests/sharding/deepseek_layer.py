"""A layer of DeepSeek-V3: transformers' attention, router and shared expert, and experts without a loop."""

from __future__ import annotations

import torch
from torch import nn

from tests.sharding.mixtral import Experts

SMALL = dict(
    hidden_size=64, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=16,
    qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, intermediate_size=128, moe_intermediate_size=32,
    n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1, vocab_size=64,
)  # fmt: skip
"""Sizes for quick tests; without them the layer has its true ones."""


class SortedExperts(Experts):
    def forward(self, tokens, chosen, weights):
        count, k = self.gate.shape[0], chosen.shape[1]
        order = chosen.flatten().argsort(stable=True)
        ends = torch.histc(chosen.flatten().float(), count, 0, count - 1).cumsum(0).to(torch.int32)
        rows = super().forward(tokens[order // k], ends)[order.argsort()].view(-1, k, tokens.shape[1])
        return (rows * weights.unsqueeze(-1)).sum(1)


class DeepseekLayer(nn.Module):
    def __init__(self, dense: bool = False, **sizes):
        super().__init__()
        from transformers import DeepseekV3Config
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer

        config = DeepseekV3Config(first_k_dense_replace=int(dense), num_hidden_layers=1, use_cache=False, **sizes)
        config._attn_implementation = "sdpa"
        self.layers = nn.ModuleList([DeepseekV3DecoderLayer(config, 0)])
        if not dense:
            shape = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
            self.layers[0].mlp.experts = SortedExperts(*shape)
        self.rotated = config.qk_rope_head_dim

    def forward(self, x):
        at = torch.arange(x.shape[1], device=x.device).to(x.dtype)
        frequencies = 1.0 / 100.0 ** (torch.arange(0, self.rotated, 2, device=x.device) / self.rotated)
        angles = torch.outer(at, frequencies)
        turns = tuple(torch.cat((f(angles), f(angles)), -1).to(x.dtype)[None] for f in (torch.cos, torch.sin))
        y = self.layers[0](x, attention_mask=None, position_ids=None, position_embeddings=turns)
        return y[0] if isinstance(y, tuple) else y
