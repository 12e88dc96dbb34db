"""Some heads of Kimi Delta Attention in chunks of tokens, on any device as products of ATen: forward and gradients.

Letters and formulas as at the top of kimi_delta_attention.py. A product of pairs <x, k>_ij has a decay of its own for
every channel, e^(c_i - c_j), which is none of i times one of j: e^(-c_j) overflows. Between two halves that follow each
other it is, with the c of the earlier half's end in between: e^(c_i - c_end) e^(c_end - c_j), neither above one. So the
pairs of a chunk are products of matrices between the halves of the chunk, of its halves, and so on down to two tokens.
"""

from __future__ import annotations

from typing import Iterator, Sequence

import torch
from torch import Tensor

from mindspeed_fx.kernels.gated_delta_rule_chunks import normalize, normalize_backward

CHUNK = 64
"""Tokens of a chunk, a power of two: transformers' and flash-linear-attention's."""


class Block:
    """What is known of the chunks of a span before its first state is: n heads, c chunks of t tokens."""

    def __init__(self, span, q, k, v, g, beta, start, scale, norm_eps, wide):
        heads = span.heads.values
        self.scale, self.start, self.chunks = scale, start, span.chunks
        self.q, self.q_root = normalize(span.take(q, heads, wide), norm_eps)
        self.k, self.k_root = normalize(span.take(k, heads, wide), norm_eps)
        self.v, self.beta = span.take(v, heads, wide), span.take(beta, heads, wide)
        self.c = span.take(g, heads, wide).cumsum(2)
        self.grow, self.rest = self.c.exp(), (self.c[:, :, -1:] - self.c).exp_()
        self.last = self.grow[:, :, -1].unsqueeze(-1)
        """e^(c_C) [c, n, k_dim, 1]"""
        self.products, self.pairs = pair_products((self.k, self.q), self.k, self.c)
        self.pairs.diagonal(dim1=-2, dim2=-1).copy_((self.q * self.k).sum(-1))
        self.pairs *= scale
        eye = torch.eye(span.chunk, dtype=wide, device=q.device).expand_as(self.products)
        # LAPACK stores by columns: of the transpose it neither copies what it is given nor turns what it returns.
        transposed = (self.beta * self.products).transpose(2, 3)
        self.inverse = torch.linalg.solve_triangular(transposed, eye, upper=True, unitriangular=True).transpose(2, 3)
        solved = self.inverse * self.beta.transpose(2, 3)
        self.u, self.w = solved @ self.v, solved @ (self.k * self.grow)
        self.k_decayed, self.q_decayed = self.k * self.rest, self.q * self.grow * scale

    def scores(self) -> Tensor:
        """P [c, n, t, t]"""
        return self.pairs

    def next_state(self, start: Tensor, i: int, out: Tensor | None = None) -> Tensor:
        """The state after chunk i, whose N stands in ``u``, written to ``out`` if that is given."""
        out = torch.mul(start, self.last[i], out=out)
        return out.baddbmm_(self.k_decayed[i].transpose(1, 2), self.u[i])


def pair_products(rows: Sequence[Tensor], k: Tensor, c: Tensor) -> list[Tensor]:
    """<x, k> [..., t, t] below the diagonal, zeros elsewhere, for every x [..., t, k_dim] of ``rows``."""
    results = [k.new_zeros((*k.shape[:-1], k.shape[-2])) for _ in rows]
    for size, rise, fall in _levels(c):
        early = (_halves(k, size)[0] * fall).transpose(-1, -2)
        for x, result in zip(rows, results):
            _between(result, size).copy_((_halves(x, size)[1] * rise) @ early)
    return results


def pair_gradients(
    grads: Sequence[Tensor], rows: Sequence[Tensor], k: Tensor, c: Tensor
) -> tuple[list[Tensor], Tensor]:
    """Gradients of each of ``rows`` and of k as the later and the earlier of :func:`pair_products`, whose results have
    the gradients ``grads``, of which what lies below the diagonal is read. That of c is the sum over x of x times x's,
    less k times k's."""
    drows, dk = [torch.zeros_like(x) for x in rows], torch.zeros_like(k)
    for size, rise, fall in _levels(c):
        early, dearly = _halves(k, size)[0] * fall, _halves(dk, size)[0]
        for x, dx, grad in zip(rows, drows, grads):
            between = _between(grad, size).contiguous()
            _halves(dx, size)[1].addcmul_(between @ early, rise)
            dearly.addcmul_(between.transpose(-1, -2) @ (_halves(x, size)[1] * rise), fall)
    return drows, dk


