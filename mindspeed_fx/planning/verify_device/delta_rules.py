"""Delta rules in chunks, as models spell them, and their tensors."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 16


def chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule as Qwen3-Next spells it; with a gate for every channel, Kimi Delta Attention.

    Args:
        q, k: [batch, heads, seq, k_dim]; v: [batch, heads, seq, v_dim]; beta: [batch, heads, seq].
        g: [batch, heads, seq] or [batch, heads, seq, k_dim].
    """
    q = q * q.shape[-1] ** -0.5
    q, k, v, g = (x.unflatten(2, (-1, CHUNK)) for x in (q, k, v, g))
    beta, c = beta.unflatten(2, (-1, CHUNK)).unsqueeze(-1), g.cumsum(3)
    above = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    if c.dim() == 5:
        decays = (c.unsqueeze(-2) - c.unsqueeze(-3)).masked_fill(above.unsqueeze(-1), -math.inf).exp()
        system = ((k * beta).unsqueeze(-2) * k.unsqueeze(-3) * decays).sum(-1)
        scores = (q.unsqueeze(-2) * k.unsqueeze(-3) * decays).sum(-1)
        grow, rest, last = c.exp(), (c[..., -1:, :] - c).exp(), c[..., -1, :].exp().unsqueeze(-1)
    else:
        decays = (c.unsqueeze(-1) - c.unsqueeze(-2)).masked_fill(above, -math.inf).exp()
        system, scores = (k * beta) @ k.transpose(-1, -2) * decays, q @ k.transpose(-1, -2) * decays
        grow, rest = c.exp().unsqueeze(-1), (c[..., -1:] - c).exp().unsqueeze(-1)
        last = c[..., -1].exp()[..., None, None]
    u = torch.linalg.solve_triangular(system, v * beta, upper=False, unitriangular=True)
    w = torch.linalg.solve_triangular(system, k * beta * grow, upper=False, unitriangular=True)
    state = torch.zeros(*k.shape[:2], k.shape[-1], v.shape[-1], dtype=v.dtype, device=v.device)
    out, q, k = torch.zeros_like(u), q * grow, k * rest
    for i in range(u.shape[2]):
        new = u[:, :, i] - w[:, :, i] @ state
        out[:, :, i] = q[:, :, i] @ state + scores[:, :, i] @ new
        state = state * last[:, :, i] + k[:, :, i].transpose(-1, -2) @ new
    return out.flatten(2, 3)


def tensors(batch: int, heads: int, seq: int, dim: int, dtype: torch.dtype, by_channel: bool) -> tuple[Tensor, ...]:
    """Leaves for :func:`chunked`."""
    q, v = torch.randn(2, batch, heads, seq, dim)
    keys, beta = F.normalize(torch.randn(batch, heads, seq, dim), dim=-1), torch.rand(batch, heads, seq)
    gates = -torch.rand(batch, heads, seq, *([dim] if by_channel else []))
    return tuple(x.to(dtype).requires_grad_() for x in (q, keys, v, gates, beta))
