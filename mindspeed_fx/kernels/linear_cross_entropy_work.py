"""What linear cross-entropy does with one chunk of logits: losses, and gradients in their place.

Three ways, the best that can run: one Triton kernel on an accelerator; one function in C++ on cpu, which computes in
float32, for float32, bfloat16 and float16; torch's operators elsewhere, with probabilities in a buffer of the
accumulation type. Buffers are allocated once and reused: a fresh one costs more in page faults than what fills it.
"""

from __future__ import annotations

import abc
import ctypes
from typing import Any

import torch
from torch import Tensor

from mindspeed_fx.compat import cpp, dispatcher
from mindspeed_fx.kernels import triton
from mindspeed_fx.kernels.base import accumulation_dtype
from mindspeed_fx.kernels.cpu import narrow_product

CHUNK = 64 * 2**20
"""Most bytes of one chunk of logits, in the accumulation type. Every chunk reads the weight twice and its gradient
once; below this size that shows."""

BLOCK = 32 * 2**20
"""Bytes that one call of oneDNN may allocate for logits: what the C library keeps for the next call, without page
faults.
"""

LEAST = 1024
"""Rows of a chunk on an accelerator at least: with fewer, reading the weight takes longer than multiplying with it."""

SUMMED = 2
"""16-bit logits of so many rows for each column of the hidden states take the memory of the weight's gradient in
float32."""

CACHED, ROWS = 8 * 2**20, 256
"""Bytes of a chunk that stays in the last cache, and rows from which on reading the weight once more does not show.
Measured by benchmarks/whole_models.py: 8 MiB are faster than 4, 16 or 64 at a vocabulary of 8192."""