def _levels(c: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(tokens of a half, e^(c - c_end) of later halves, e^(c_end - c) of earlier ones) from single tokens on."""
    size = 1
    while size < c.shape[-2]:
        early, late = _halves(c, size)
        end = early[..., -1:, :]
        yield size, (late - end).exp_(), (end - early).exp_()
        size *= 2


def _halves(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Views of x [..., t, width]: the earlier and the later ``size`` of every two times as many tokens."""
    pairs = x.unflatten(-2, (-1, 2, size))
    return pairs[..., 0, :, :], pairs[..., 1, :, :]


def _between(x: Tensor, size: int) -> Tensor:
    """A view of x [..., t, t]: the later halves' rows by the earlier ones' columns, [..., t / 2 size, size, size]."""
    squares = x.unflatten(-1, (-1, 2, size))[..., 0, :].unflatten(-3, (-1, 2, size))[..., 1, :, :, :]
    return squares.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def block_gradients(block: Block, dout: Tensor, dlast: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Gradients of q, k, v, g and beta in chunks, and of the first state."""
    states = block.u.new_empty((block.chunks, *block.start.shape))
    states[0] = block.start
    for i in range(block.chunks):
        block.u[i].baddbmm_(block.w[i], states[i], alpha=-1)
        if i + 1 < block.chunks:
            block.next_state(states[i], i, out=states[i + 1])
    new_v = block.u
    # From here on a chunk's N has the gradient ``dnew_v``; that of its k e^(c_C - c) needs the state's gradient too.
    dnew_v, dk_decayed = block.scores().transpose(2, 3) @ dout, torch.empty_like(block.k_decayed)
    dkept = torch.empty_like(block.last)  # of e^(c_C), through the state
    read = block.q_decayed.transpose(2, 3) @ dout
    for i in reversed(range(block.chunks)):
        dnew_v[i].baddbmm_(block.k_decayed[i], dlast)
        torch.bmm(new_v[i], dlast.transpose(1, 2), out=dk_decayed[i])
        torch.sum(dlast * states[i], -1, keepdim=True, out=dkept[i])
        dlast = read[i].baddbmm_(block.w[i].transpose(1, 2), dnew_v[i], alpha=-1).addcmul_(dlast, block.last[i])
    dscores, dq_decayed = dout @ new_v.transpose(2, 3), dout @ states.transpose(2, 3)
    dw = (dnew_v @ states.transpose(2, 3)).neg_()
    del states, read
    return _chunk_gradients(block, dscores, dnew_v, dw, dq_decayed, dk_decayed, dkept), dlast


def _chunk_gradients(block, dscores, dnew_v, dw, dq_decayed, dk_decayed, dkept):
    """Gradients of q, k, v, g and beta from those of P, N, W, scale q e^c, k e^(c_C - c) and of e^(c_C) through the
    state; as those of the gated delta rule, with decays that belong to channels."""
    back = block.inverse.transpose(2, 3)
    dv, dk_beta = back @ dnew_v, back @ dw
    dsystem = (dv @ block.u.transpose(2, 3)).neg_()
    dbeta = (dv * block.v).sum(-1, keepdim=True) + (dsystem * block.products).sum(-1, keepdim=True)
    dv *= block.beta
    dk_beta *= block.grow
    dbeta += (dk_beta * block.k).sum(-1, keepdim=True)
    dsystem *= block.beta
    dscores *= block.scale
    (dk, dq), dearly = pair_gradients((dsystem, dscores), (block.k, block.q), block.k, block.c)
    dk += dk_beta.mul_(block.beta)
    dq += dq_decayed.mul_(block.grow).mul_(block.scale)
    dearly += dk_decayed.mul_(block.rest)
    dc = block.k * (dk - dearly) + block.q * dq
    dc[:, :, -1:] += (dk_decayed * block.k).sum(2, keepdim=True) + (dkept * block.last).transpose(2, 3)
    dg = dc.flip(2).cumsum(2).flip(2)
    own = dscores.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    dk += dearly.addcmul_(own, block.q)
    dq += own * block.k
    dq = normalize_backward(dq, block.q, block.q_root)
    dk = normalize_backward(dk, block.k, block.k_root)
    return dq, dk, dv, dg, dbeta
