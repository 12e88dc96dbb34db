"""Models as a user would write them, of parts that no library has together."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.sharding.listed_experts import Guarded, Masked

WIDTH, HEADS = 8, 2


class Attention(nn.Module):
    def __init__(self, width=WIDTH, heads=HEADS, causal=False):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x, memory=None, mask=None):
        memory = x if memory is None else memory
        q, k, v = (
            p(t).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for p, t in ((self.query, x), (self.key, memory), (self.value, memory))
        )
        if mask is not None:
            mask = mask[:, None, None, :]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal and mask is None)
        return self.out(out.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return self.outer(F.gelu(self.inner(x)))


class Block(nn.Module):
    """Norm, attention, feed-forward, and, with ``crossed``, gated attention to what another encoder made."""

    def __init__(self, causal=False, crossed=False, mixture=None):
        super().__init__()
        self.attention, self.ff = Attention(causal=causal), FeedForward() if mixture is None else mixture()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.shared = FeedForward() if mixture is not None else None
        if crossed:
            self.cross, self.gate = Attention(), nn.Parameter(torch.full((1,), 0.5))
        self.crossed = crossed

    def forward(self, x, memory=None, mask=None):
        x = x + self.attention(self.norms[0](x))
        if self.crossed:
            x = x + torch.tanh(self.gate) * self.cross(self.norms[2](x), memory, mask)
        h = self.norms[1](x)
        return x + self.ff(h) + (self.shared(h) if self.shared is not None else 0)


class TwoEncoders(nn.Module):
    """An image through a convolution and a text with padding, both encoded; a decoder of tied embeddings reads first
    the one and then the other."""

    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.places = nn.Parameter(torch.randn(16, WIDTH) / 4)
        self.words = nn.Embedding(32, WIDTH)
        self.image, self.text = (nn.ModuleList([Block()]) for _ in range(2))
        self.layers = nn.ModuleList(Block(causal=True, crossed=True) for _ in range(2))

    def forward(self, ids, labels, pixels):
        image = self.patch(pixels).flatten(2).transpose(1, 2) + self.places
        for block in self.image:
            image = block(image)
        text, keep = self.words(ids), ids != 0
        for block in self.text:
            text = block(text)
        x = self.words(ids)
        x = self.layers[0](x, image)
        x = self.layers[1](x, text, keep)
        logits = x @ self.words.weight.T
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0)


class Speech(nn.Module):
    """Convolutions over time, a recurrent layer of the sequence in both directions, attention, and two losses."""

    def __init__(self):
        super().__init__()
        self.front = nn.Sequential(nn.Conv1d(4, WIDTH, 3, padding=1), nn.GELU(), nn.Conv1d(WIDTH, WIDTH, 3, padding=1))
        self.recurrent = nn.GRU(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head, self.energy = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 1)

    def forward(self, sound, labels):
        x = self.front(sound.transpose(1, 2)).transpose(1, 2)
        x = x + self.recurrent(x)[0]
        for layer in self.layers:
            x = layer(x)
        aux = F.mse_loss(self.energy(x).squeeze(-1), sound.square().mean(-1))
        return F.cross_entropy(self.head(x).transpose(1, 2), labels) + 0.1 * aux


class Mixture(nn.Module):
    """A decoder with a list of experts and a shared one in each layer, tied embeddings, a loss of the router beside."""

    def __init__(self, mixture=Guarded):
        super().__init__()
        self.words = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(Block(causal=True, mixture=mixture) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids, labels):
        x = self.words(ids)
        balance = 0
        for layer in self.layers:
            x = layer(x)
            share = layer.ff.gate(x).softmax(-1).mean((0, 1))
            balance = balance + (share * share).sum()
        return F.cross_entropy(F.linear(self.norm(x), self.words.weight).flatten(0, 1), labels.flatten()) + 0.01 * balance


class MaskedMixture(Mixture):
    def __init__(self):
        super().__init__(Masked)


class Ranking(nn.Module):
    """Two towers over bags of items and a contrastive loss over the batch."""

    def __init__(self):
        super().__init__()
        self.items, self.users = nn.EmbeddingBag(32, WIDTH, mode="sum"), nn.Embedding(32, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, WIDTH))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, ids, labels):
        left = F.normalize(self.mlp(self.items(ids)), dim=-1)
        right = F.normalize(self.users(labels[:, 0]) + self.users(labels).mean(1), dim=-1)
        scores = self.scale.exp() * left @ right.T
        target = torch.arange(ids.shape[0], device=ids.device)
        return (F.cross_entropy(scores, target) + F.cross_entropy(scores.T, target)) / 2


MODELS = (TwoEncoders, Speech, Mixture, MaskedMixture, Ranking)


def batch_of(kind, rows=4, length=8):
    generator = torch.Generator().manual_seed(3)
    ids, labels = (torch.randint(1, 32, (rows, length), generator=generator) for _ in range(2))
    ids[0, -2:] = 0
    labels[1, :3] = 0
    if kind is TwoEncoders:
        return {"ids": ids, "labels": labels, "pixels": torch.randn(rows, 3, 16, 16, generator=generator).double()}
    if kind is Speech:
        return {"sound": torch.randn(rows, length, 4, generator=generator).double(), "labels": labels}
    return {"ids": ids, "labels": labels}


def model_of(kind):
    torch.manual_seed(0)
    return kind().double()
