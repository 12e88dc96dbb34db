"""The work of linear cross-entropy: losses and gradients, one chunk of rows of logits at a time.

Work buffers are allocated once and reused: a fresh one costs more in page faults than what fills it. Sums over chunks
are kept in float32 for 16-bit inputs, whose logits and their gradients are rounded to 16 bits as unfused ones are.

On an accelerator one Triton kernel makes losses of a chunk of logits and puts their gradients in its place
(:func:`in_place`); elsewhere probabilities are made in a buffer of float32 by torch's operators.
"""

from __future__ import annotations

from typing import Iterator, Sequence

import torch
from torch import Tensor

from mindspeed_fx import compat
from mindspeed_fx.kernels import triton, weight_gradient
from mindspeed_fx.kernels.base import accumulation_dtype

CHUNK = 64 * 2**20
"""Bytes of one chunk of logits, in the accumulation type. Every chunk reads the weight twice and its gradient once;
below this size that shows."""

BLOCK = 32 * 2**20
"""Bytes that one call of oneDNN may allocate for logits: what the C library keeps for the next call, without page faults."""


def chunked(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, upstream: Tensor | float, needed: Sequence[bool]
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Losses, and the gradients of sum(upstream * losses).

    Args:
        hidden: [tokens, hidden]; weight: [vocab, hidden]; bias: [vocab] or None; target: [tokens], int64.
        upstream: [tokens], or one number for all.
        needed: which gradients to compute: of hidden, weight, bias.

    Returns:
        losses [tokens] in the accumulation type, zero where ignored; gradients, None where not needed, those of weight
        and bias in the accumulation type.
    """
    wide, vocab = accumulation_dtype(hidden.dtype), weight.shape[0]
    losses = hidden.new_zeros(hidden.shape[0], dtype=wide)
    dhidden = torch.zeros(hidden.shape, dtype=hidden.dtype, device=hidden.device) if needed[0] else None
    dweight = torch.empty(weight.shape, dtype=wide, device=hidden.device) if needed[1] else None
    dbias = hidden.new_zeros(vocab, dtype=wide) if needed[2] else None
    scale, per_token = (1.0, upstream) if isinstance(upstream, Tensor) else (upstream, None)
    kernel = triton.load(triton.PARTS["linear_cross_entropy_chunk"]) if in_place(hidden) is None else None
    work = _Work(hidden, weight, bias, softcap, any(needed), kernel is not None)
    first = True
    with torch.autocast(hidden.device.type, enabled=False):  # what a caller's autocast would cast was cast before
        for at in _rows(target, ignore_index, vocab, work.rows):
            x, t = hidden[at], target[at].unsqueeze(1)
            if kernel is not None:
                d = work.product(x)
                losses[at] = kernel(d, t.squeeze(1), None if per_token is None else per_token[at], label_smoothing, z_loss, softcap, any(needed))
                if dbias is not None:
                    dbias.add_(d.sum(0, dtype=wide), alpha=scale)
                first = _products(hidden, weight, x, d, at, scale, dhidden, dweight, first) if any(needed) else first
                continue
            p, lse, losses[at] = work.probabilities(x, t, label_smoothing, z_loss)
            if not any(needed):
                continue
            # d loss / d logits = p (1 + 2 z lse) - (1 - s) onehot - s / vocab, in place of p.
            if z_loss:
                p.mul_((1 + 2 * z_loss * lse).unsqueeze(1))
            p.scatter_add_(1, t, p.new_full((1, 1), label_smoothing - 1.0).expand(t.shape))
            if label_smoothing:
                p.sub_(label_smoothing / vocab)
            if softcap:
                p.mul_(work.slope[: len(p)])
            if per_token is not None:
                p.mul_(per_token[at].unsqueeze(1))
            if dbias is not None:
                dbias.add_(p.sum(0), alpha=scale)
            first = _products(hidden, weight, x, work.narrow(p), at, scale, dhidden, dweight, first)
    if first and dweight is not None:
        dweight.zero_()  # every token is ignored
    return losses, dhidden, dweight, dbias


def _products(hidden: Tensor, weight: Tensor, x: Tensor, d: Tensor, at: slice | Tensor, scale: float, dhidden: Tensor | None, dweight: Tensor | None, first: bool) -> bool:
    """Both gradients from those of one chunk's logits; False, for what follows is not the first chunk."""
    if dhidden is not None:
        dhidden[at] = times_weight(d, weight).mul_(scale)
    if dweight is not None:
        add_product(dweight, d, x, scale, first)
    return False


def in_place(hidden: Tensor) -> str | None:
    """Why the kernel does not make the gradients of logits in their place; None when it does."""
    if hidden.dtype not in triton.DTYPES:
        return f"hidden is {hidden.dtype}".replace("torch.", "")
    return triton.unable(hidden.device)


def parts(hidden: Tensor, weight: Tensor, per_token: bool, label_smoothing: float, z_loss: float, softcap: float, gradients: bool) -> list[tuple[str, list]]:
    """The launch of a full chunk, for :attr:`mindspeed_fx.kernels.base.Operator.parts`."""
    if hidden.dtype not in triton.DTYPES:
        return []
    tokens, vocab = compat.hint(hidden.shape[0]), compat.hint(weight.shape[0])
    rows = _full(tokens, vocab, accumulation_dtype(hidden.dtype), bool(softcap and gradients))
    target, upstream = hidden.new_empty(rows, dtype=torch.int64), hidden.new_empty(rows, dtype=torch.float32) if per_token else None
    return [("linear_cross_entropy_chunk", [hidden.new_empty(rows, vocab), target, upstream, label_smoothing, z_loss, softcap, gradients])]


def _full(tokens: int, vocab: int, wide: torch.dtype, slope: bool) -> int:
    """Rows of a full chunk; ``slope``: of which two are kept."""
    return max(1, min(tokens, CHUNK // (vocab * wide.itemsize) // (2 if slope else 1)))


def _rows(target: Tensor, ignore_index: int, vocab: int, rows: int) -> Iterator[slice | Tensor]:
    """Which tokens make up each chunk: slices, or indices when some are ignored; chunks of about equal size."""
    kept = (target != ignore_index).nonzero().squeeze(1)
    if not len(kept):
        return
    low, high = torch.aminmax(target if len(kept) == len(target) else target[kept])
    for t in (low.item(), high.item()):
        if not 0 <= t < vocab:
            raise IndexError(f"Target {t} is out of bounds.")
    chunks = -(-len(kept) // rows)
    rows = -(-len(kept) // chunks)
    for start in range(0, len(kept), rows):
        stop = min(len(kept), start + rows)
        yield slice(start, stop) if len(kept) == len(target) else kept[start:stop]


class _Work:
    """The buffers of one call: a chunk of logits or probabilities [rows, vocab] and what softcap and 16 bits need beside it."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float, gradients: bool, in_place: bool):
        self.weight, self.bias, self.softcap = weight, bias, softcap
        wide, vocab = accumulation_dtype(hidden.dtype), weight.shape[0]
        row = vocab * wide.itemsize
        self.onednn = _onednn(hidden, weight) and not in_place
        self.rows = max(1, min(hidden.shape[0], (CHUNK if gradients or not self.onednn else BLOCK) // row // (2 if softcap and gradients else 1)))
        self.block = max(1, BLOCK // row) if self.onednn else self.rows

        def buffer(dtype: torch.dtype) -> Tensor:
            return torch.empty((self.rows, vocab), dtype=dtype, device=hidden.device)

        self.wide = buffer(wide) if not in_place and (gradients or not self.onednn) else None
        self.short = buffer(hidden.dtype) if in_place or wide != hidden.dtype else None
        self.slope = buffer(wide) if softcap and gradients and not in_place else None

    def probabilities(self, x: Tensor, t: Tensor, label_smoothing: float, z_loss: float) -> tuple[Tensor | None, Tensor, Tensor]:
        """softmax of the logits of ``x`` [n, hidden] in the work buffer, and log-sum-exp and loss per token for the
        targets ``t`` [n, 1]."""
        found = [self._block(x[i : i + self.block], t[i : i + self.block], i, label_smoothing, z_loss) for i in range(0, len(x), self.block)]
        lse, loss = (torch.cat(parts) for parts in zip(*found))
        return None if self.wide is None else self.wide[: len(x)], lse, loss

    def _block(self, x: Tensor, t: Tensor, start: int, s: float, z_loss: float) -> tuple[Tensor, Tensor]:
        logits = self._logits(x)
        if self.softcap:
            logits.div_(self.softcap).tanh_()
            if self.slope is not None:
                torch.mul(logits, logits, out=self.slope[start : start + len(x)]).neg_().add_(1)
            logits.mul_(self.softcap)
        top, picked = logits.amax(-1), logits.gather(-1, t).squeeze(-1)
        smooth = s * logits.mean(-1) if s else 0.0
        p = torch.softmax(logits, -1, out=logits if self.wide is None else self.wide[start : start + len(x)])
        # The largest probability is exp(top - lse), and at least 1 / vocab.
        lse = top - p.amax(-1).log()
        loss = lse - (1 - s) * picked - smooth
        return lse, loss + z_loss * lse.square() if z_loss else loss

    def _logits(self, x: Tensor) -> Tensor:
        """[n, vocab] in the accumulation type, in the work buffer unless oneDNN allocates them."""
        if self.onednn:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        out = self.product(x)
        return out if self.short is None else self.wide[: len(x)].copy_(out)

    def product(self, x: Tensor) -> Tensor:
        """Logits [n, vocab] in the type of the inputs, in a work buffer."""
        out = (self.wide if self.short is None else self.short)[: len(x)]
        return torch.mm(x, self.weight.t(), out=out) if self.bias is None else torch.addmm(self.bias, x, self.weight.t(), out=out)

    def narrow(self, p: Tensor) -> Tensor:
        """``p`` in the type of the inputs."""
        return p if self.short is None else self.short[: len(p)].copy_(p)


def _onednn(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype == torch.float32 and a.device.type == "cpu" and compat.onednn_beats_blas()


def times_weight(d: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(d, weight.t(), None, "none", [], "") if _onednn(d, weight) else torch.mm(d, weight)


def add_product(into: Tensor, d: Tensor, x: Tensor, scale: float, first: bool) -> None:
    """into [vocab, hidden] += scale d^T x; what ``into`` held does not count for the ``first``."""
    if into.dtype == d.dtype:
        if into.is_contiguous() and weight_gradient.problem(d, x) is None:
            weight_gradient.weight_gradient(d, x, into, scale, add=not first)
            return
        torch.addmm(into, d.t(), x, beta=0 if first else 1, alpha=scale, out=into)
        return
    step = max(1, BLOCK // (x.shape[1] * d.itemsize))
    if first:
        into.zero_()
    for i in range(0, len(into), step):
        into[i : i + step].add_(torch.mm(d[:, i : i + step].t(), x), alpha=scale)
