"""Causal self-attention on CPU as a few large matrix products per block of rows.

ATen's flash backward multiplies tiles of 64 rows one at a time; between about 320 and 1023 rows per sequence those are
too small for the BLAS underneath. Here one batched product serves a block of rows of every head; the keys above the
diagonal and those before a sliding window are left out; work buffers are reused, so the extra memory is a few blocks of
scores. It also does what flash on CPU cannot: windows without a mask, and soft-caps.
Source: Dao 2023, "FlashAttention-2", algorithms 1 and 2; measured by benchmarks/attention_cpu.py.
"""

from __future__ import annotations

import math
from typing import Iterator

import torch
from torch import Tensor

from mindspeed_fx.cost import operators as cost
from mindspeed_fx.kernels import attention
from mindspeed_fx.kernels.base import accumulation_dtype, operator

ROWS = 64
"""Rows of queries per block: small enough that the scores above the diagonal that are computed in vain stay few."""

SCORES = 2**20
"""Elements of one work buffer to aim at: two of them stay in a last-level cache."""

SEQUENCE = range(320, 1024)
"""Where flash's backward is slower; below and above it is not."""

aten = torch.ops.aten


def supports_blocks(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool) -> str | None:
    """Why the blocks cannot run on these, real or fake; None when they can."""
    if mask is not None or not causal:
        return "more than a causal mask, a window and a soft-cap"
    if any(isinstance(x.shape[2], torch.SymInt) for x in (q, k)) or q.shape[2] != k.shape[2]:
        return "sequence lengths of queries and keys are not fixed and equal"
    return None


def _fake(q, k, v, scale, window=0, softcap=0.0, keep=None, p=0.0):
    return attention.fake(q, k, v, None, True, scale)


OPTIONS = "int window=0, float softcap=0.0, Tensor? keep=None, float p=0.0"