class Linear(abc.ABC):
    """Logits of rows of hidden states, and what loss is made of them; base of the three ways.

    Args:
        hidden: [tokens, hidden], read for its type and place; weight: [vocab, hidden]; bias: [vocab] or None.
        settings: label_smoothing, z_loss, softcap.
        gradients: whether anybody needs those of the logits.
        sums: whether the gradient of the weight is needed, which is summed over chunks.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        settings: tuple[float, float, float],
        gradients: bool,
        sums: bool = False,
    ):
        self.weight, self.bias, self.gradients, self.sums = weight, bias, gradients, sums
        self.label_smoothing, self.z_loss, self.softcap = settings

    rows: int
    """Of a full chunk."""

    takes_ignored = False
    """Whether a chunk may have targets below zero: ignored tokens, whose losses and gradients are zero."""

    rounds = False
    """Whether gradients of logits are rounded to the 16 bits of the inputs once, after they are scaled."""

    def buffer(self, rows: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((rows, self.weight.shape[0]), dtype=dtype, device=self.weight.device)

    def product(self, x: Tensor, out: Tensor) -> Tensor:
        """Logits [n, vocab] in the type of the inputs, in the first rows of ``out``."""
        out = out[: len(x)]
        return (
            torch.mm(x, self.weight.t(), out=out)
            if self.bias is None
            else torch.addmm(self.bias, x, self.weight.t(), out=out)
        )

    def onednn(self, x: Tensor) -> Tensor:
        """Logits [n, vocab] in memory that oneDNN allocates."""
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")

    @abc.abstractmethod
    def __call__(self, x: Tensor, target: Tensor, upstream: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """Gradients of sum(upstream * losses) for the logits, in the type of the inputs or in float32, valid until the
        next call (None where nobody needs them), and losses.

        Args:
            x: [n, hidden], n at most ``rows``; target: [n], int64, classes.
            upstream: [n], or None for ones.
        """


def full_chunk(tokens: int, vocab: int, wide: torch.dtype, budget: int | None = None) -> int:
    """Rows of a full chunk of at most ``budget`` bytes in the type ``wide``; CHUNK when None."""
    return max(1, min(tokens, (CHUNK if budget is None else budget) // (vocab * wide.itemsize)))


def work(hidden: Tensor, *args: Any) -> Linear:
    """The fastest way that can run; takes what :class:`Linear` does."""
    # What could not be built is None, after a warning.
    kind = (
        InTriton
        if in_triton(hidden) is None
        else InCpp
        if in_cpp(hidden.dtype, hidden.device.type) is None and cpp.function("cross_entropy")
        else InTorch
    )
    return kind(hidden, *args)


def onednn(a: Tensor, b: Tensor) -> bool:
    is_float = a.dtype == b.dtype == torch.float32 and a.device.type == "cpu"
    return is_float and a.shape[1] > 0 and dispatcher.onednn_beats_blas()


# --------------------------------------------------------------------------- Triton


def in_triton(hidden: Tensor) -> str | None:
    """Why the Triton kernel does not run; None when it does."""
    if hidden.dtype not in triton.DTYPES:
        return f"hidden is {hidden.dtype}".replace("torch.", "")
    return triton.unable(hidden.device)


def chunk_in_triton(tokens: int, width: int, vocab: int, wide: torch.dtype, sums: bool) -> int:
    """Rows of a full chunk. Where the gradient of the weight is summed over chunks, so many rows of 16-bit logits as
    take the memory of that sum in float32; where these are all tokens, there is no sum.
    """
    return min(tokens, max(full_chunk(tokens, vocab, wide), SUMMED * width if sums else 0, LEAST))


class InTriton(Linear):
    takes_ignored = True

    def __init__(self, hidden: Tensor, *args):
        super().__init__(hidden, *args)
        self.kernel = triton.load(triton.PARTS["linear_cross_entropy_chunk"])
        tokens, (vocab, width) = hidden.shape[0], self.weight.shape
        self.rows = chunk_in_triton(tokens, width, vocab, accumulation_dtype(hidden.dtype), self.sums)
        self.rounds = hidden.dtype == torch.bfloat16
        self.logits = self.buffer(self.rows, hidden.dtype)

    def __call__(self, x: Tensor, target: Tensor, upstream: Tensor | None) -> tuple[Tensor | None, Tensor]:
        d = self.product(x, self.logits)
        losses = self.kernel(d, target, upstream, self.label_smoothing, self.z_loss, self.softcap, self.gradients)
        return d if self.gradients else None, losses


# --------------------------------------------------------------------------- C++


def in_cpp(dtype: torch.dtype, device: str) -> str | None:
    """Why the function in C++ does not run; None when it does once it is built, which begins here."""
    if dtype not in narrow_product.TYPES or device != "cpu":
        return f"{dtype} on {device}; float32, bfloat16 and float16 on cpu only"
    if reason := cpp.problem():
        return reason
    cpp.start()
    return None


class InCpp(Linear):
    takes_ignored = True

    def __init__(self, hidden: Tensor, *args):
        super().__init__(hidden, *args)
        tokens, (vocab, width) = hidden.shape[0], self.weight.shape
        # Products summed in float32 leave logits and their gradients unrounded; ATen's are rounded, as unfused.
        self.rounds = hidden.dtype != torch.float32 and narrow_product.problem(hidden.dtype, "cpu") is not None
        stored = hidden.dtype if self.rounds else torch.float32
        small, large = (full_chunk(tokens, vocab, stored, budget) for budget in (CACHED, CHUNK))
        self.rows = max(small, min(ROWS, large))
        if self.rounds and self.sums and hidden.dtype == torch.bfloat16 and tokens <= 2 * width:
            self.rows = max(1, tokens)  # all logits in 16 bits take no more than a sum over chunks in float32 does
        # What fits a block of oneDNN's becomes its own gradient; larger chunks are gathered in a buffer.
        self.own = onednn(hidden, self.weight)
        self.block = full_chunk(tokens, vocab, torch.float32, BLOCK) if self.own else self.rows
        needs_buffer = not self.own or (self.gradients and self.rows > self.block)
        self.logits = self.buffer(self.rows, stored) if needs_buffer else None

    def product(self, x: Tensor, out: Tensor) -> Tensor:
        if x.dtype == out.dtype:
            return super().product(x, out)
        return narrow_product.multiply(x, self.weight.t(), out[: len(x)], self.bias)

    def __call__(self, x: Tensor, target: Tensor, upstream: Tensor | None) -> tuple[Tensor | None, Tensor]:
        losses, target = x.new_empty(len(x), dtype=torch.float32), target.contiguous()
        upstream = None if upstream is None else upstream.to(torch.float32).contiguous()
        d = self.logits[: len(x)] if self.logits is not None else None
        for i in range(0, len(x), self.block):
            at = slice(i, min(len(x), i + self.block))
            logits = self.onednn(x[at]) if self.own else self.product(x, self.logits)
            into = None if not self.gradients else logits if self.logits is None else d[at]
            self.rows_of(logits, into, target[at], None if upstream is None else upstream[at], losses[at])
            d, logits = (
                (logits if self.logits is None and self.gradients else d),
                None,
            )  # two blocks at once would be as much again
        return d if self.gradients else None, losses

    def rows_of(
        self, logits: Tensor, into: Tensor | None, target: Tensor, upstream: Tensor | None, losses: Tensor
    ) -> None:
        size, data, number = (
            ctypes.c_int64,
            lambda t: ctypes.c_void_p(None if t is None else t.data_ptr()),
            ctypes.c_float,
        )
        cpp.call(
            "cross_entropy",
            size(narrow_product.TYPES.index(logits.dtype)),
            size(logits.shape[0]),
            size(logits.shape[1]),
            data(logits),
            data(into),
            data(target),
            data(upstream),
            data(losses),
            number(self.label_smoothing),
            number(self.z_loss),
            number(self.softcap),
            size(torch.get_num_threads()),
        )


# --------------------------------------------------------------------------- torch


class InTorch(Linear):
    def __init__(self, hidden: Tensor, *args):
        super().__init__(hidden, *args)
        wide, vocab = accumulation_dtype(hidden.dtype), self.weight.shape[0]
        slope = self.softcap and self.gradients
        self.own = onednn(hidden, self.weight)
        self.rows = full_chunk(
            hidden.shape[0], vocab, wide, (CHUNK if self.gradients or not self.own else BLOCK) // (2 if slope else 1)
        )
        self.block = full_chunk(hidden.shape[0], vocab, wide, BLOCK) if self.own else self.rows
        self.wide = self.buffer(self.rows, wide) if self.gradients or not self.own else None
        self.short = self.buffer(self.rows, hidden.dtype) if wide != hidden.dtype else None
        self.slope = self.buffer(self.rows, wide) if slope else None

    def __call__(self, x: Tensor, target: Tensor, upstream: Tensor | None) -> tuple[Tensor | None, Tensor]:
        t = target.unsqueeze(1)
        results = [self._block(x[i : i + self.block], t[i : i + self.block], i) for i in range(0, len(x), self.block)]
        lse, losses = (torch.cat(parts) for parts in zip(*results))
        if not self.gradients:
            return None, losses
        # d loss / d logits = p (1 + 2 z lse) - (1 - s) onehot - s / vocab, in place of p.
        p, s = self.wide[: len(x)], self.label_smoothing
        if self.z_loss:
            p.mul_((1 + 2 * self.z_loss * lse).unsqueeze(1))
        p.scatter_add_(1, t, p.new_full((1, 1), s - 1.0).expand(t.shape))
        if s:
            p.sub_(s / p.shape[1])
        if self.slope is not None:
            p.mul_(self.slope[: len(p)])
        if upstream is not None:
            p.mul_(upstream.unsqueeze(1))
        return p if self.short is None else self.short[: len(p)].copy_(p), losses

    def _block(self, x: Tensor, t: Tensor, start: int) -> tuple[Tensor, Tensor]:
        logits, s = self._logits(x), self.label_smoothing
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
        return lse, loss + self.z_loss * lse.square() if self.z_loss else loss

    def _logits(self, x: Tensor) -> Tensor:
        """[n, vocab] in the accumulation type, in the work buffer unless oneDNN allocates them."""
        if self.own:
            return self.onednn(x)
        out = self.product(x, self.wide if self.short is None else self.short)
        return out if self.short is None else self.wide[: len(x)].copy_(out)
