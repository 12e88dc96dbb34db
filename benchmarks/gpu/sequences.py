"""Attention and recurrences over a sequence, as transformers' models spell them."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch._higher_order_ops.associative_scan import associative_scan

from .problem import Problem, new, size


def attention_by_hand(device: str, tokens: int, heads: int = 16, width: int = 128) -> Problem:
    """Causal attention of two sequences: products, mask and softmax one by one."""

    def define(q, k, v):
        scores = (q @ k.transpose(-1, -2)) * width**-0.5
        n = q.shape[-2]
        mask = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~mask, float("-inf"))
        wide = scores if scores.dtype == torch.float64 else scores.float()
        return torch.softmax(wide, -1).to(q.dtype) @ v

    leaves = [new(2, heads, tokens, width, device=device) for _ in range(3)]
    sdpa = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True)
    flop = 2 * 2 * heads * tokens * tokens * width  # two products, half of each
    return Problem(
        define,
        leaves,
        flop=(flop, flop * 5 // 2),
        rivals={"torch": lambda q, k, v: sdpa(q, k, v)},
        exact=torch.float32,
    )


def gated_delta_rule(device: str, tokens: int, k_heads: int = 16, heads: int = 32, width: int = 128) -> Problem:
    """Qwen3-Next's; Inductor takes minutes for the chunks that the model unrolls."""

    def define(q, k, v, g, beta):
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

        return torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]

    q, k = (new(1, tokens, heads, width, device=device) for _ in range(2))
    v = new(1, tokens, heads, width, device=device)
    g = -torch.rand(1, tokens, heads, device=device)
    beta = torch.rand(1, tokens, heads, device=device).to(torch.bfloat16)
    return Problem(
        define,
        [q, k, v, g, beta],
        moved=(size(q, k, v, v), 2 * size(q, k, v) + size(v)),
        without=("inductor",),
        exact=torch.float32,
    )


def kimi_delta_attention(device: str, tokens: int, heads: int = 16, width: int = 128) -> Problem:
    """Kimi Linear's, whose decays of all pairs and channels take half a GiB for 1,024 tokens, several times."""

    def define(q, k, v, g, beta):
        from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention

        return chunk_kimi_delta_attention(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]

    q, k, v = (new(1, tokens, heads, width, device=device) for _ in range(3))
    g = -torch.rand(1, tokens, heads, width, device=device)
    beta = torch.rand(1, tokens, heads, device=device).to(torch.bfloat16)
    return Problem(
        define,
        [q, k, v, g, beta],
        moved=(size(q, k, v, v, g), 2 * size(q, k, v, g) + size(v)),
        without=("inductor",),
        exact=torch.float32,
    )


def ssd(device: str, tokens: int, heads: int = 64, width: int = 64, state: int = 128) -> Problem:
    """Mamba-2's state space dual."""

    def define(x, dt, a, b, c, d):
        from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

        return mamba2_chunk_scan(x, dt, a, b, c, chunk_size=256, D=d)

    x, dt = new(2, tokens, heads, width, device=device), torch.rand(2, tokens, heads, device=device)
    b, c = (new(2, tokens, 1, state, device=device) for _ in range(2))
    count = torch.arange(1, heads + 1, device=device).float()
    leaves = [x, dt, -count, b, c, torch.ones_like(count)]
    return Problem(
        define,
        leaves,
        moved=(2 * size(x) + size(dt, b, c), 3 * size(x) + 2 * size(dt, b, c)),
        exact=torch.float32,
    )


def selective_scan(device: str, tokens: int, channels: int = 4096, state: int = 16) -> Problem:
    """Mamba's scan, by torch's associative scan where it is compiled: written out here, for transformers' takes every
    compilation by Dynamo of torch 2.11 for an export and goes step by step. Inductor compiles that scan for longer than
    a run lasts, in calls that nothing interrupts."""

    def define(u, dt, a, b, c, d, z, bias):
        step = F.softplus(dt + bias.to(dt.dtype)[..., None])
        decay = torch.exp(a[None, :, None] * step[..., None])
        taken = step[..., None] * b.transpose(1, 2)[:, None].float() * u[..., None].float()
        if torch.compiler.is_compiling():
            mode = "pointwise" if u.device.type == "cuda" else "generic"
            states = associative_scan(_two_steps, (decay, taken), dim=2, combine_mode=mode)[1]
        else:
            last, each = torch.zeros_like(taken[:, :, 0]), []
            for i in range(taken.shape[2]):
                last = decay[:, :, i] * last + taken[:, :, i]
                each.append(last)
            states = torch.stack(each, 2)
        out = (states.transpose(1, 2).to(u.dtype) @ c.transpose(1, 2).unsqueeze(-1)).squeeze(-1).transpose(1, 2)
        return (out + u * d[None, :, None]) * F.silu(z)

    u, dt, z = (new(1, channels, tokens, device=device) for _ in range(3))
    b, c = (new(1, state, tokens, device=device) for _ in range(2))
    a = -torch.arange(1, state + 1, device=device).float().repeat(channels, 1)
    ones = torch.ones(channels, device=device)
    return Problem(
        define,
        [u, dt, a, b, c, ones, z, ones.clone()],
        moved=(4 * size(u), 7 * size(u)),
        without=("eager", "inductor"),
        exact=torch.float32,
    )


def _two_steps(left, right):
    return left[0] * right[0], right[0] * left[1] + right[1]


PROBLEMS = {
    f"{make.__name__} {tokens}": partial(make, tokens=tokens)
    for make, lengths in {
        attention_by_hand: (2048, 4096),
        gated_delta_rule: (2048,),
        kimi_delta_attention: (1024,),
        ssd: (4096,),
        selective_scan: (2048,),
    }.items()
    for tokens in lengths
}