@operator(
    f"attention_blocked(Tensor q, Tensor k, Tensor v, float scale, {OPTIONS}) -> (Tensor, Tensor)", _fake, opaque=True
)
def attention_blocked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    keep: Tensor | None = None,
    p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Causal attention and its log-sum-exp; arguments and results as those of ``mindspeed::attention``.

    Args:
        q: [batch, heads, seq, dim], float.
        k: [batch, kv_heads, seq, dim]; kv_heads divides heads.
        v: [batch, kv_heads, seq, v_dim].
        scale: factor on q k^T.
        window: query i sees the last ``window`` keys up to its own; 0 for all.
        softcap: bound on the scores; 0 for none.
        keep: bool or uint8 [batch, heads, seq, seq], False or 0 where a weight is dropped, or None.
        p: probability with which weights were dropped: those that are kept are divided by 1 - p.

    Returns:
        out [batch, heads, seq, v_dim] stored as [batch, seq, heads, v_dim]; lse [batch, heads, seq].
    """
    out, lse = _fake(q, k, v, scale, window, softcap)
    for b in _batches(q):
        part = _Blocks(q[b], k[b], v[b], scale, window, softcap, None if keep is None else keep[b])
        outs, lses = (x[b].unflatten(1, part.split) for x in (out, lse))
        for rows, low, high in part.blocks():
            scores, _ = part.scores(rows, low, high)
            weights = aten._softmax.out(scores, -1, False, out=part.buffer("p", part.n, scores.shape[1], high - low))
            # The largest weight is 1 / sum(exp(scores - max)), so no second pass over the exponentials is needed.
            lses[:, :, :, rows] = (scores.amax(-1) - weights.amax(-1).log_()).view(*part.lead, rows.stop - rows.start)
            part.drop(weights, rows, low, high)
            product = torch.bmm(
                weights, part.values[:, low:high], out=part.buffer("v", part.n, weights.shape[1], v.shape[-1])
            )
            product = product.div_(1 - p) if p else product
            outs[:, :, :, rows] = product.view(*part.lead, rows.stop - rows.start, v.shape[-1])
    return out, lse


def _fake_backward(grad, q, k, v, out, lse, scale, window=0, softcap=0.0, keep=None, p=0.0):
    return attention.fake_backward(grad, q, k, v, out, lse, None, True, scale)


@operator(
    "attention_blocked_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, float scale, "
    f"{OPTIONS}) -> (Tensor, Tensor, Tensor)",
    _fake_backward,
    opaque=True,
)
def attention_blocked_backward(grad, q, k, v, out, lse, scale, window=0, softcap=0.0, keep=None, p=0.0):
    """Gradients (dq, dk, dv) of :func:`attention_blocked`, each shaped as its input, stored as [batch, seq, heads,
    dim].

    ``out`` and ``lse`` may be of more keys than are given here, as in a step of ring attention: rowsum(dO * O) is made
    of ``out``.
    """
    grads = _fake_backward(grad, q, k, v, out, lse, scale, window, softcap)
    for b in _batches(q):
        _backward(
            *(x[b] for x in (grad, q, k, v, out, lse, *grads)),
            scale,
            window,
            softcap,
            None if keep is None else keep[b],
            p,
        )
    return grads


@attention_blocked.shard
def _sharding_rule(q, k, v, scale, window=0, softcap=0.0, keep=None, p=0.0):
    return [
        ([out, lse], [dq, dk, dv, m])
        for out, lse, dq, dk, dv, m, *_ in attention.attention_strategies(q, k, keep, True)
    ]


@attention_blocked_backward.shard
def _sharding_rule_backward(grad, q, k, v, out, lse, scale, window=0, softcap=0.0, keep=None, p=0.0):
    return [
        (grads, [o, dq, dk, dv, o, s, m])
        for o, s, dq, dk, dv, m, _, grads in attention.attention_strategies(q, k, keep, True)
    ]


@attention_blocked.costs
def _cost(out, q, k, v, scale, window=0, softcap=0.0, keep=None, p=0.0):
    """Blocks of scores stay in the last-level cache: see :data:`SCORES`."""
    return cost.attention(out, q, k, v, True, keep, window=window)


@attention_blocked_backward.costs
def _backward_cost(out, grad, q, k, v, result, lse, scale, window=0, softcap=0.0, keep=None, p=0.0):
    return cost.attention(out, q, k, v, True, grad, result, lse, keep, window=window, backward=True)


def _batches(q: Tensor) -> Iterator[slice]:
    batch, heads, seq, _ = q.shape
    step = max(1, min(batch, SCORES // max(1, heads * ROWS * seq)))
    return (slice(b, b + step) for b in range(0, batch, step))


class _Blocks:
    """One part of the batch: its blocks of rows, their scores, and the work buffers. Heads that share keys are one."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, softcap: float, keep: Tensor | None = None
    ) -> None:
        (batch, heads, self.seq, self.dim), kv_heads = q.shape, k.shape[1]
        self.dtype, self.scale, self.window, self.softcap = accumulation_dtype(q.dtype), scale, window, softcap
        self.split = (kv_heads, heads // max(kv_heads, 1))
        self.lead, self.n = (batch, *self.split), batch * kv_heads
        self.q = q.unflatten(1, self.split)
        self.keys, self.values = (x.to(self.dtype).reshape(self.n, self.seq, x.shape[-1]) for x in (k, v))
        self.keep = None if keep is None else keep.unflatten(1, self.split)
        self._buffers: dict[str, Tensor] = {}
        self._diagonal = q.new_full((ROWS, ROWS), float("-inf"), dtype=self.dtype).triu_(1)

    def blocks(self) -> Iterator[tuple[slice, int, int]]:
        """(rows, first key, one past the last key); the last rows come first, since they see every key."""
        for start in reversed(range(0, self.seq, ROWS)):
            stop = min(self.seq, start + ROWS)
            yield slice(start, stop), max(0, start - self.window + 1) if self.window else 0, stop

    def buffer(self, name: str, *shape: int) -> Tensor:
        size = math.prod(shape)
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = self.keys.new_empty(size)
        return self._buffers[name][:size].view(shape)

    def drop(self, weights: Tensor, rows: slice, low: int, high: int) -> None:
        """Zero, in place, what dropout drops of ``weights`` [n, groups * rows, high - low]."""
        if self.keep is not None:
            weights.view(*self.lead, rows.stop - rows.start, high - low).mul_(self.keep[:, :, :, rows, low:high])

    def rows_of(self, name: str, x: Tensor, rows: slice, factor: float = 1.0) -> Tensor:
        """x [batch, kv_heads, groups, seq, d] at ``rows`` as [n, groups * rows, d], times ``factor``."""
        piece = x[:, :, :, rows]
        copy = self.buffer(name, *piece.shape)
        copy.copy_(piece) if factor == 1.0 else torch.mul(piece, factor, out=copy)
        return copy.view(self.n, piece.shape[2] * piece.shape[3], piece.shape[4])

    def scores(self, rows: slice, low: int, high: int, lse: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Masked scores [n, groups * rows, high - low], less ``lse`` if given, and tanh of the soft-cap if there is
        one.
        """
        q, k = self.rows_of("q", self.q, rows, self.scale), self.keys[:, low:high].transpose(1, 2)
        scores, tanh = self.buffer("s", self.n, q.shape[1], high - low), None
        if self.softcap or lse is None:
            torch.bmm(q, k, out=scores)
        else:
            torch.baddbmm(lse[:, :, :, rows].neg().reshape(self.n, q.shape[1], 1).to(self.dtype), q, k, out=scores)
        if self.softcap:
            tanh = self.buffer("t", *scores.shape)
            torch.tanh(scores.div_(self.softcap), out=tanh)
            torch.mul(tanh, self.softcap, out=scores)
            if lse is not None:
                scores.sub_(lse[:, :, :, rows].reshape(self.n, q.shape[1], 1))
        count = rows.stop - rows.start
        view = scores.view(self.n, self.split[1], count, high - low)
        view[..., rows.start - low :].add_(self._diagonal[:count, :count])
        # Row i of the block sees columns from i + first on, which is 0, or less where the window starts before all
        # keys.
        first = rows.start - self.window + 1 - low
        if self.window and count - 1 + first > 0:
            view[..., : count - 1 + first].add_(
                self.keys.new_full((count, count - 1 + first), float("-inf")).tril_(first - 1)
            )
        return scores, tanh


def _backward(grad, q, k, v, out, lse, dq, dk, dv, scale, window, softcap, keep, p_drop):
    part = _Blocks(q, k, v, scale, window, softcap, keep)
    # Not rowsum(P dP) over the keys that are here: in a step of ring attention P is a part of a row's weights.
    delta = (grad.to(part.dtype) * out.to(part.dtype)).sum(-1)
    grad, delta, lse, dq = (x.unflatten(1, part.split) for x in (grad, delta, lse, dq))
    sums = [x if x.dtype == part.dtype else x.new_zeros(x.shape, dtype=part.dtype) for x in (dk, dv)]
    if window:
        for x in sums:
            x.zero_()

    def add(into: Tensor, left: Tensor, right: Tensor, low: int, high: int) -> None:
        product = part.buffer("k", part.n, high - low, right.shape[-1])
        torch.bmm(left.transpose(1, 2), right, out=product)
        product = product.view(into.shape[0], into.shape[1], high - low, right.shape[-1])
        # Without a window the first block, the last rows, has every key: it fills the sum and the others are added.
        into.copy_(product) if high - low == part.seq else into[:, :, low:high].add_(product)

    for rows, low, high in part.blocks():
        p, tanh = part.scores(rows, low, high, lse)
        p.exp_()
        g = part.rows_of("g", grad, rows, 1 / (1 - p_drop))
        ds = part.buffer("ds", *p.shape)
        if keep is not None:
            part.drop(ds.copy_(p), rows, low, high)
        add(sums[1], p if keep is None else ds, g, low, high)
        torch.bmm(g, part.values[:, low:high].transpose(1, 2), out=ds)
        part.drop(ds, rows, low, high)
        ds.sub_(delta[:, :, :, rows].reshape(part.n, p.shape[1], 1)).mul_(p)  # dS = P (dP - rowsum(dO O))
        if tanh is not None:
            ds.mul_(tanh.square_().neg_().add_(1))
        qs = part.buffer("q", part.n, p.shape[1], part.dim)
        add(sums[0], ds, qs, low, high)
        torch.bmm(ds, part.keys[:, low:high], out=qs)
        dq[:, :, :, rows].copy_(qs.mul_(scale).view(*part.lead, rows.stop - rows.start, part.dim))
    for total, x in zip(sums, (dk, dv)):
        if total is not x:
            x.copy_(total)
