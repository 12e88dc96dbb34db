"""Some heads of a gated delta rule in chunks of tokens, on any device as products of ATen: forward and gradients.

Letters and formulas as at the top of gated_delta_rule.py.
"""

from __future__ import annotations

from typing import Any, Callable, Iterator, NamedTuple, Sequence

import torch
from torch import Tensor

SPAN = 4
"""Chunks that are computed together; the states between spans are kept for the backward: half the size of v where heads
are 128 wide."""

TOKENS = 2**11
"""Tokens times heads that are computed together: enough for batched products, few enough for their results to stay in
cache and to be small beside the arguments (benchmarks/gated_delta_rule.py)."""


class Heads(NamedTuple):
    """Some heads of one row of the batch: heads of keys, and the heads that they serve."""

    row: int
    keys: slice
    values: slice


class Span(NamedTuple):
    """Some chunks of some heads."""

    heads: Heads
    number: int
    tokens: slice
    chunk: int

    @property
    def chunks(self) -> int:
        return -(-(self.tokens.stop - self.tokens.start) // self.chunk)

    def take(self, x: Tensor, heads: slice, wide: torch.dtype) -> Tensor:
        """x [batch, heads, seq(, width)] here, as [chunks, n, chunk, width or 1]; zeros after the last token leave
        the state alone."""
        x = x[self.heads.row, heads, self.tokens].to(wide)
        x = x.unsqueeze(-1) if x.dim() == 2 else x
        missing = self.chunks * self.chunk - x.shape[1]
        x = torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x
        return x.unflatten(1, (self.chunks, self.chunk)).transpose(0, 1).contiguous()

    def put(self, into: Tensor, heads: slice, x: Tensor) -> None:
        """Write x [chunks, n, chunk, width or 1] here into ``into`` [batch, heads, seq(, width)]."""
        x = x.transpose(0, 1).flatten(1, 2)[:, : self.tokens.stop - self.tokens.start]
        into[self.heads.row, heads, self.tokens] = x if into.dim() == 4 else x.squeeze(-1)


def head_blocks(q: Tensor, v: Tensor, chunk: int) -> Iterator[Heads]:
    """Every head once, so many together that a span of them has about :data:`TOKENS` tokens."""
    shared = v.shape[1] // q.shape[1]
    step = max(1, TOKENS // max(1, min(q.shape[2], SPAN * chunk) * shared))
    for row in range(q.shape[0]):
        for low in range(0, q.shape[1], step):
            high = min(low + step, q.shape[1])
            yield Heads(row, slice(low, high), slice(low * shared, high * shared))


def spans(heads: Heads, seq: int, chunk: int) -> list[Span]:
    """The sequence in spans of :data:`SPAN` chunks."""
    length = SPAN * chunk
    lows = range(0, seq, length)
    return [Span(heads, i, slice(low, min(low + length, seq)), chunk) for i, low in enumerate(lows)]


def run_forward(
    block_of: Callable[[Span, Tensor], Any], q: Tensor, v: Tensor, state: Tensor | None, results: tuple, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Fills and returns ``results``, the result, the last state and the states before spans, from what ``block_of``
    tells of a span by its first state: ``u``, which becomes N, ``w``, ``q_decayed``, ``scores()`` and ``next_state()``.
    """
    out, final, starts = results
    for heads in head_blocks(q, v, chunk):
        start = final[heads.row, heads.values]
        start = torch.zeros_like(start) if state is None else state[heads.row, heads.values].to(final.dtype)
        for span in spans(heads, q.shape[2], chunk):
            starts[heads.row, heads.values, span.number] = start
            block = block_of(span, start)
            result = torch.empty_like(block.u)
            for i in range(span.chunks):
                torch.bmm(block.q_decayed[i], start, out=result[i])
                block.u[i].baddbmm_(block.w[i], start, alpha=-1)
                start = block.next_state(start, i)
            result += block.scores() @ block.u
            span.put(out, heads.values, result)
        final[heads.row, heads.values] = start
    return results


def run_backward(
    block_of: Callable[[Span, Tensor], Any],
    gradients_of: Callable[[Any, Tensor, Tensor], tuple[tuple, Tensor]],
    grads: tuple[Tensor, Tensor | None],
    starts: Tensor,
    q: Tensor,
    v: Tensor,
    results: Sequence[Tensor],
    chunk: int,
) -> Sequence[Tensor]:
    """Fills and returns ``results``, gradients of q, k, v, g, beta and the first state, from ``grads``, those of the
    result and of the last state, and the states before spans; ``gradients_of`` a block has those of its first five, or
    None, and that of its first state."""
    (grad, grad_state), (*into, dstate) = grads, results
    for heads in head_blocks(q, v, chunk):
        dstart = (
            torch.zeros_like(starts[heads.row, heads.values, 0])
            if grad_state is None
            else grad_state[heads.row, heads.values].to(starts.dtype)
        )
        of = (heads.keys, heads.keys, *[heads.values] * 3)
        for span in reversed(spans(heads, q.shape[2], chunk)):
            block = block_of(span, starts[heads.row, heads.values, span.number])
            gradients, dstart = gradients_of(block, span.take(grad, heads.values, starts.dtype), dstart)
            for whole, own, x in zip(into, of, gradients, strict=True):
                if x is not None:
                    span.put(whole, own, x)
        dstate[heads.row, heads.values] = dstart.to(dstate.dtype)
    return results


class Block:
    """What is known of the chunks of a span before its first state is.

    n heads, c chunks of t tokens; what belongs to keys has n / shared heads.
    """

    def __init__(self, span, q, k, v, g, beta, start, scale, norm_eps, wide):
        self.scale, self.shared, self.chunks = scale, v.shape[1] // q.shape[1], span.chunks
        self.q, self.q_root = normalize(span.take(q, span.heads.keys, wide), norm_eps)
        self.k, self.k_root = normalize(span.take(k, span.heads.keys, wide), norm_eps)
        self.v, self.beta = span.take(v, span.heads.values, wide), span.take(beta, span.heads.values, wide)
        self.start = start
        self.grow = self.last = self.rest = None  # e^c, e^(c_C), e^(c_C - c), each [c, n, t or 1, 1]
        if g is None:
            self.decay = torch.ones((span.chunk, span.chunk), dtype=wide, device=q.device).tril()
        else:
            decay = span.take(g, span.heads.values, wide).cumsum(2)
            above = torch.full((span.chunk, span.chunk), float("-inf"), dtype=wide, device=q.device).triu_(1)
            self.decay = (decay - decay.transpose(2, 3)).add_(above).exp_()
            self.grow, self.rest = decay.exp(), (decay[:, :, -1:] - decay).exp_()
            self.last = self.grow[:, :, -1:]
        self.products = self.k @ self.k.transpose(2, 3)
        self.system = self.times_keys(self.beta * self.decay, self.products).tril_(-1)
        eye = torch.eye(span.chunk, dtype=wide, device=q.device).expand_as(self.system)
        # LAPACK stores by columns: of the transpose it neither copies what it is given nor turns what it returns.
        transposed = self.system.transpose(2, 3)
        self.inverse = torch.linalg.solve_triangular(transposed, eye, upper=True, unitriangular=True).transpose(2, 3)
        solved = self.inverse * self.beta.transpose(2, 3)
        self.u = solved @ self.v
        self.w = self.rows_by_keys(solved if self.grow is None else solved.mul_(self.grow.transpose(2, 3)))
        self.k_decayed = self.times_keys(self.rest, self.k)
        self.q_decayed = self.times_keys(scale if self.grow is None else self.grow * scale, self.q)

    def times_keys(self, x: Tensor | float | None, keys: Tensor) -> Tensor:
        """x [c, n, t, ...] * keys [c, n / shared, t, ...]; None is one."""
        if not isinstance(x, Tensor):
            keys = keys.repeat_interleave(self.shared, 1)
            return keys if x is None else keys * x
        return (x.unflatten(1, (keys.shape[1], self.shared)) * keys.unsqueeze(2)).flatten(1, 2)

    def rows_by_keys(self, x: Tensor) -> Tensor:
        """x [c, n, t, t] @ k, for the heads that share a key in one product."""
        c, n, t, _ = x.shape
        return (x.view(c, n // self.shared, self.shared * t, t) @ self.k).view(c, n, t, -1)

    def over_shared(self, x: Tensor) -> Tensor:
        """Sum over the heads that share a key."""
        return x if self.shared == 1 else x.unflatten(1, (-1, self.shared)).sum(2)

    def scores(self) -> Tensor:
        """P [c, n, t, t]"""
        decay = self.decay.expand_as(self.system)
        return self.times_keys(decay, self.q @ self.k.transpose(2, 3)).mul_(self.scale)

    def next_state(self, start: Tensor, i: int, out: Tensor | None = None) -> Tensor:
        """The state after chunk i, whose N stands in ``u``, written to ``out`` if that is given."""
        out = torch.empty_like(start) if out is None else out
        out = out.copy_(start) if self.last is None else torch.mul(start, self.last[i], out=out)
        return out.baddbmm_(self.k_decayed[i].transpose(1, 2), self.u[i])


def normalize(x: Tensor, eps: float | None) -> tuple[Tensor, Tensor | None]:
    """(x / sqrt(sum(x^2) + eps), 1 / sqrt(sum(x^2) + eps)); (x, None) without eps."""
    if eps is None:
        return x, None
    root = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().add_(eps).rsqrt_()
    return x * root, root


def normalize_backward(grad: Tensor, x: Tensor, root: Tensor | None) -> Tensor:
    """Gradient before :func:`normalize`, from its results."""
    return grad if root is None else (grad - x * (grad * x).sum(-1, keepdim=True)) * root


def block_gradients(block, dout, dlast):
    """Gradients of q, k, v, g and beta in chunks, and of the first state."""
    states = block.u.new_empty((block.chunks, *block.start.shape))
    states[0] = block.start
    for i in range(block.chunks):
        block.u[i].baddbmm_(block.w[i], states[i], alpha=-1)
        if i + 1 < block.chunks:
            block.next_state(states[i], i, out=states[i + 1])
    new_v, scores = block.u, block.scores()
    # From here on a chunk's N has the gradient ``dnew_v``; that of its k e^(c_C - c) needs the state's gradient too.
    dnew_v, dk_decayed = scores.transpose(2, 3) @ dout, torch.empty_like(block.k_decayed)
    drest = dlast.new_zeros((*new_v.shape[:2], 1, 1))
    read = block.q_decayed.transpose(2, 3) @ dout
    for i in reversed(range(block.chunks)):
        dnew_v[i].baddbmm_(block.k_decayed[i], dlast)
        torch.bmm(new_v[i], dlast.transpose(1, 2), out=dk_decayed[i])
        if block.last is not None:
            torch.bmm(dlast.flatten(1).unsqueeze(1), states[i].flatten(1).unsqueeze(2), out=drest[i])
            dlast = dlast * block.last[i]
        dlast = read[i].baddbmm_(block.w[i].transpose(1, 2), dnew_v[i], alpha=-1).add_(dlast)
    dscores, dq_decayed = dout @ new_v.transpose(2, 3), dout @ states.transpose(2, 3)
    dw = (dnew_v @ states.transpose(2, 3)).neg_()
    del states, read
    return _chunk_gradients(block, scores, dscores, dnew_v, dw, dq_decayed, dk_decayed, drest), dlast


def _chunk_gradients(block, scores, dscores, dnew_v, dw, dq_decayed, dk_decayed, drest):
    """Gradients of q, k, v, g and beta from those of P, N, W, scale q e^c, k e^(c_C - c) and of e^(c_C) through the
    state. With X the right-hand sides of the system: dX = T^T d(U, W), and dA = -dX (U, W)^T = -(T^T dN) N^T, since
    U = N + W S and dW = -dN S^T."""
    back = block.inverse.transpose(2, 3)
    dv, dk_beta = back @ dnew_v, back @ dw
    dsystem = (dv @ block.u.transpose(2, 3)).neg_().tril_(-1)
    dbeta = (dv * block.v).sum(-1, keepdim=True)
    dv *= block.beta
    by_key = block.times_keys(dk_beta, block.k).sum(-1, keepdim=True)
    dbeta += by_key if block.grow is None else by_key * block.grow
    dsystem_decayed = dsystem * block.decay
    pairs = block.times_keys(dsystem_decayed, block.products)
    dbeta += pairs.sum(-1, keepdim=True)
    dproducts = block.over_shared(dsystem_decayed.mul_(block.beta))
    dqk = block.over_shared(dscores * block.decay).mul_(block.scale)
    dg = None
    if block.grow is not None:
        pairs.mul_(block.beta).add_(dscores.mul_(scores))
        rest = (dk_decayed * block.k_decayed).sum(-1, keepdim=True)
        dc = pairs.sum(-1, keepdim=True) - pairs.sum(-2).unsqueeze(-1) - rest
        dc += (by_key * block.beta).mul_(block.grow) + (dq_decayed * block.q_decayed).sum(-1, keepdim=True)
        dc[:, :, -1:] += rest.sum(2, keepdim=True) + drest * block.last
        dg = dc.flip(2).cumsum(2).flip(2)
        dk_beta.mul_(block.beta * block.grow).addcmul_(dk_decayed, block.rest)
        dq_decayed *= block.grow * block.scale
    else:
        dk_beta.mul_(block.beta).add_(dk_decayed)
        dq_decayed *= block.scale
    dk = block.over_shared(dk_beta)
    dk += (dproducts + dproducts.transpose(2, 3)) @ block.k
    dk += dqk.transpose(2, 3) @ block.q
    dq = block.over_shared(dq_decayed) + dqk @ block.k
    dq = normalize_backward(dq, block.q, block.q_root)
    dk = normalize_backward(dk, block.k, block.k_root)
    return dq, dk, dv, dg, dbeta
