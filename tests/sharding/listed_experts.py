"""Mixtures whose experts are a list of modules, in the spellings that people write."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

EXPERTS, CHOSEN, HIDDEN, WIDE = 4, 2, 8, 12


class Gated(nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(HIDDEN, WIDE, bias=bias) for _ in range(2))
        self.down_proj = nn.Linear(WIDE, HIDDEN, bias=bias)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def plain():
    return nn.Sequential(nn.Linear(HIDDEN, WIDE), nn.GELU(), nn.Linear(WIDE, HIDDEN))


class Loop(nn.Module):
    """Owns the router and the list; a spelling gives ``mix(x, weights, choices)`` for x [tokens, hidden]."""

    expert = Gated

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList(type(self).expert() for _ in range(EXPERTS))

    def forward(self, x):
        flat = x.view(-1, x.shape[-1])
        weights, choices = self.gate(flat).softmax(-1).topk(CHOSEN)
        return self.mix(flat, weights, choices).view(x.shape)


class Where(Loop):
    """Mixtral's first code."""

    def mix(self, x, weights, choices):
        out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        chosen = F.one_hot(choices, num_classes=EXPERTS).permute(2, 1, 0)
        for e in range(EXPERTS):
            expert = self.experts[e]
            idx, top_x = torch.where(chosen[e])
            current = x[None, top_x].reshape(-1, HIDDEN)
            out.index_add_(0, top_x, (expert(current) * weights[top_x, idx, None]).to(x.dtype))
        return out


class Guarded(Loop):
    """DeepSeek-V3's: experts that nobody chose are left out."""

    def mix(self, x, weights, choices):
        out = torch.zeros_like(x, dtype=weights.dtype)
        mask = F.one_hot(choices, num_classes=len(self.experts)).permute(2, 0, 1)
        for number in range(len(self.experts)):
            expert = self.experts[number]
            tokens, places = torch.where(mask[number])
            if tokens.numel() > 0:
                out.index_add_(0, tokens, expert(x[tokens]) * weights[tokens, places].unsqueeze(-1))
        return out.type(x.dtype)


class Written(Loop):
    """DeepSeek-V2's while it trains: one row for each choice."""

    def mix(self, x, weights, choices):
        flat = choices.view(-1)
        rows = x.repeat_interleave(CHOSEN, dim=0)
        y = torch.empty_like(rows)
        for i, expert in enumerate(self.experts):
            y[flat == i] = expert(rows[flat == i])
        return (y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)


class Masked(Loop):
    """A mask of tokens, and experts with biases."""

    expert = staticmethod(plain)

    def mix(self, x, weights, choices):
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mask = (choices == i).any(dim=-1)
            if not mask.any():
                continue
            share = (weights * (choices == i)).sum(-1)[mask]
            out[mask] += expert(x[mask]) * share.unsqueeze(-1)
        return out


class Mistral(Loop):
    """mistral-inference's."""

    def mix(self, x, weights, choices):
        results = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            batch, nth = torch.where(choices == i)
            results[batch] += weights[batch, nth, None] * expert(x[batch])
        return results


class Columns(Loop):
    """Weights of all experts, a column of each; experts with biases."""

    expert = staticmethod(plain)

    def forward(self, x):
        flat = x.view(-1, x.shape[-1])
        scores = self.gate(flat).softmax(-1)
        choices = scores.topk(CHOSEN)[1]
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            tokens = (choices == i).any(-1).nonzero().squeeze(-1)
            if len(tokens) == 0:
                continue
            out = out.index_add(0, tokens, expert(flat[tokens]) * scores[:, i][tokens].unsqueeze(-1))
        return out.view(x.shape)


SPELLINGS = (Where, Guarded, Written, Masked, Mistral, Columns)


class Model(nn.Module):
    """Two layers with a shared expert beside the list, between an embedding and a loss."""

    def __init__(self, spelling, layers=1, favourite=0.0):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, HIDDEN), nn.Linear(HIDDEN, 32, bias=False)
        self.layers = nn.ModuleList(Layer(spelling) for _ in range(layers))
        with torch.no_grad():  # one expert has most of the tokens, and one may have none
            for layer in self.layers:
                layer.mlp.gate.weight[1] += favourite

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Layer(nn.Module):
    def __init__(self, spelling):
        super().__init__()
        self.norm, self.mlp, self.shared = nn.LayerNorm(HIDDEN), spelling(), Gated()

    def forward(self, x):
        h = self.norm(x)
        return x + self.mlp(h) + self.shared(h)


class Normed(Loop):
    """Experts that begin with a norm, which no product of all experts computes."""

    @staticmethod
    def expert():
        return nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN))

    mix = Guarded.mix


class Counted(Loop):
    """Computes with the number of an expert's tokens."""

    def mix(self, x, weights, choices):
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            tokens, places = torch.where(choices == i)
            if tokens.numel() == 0:
                continue
            share = weights[tokens, places, None] / tokens.numel()
            out.index_add_(0, tokens, expert(x[tokens]) * share)
        return out


UNREAD = (Normed, Counted)


class Twice(Masked):
    """Choices of a token that may be one expert."""

    def forward(self, x):
        flat = x.view(-1, x.shape[-1])
        scores = self.gate(flat)
        best = scores.argmax(-1, keepdim=True), scores.view(-1, 2, 2).sum(1).argmax(-1, keepdim=True)
        choices = torch.cat(best, -1)
        return self.mix(flat, torch.ones_like(scores[:, :2]), choices).view(x.shape)


class Overwritten(Masked):
    """Of a token's experts the last one's result stays."""

    def mix(self, x, weights, choices):
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mask = (choices == i).any(dim=-1)
            out[mask] = expert(x[mask])
        return out


class TwiceAdded(Mistral):
    """Choices of a token that may be one expert, whose rows are read, added to and written, and so added once."""

    forward = Twice.forward


class Frozen(Masked):
    """Shares without a gradient."""

    def mix(self, x, weights, choices):
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            batch, nth = torch.where(choices == i)
            with torch.no_grad():
                share = weights[batch, nth, None]
            out.index_add_(0, batch, expert(x[batch]) * share)
        return out


class Different(Guarded):
    """Experts that do not compute alike."""

    def __init__(self):
        super().__init__()
        self.experts[2].forward = lambda x, own=self.experts[2]: own.down_proj(
            F.gelu(own.gate_proj(x)) * own.up_proj(x)
        )
