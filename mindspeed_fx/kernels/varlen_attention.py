"""Attention within documents that are packed into one sequence: no score between two documents is computed.

Source: Dao 2023, "FlashAttention-2", its variable-length form; layout TND of ``npu_fusion_attention_v3``. A token names
its document by a number, so that shapes do not depend on how many documents there are; the kernel finds them when it
runs.
"""

from __future__ import annotations

from typing import Iterator, Sequence

import torch
from torch import Tensor

from mindspeed_fx.compat.placements import REPLICATED
from mindspeed_fx.cost import operators as cost
from mindspeed_fx.kernels import attention as plain
from mindspeed_fx.kernels.base import LIBRARY, operator
from mindspeed_fx.kernels.cpu import attention_flash
from mindspeed_fx.kernels.cpu.attention_blocked import attention_blocked, attention_blocked_backward

aten = torch.ops.aten

TOGETHER = 128
"""Short documents are attended to together, under a mask, until they have so many tokens: calls stay few."""

SETTINGS = "bool causal, float scale, int window=0"


def _fake(q, k, v, documents, ends, causal, scale, window=0):
    return plain.fake(q, k, v, None, causal, scale)


@operator(
    f"varlen_attention(Tensor q, Tensor k, Tensor v, Tensor documents, Tensor? ends, {SETTINGS}) -> (Tensor, Tensor)",
    _fake,
    opaque=True,
)
def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor, ends: Tensor | None, causal: bool, scale: float, window: int = 0
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q k^T) v among the tokens of each document.

    Args:
        q: [batch, heads, seq, dim], float.
        k: [batch, kv_heads, seq, dim]; kv_heads divides heads.
        v: [batch, kv_heads, seq, v_dim].
        documents: [batch or 1, seq], integers: tokens of a row with equal numbers are one document, wherever they
            stand.
        ends: [any], integers: where the documents end, counted in tokens over all rows, in order; for targets whose
            kernel takes them, else None.
        causal: a token sees those of its document up to its own.
        scale: factor on q k^T.
        window: with ``causal``, a token sees those at most ``window`` - 1 places before it; 0 for all.

    Returns:
        out [batch, heads, seq, v_dim] and the log-sum-exp of each row, as those of ``mindspeed::attention``.
    """
    _check("varlen_attention", q, k, v)
    out, lse = _fake(q, k, v, documents, ends, causal, scale)
    for piece in _pieces(documents, q.shape[0]):
        qs, ks, vs = (piece.of(x) for x in (q, k, v))
        mask = piece.mask(causal, window)
        if _in_own_kernel(qs, ks, vs, mask):
            result = attention_flash.attention_flash.reference(
                qs, ks, vs, causal and mask is None, scale, 0 if mask is not None else window, 0.0, None, mask
            )
        elif window and mask is None:
            result = attention_blocked.reference(qs, ks, vs, scale, window)
        elif q.shape[-1] < v.shape[-1]:
            result = plain.attention.reference(qs, ks, vs, mask, causal and mask is None, scale)
        else:
            result = aten._scaled_dot_product_flash_attention_for_cpu(
                qs, ks, _pad(vs, qs), 0.0, causal and mask is None, attn_mask=_additive(mask, q.dtype), scale=scale
            )
            result = result[0][..., : v.shape[-1]], result[1]
        for whole, part in zip((out, lse), result):
            piece.put(whole, part)
    return out, lse


def _in_own_kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """16 bits alone: in float32 ATen's kernel and blocks of rows were measured to be as fast."""
    is_narrow = q.dtype in attention_flash.NARROW and q.device.type == "cpu"
    return is_narrow and attention_flash.supports(q, k, v, mask) is None


def _check(operator: str, q: Tensor, k: Tensor, v: Tensor, **others: tuple[Tensor, tuple]) -> None:
    """Raise ValueError where shapes do not fit: ATen's kernels read past the end then, or divide by zero, which ends
    the process.
    """
    torch._check_value(
        q.shape[1] % k.shape[1] == 0,
        lambda: f"{operator}: {k.shape[1]} heads of keys; valid: a divisor of {q.shape[1]}, the heads of queries",
    )
    for name, (x, shape) in {
        "k": (k, (q.shape[0], k.shape[1], *q.shape[2:])),
        "v": (v, (*k.shape[:3], v.shape[3])),
        **others,
    }.items():
        torch._check_value(
            tuple(x.shape) == tuple(shape), lambda: f"{operator}: {name} is {list(x.shape)}; valid: {list(shape)}"
        )  # noqa: B023


def _fake_backward(grad, q, k, v, out, lse, documents, ends, causal, scale, window=0):
    return plain.fake_backward(grad, q, k, v, out, lse, None, causal, scale)


@operator(
    "varlen_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor documents, "
    f"Tensor? ends, {SETTINGS}) -> (Tensor, Tensor, Tensor)",
    _fake_backward, opaque=True,
)  # fmt: skip
def varlen_attention_backward(grad, q, k, v, out, lse, documents, ends, causal, scale, window=0):
    """Gradients (dq, dk, dv) of :func:`varlen_attention`, each stored as [batch, seq, heads, dim]."""
    _check(
        "varlen_attention_backward",
        q,
        k,
        v,
        grad=(grad, out.shape),
        out=(out, (*q.shape[:3], v.shape[3])),
        lse=(lse, q.shape[:3]),
    )
    grads = _fake_backward(grad, q, k, v, out, lse, documents, ends, causal, scale)
    for piece in _pieces(documents, q.shape[0]):
        g, qs, ks, vs, o, s = (piece.of(x) for x in (grad, q, k, v, out, lse))
        mask = piece.mask(causal, window)
        if _in_own_kernel(qs, ks, vs, mask) and grad.dtype == q.dtype:
            result = attention_flash.attention_flash_backward.reference(
                g, qs, ks, vs, o, s, causal and mask is None, scale, 0 if mask is not None else window, 0.0, mask
            )
        elif window and mask is None:
            result = attention_blocked_backward.reference(g, qs, ks, vs, o, s, scale, window)
        elif q.shape[-1] < v.shape[-1]:
            result = plain.attention_backward.reference(g, qs, ks, vs, o, s, mask, causal and mask is None, scale)
        else:
            result = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                _pad(g, qs),
                qs,
                ks,
                _pad(vs, qs),
                _pad(o, qs),
                s,
                0.0,
                causal and mask is None,
                attn_mask=_additive(mask, q.dtype),
                scale=scale,
            )
        for whole, part in zip(grads, result):
            piece.put(whole, part[..., : whole.shape[-1]])
    return grads


# --------------------------------------------------------------------------- which tokens belong together


class _Piece:
    """Whole documents of some rows: those of ``numbers``, at ``tokens`` of the rows ``rows``."""

    def __init__(self, rows: slice, tokens: slice | Tensor, numbers: Tensor, single: bool) -> None:
        self.rows, self.tokens, self.numbers, self.single = rows, tokens, numbers, single

    def of(self, x: Tensor) -> Tensor:
        """x [batch, heads, seq, ...] at this piece. ATen's kernel takes the elements of a head to lie side by side and
        does not look.
        """
        part = x[self.rows, :, self.tokens]
        return part if part.dim() < 4 or part.stride(-1) == 1 else part.contiguous()

    def put(self, into: Tensor, part: Tensor) -> None:
        into[self.rows, :, self.tokens] = part.to(into.dtype)

    def mask(self, causal: bool, window: int) -> Tensor | None:
        """What a token may see, [tokens, tokens] bool; None where there is one document, to whose length the kernels'
        own masks apply.
        """
        contiguous = isinstance(self.tokens, slice)
        if self.single and (contiguous or not window):
            return None
        allowed = self.numbers[:, None] == self.numbers
        if window:
            places = torch.arange(len(self.numbers), device=self.numbers.device) if contiguous else self.tokens
            allowed &= places[:, None] - places < window
        return allowed.tril() if causal else allowed


def _pieces(documents: Tensor, batch: int) -> Iterator[_Piece]:
    """The documents of every row, short ones together; of all rows at once where the rows share their documents."""
    for row, numbers in enumerate(documents):
        rows = slice(row, row + 1) if documents.shape[0] == batch else slice(0, batch)
        starts = [0, *((numbers[1:] != numbers[:-1]).nonzero().flatten() + 1).tolist()]
        order = None
        if len(starts) != numbers.unique().numel():
            # A number comes back: tokens are brought together, in the order that they have.
            numbers, order = numbers.sort(stable=True)
            starts = [0, *((numbers[1:] != numbers[:-1]).nonzero().flatten() + 1).tolist()]
        for low, high, single in _group_documents(starts, numbers.shape[0]):
            yield _Piece(rows, slice(low, high) if order is None else order[low:high], numbers[low:high], single)


def _group_documents(starts: Sequence[int], seq: int) -> Iterator[tuple[int, int, bool]]:
    """(first token, one past the last, whether it is one document) of documents that are attended to together."""
    low, count = 0, 0
    for stop in [*starts[1:], seq]:
        count += 1
        if stop - low >= TOGETHER or stop == seq:
            yield low, stop, count == 1
            low, count = stop, 0


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return (
        None
        if mask is None
        else torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))[None, None]
    )


def _pad(x: Tensor, like: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (0, like.shape[-1] - x.shape[-1])) if x.shape[-1] != like.shape[-1] else x


# --------------------------------------------------------------------------- gradient, placements, cost


def _setup(ctx, inputs, output):
    q, k, v, documents, ends, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output, documents, ends)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, _grad_lse):
    if grad is None:
        return (None,) * 8
    grads = torch.ops.mindspeed.varlen_attention_backward(grad, *ctx.saved_tensors, *ctx.settings)
    return *(g if need else None for g, need in zip(grads, ctx.needs_input_grad)), None, None, None, None, None


torch.library.register_autograd("mindspeed::varlen_attention", _backward, setup_context=_setup, lib=LIBRARY)


def _rows(q, k, documents, ends):
    """The ways of causal attention: tokens see each other by their numbers, which every rank needs whole. By batch only
    without ``ends``, which count the tokens of all rows."""
    for out, lse, dq, dk, dv, _, _, grads in plain.attention_strategies(q, k, None, True):
        rows = out == 0
        if not (rows and ends is not None):
            yield out, lse, dq, dk, dv, 0 if rows and documents.shape[0] != 1 else REPLICATED, REPLICATED, grads


@varlen_attention.shard
def _sharding_rule(q, k, v, documents, ends, causal, scale, window=0):
    return [
        ([out, lse], [dq, dk, dv, numbers, e]) for out, lse, dq, dk, dv, numbers, e, _ in _rows(q, k, documents, ends)
    ]


@varlen_attention_backward.shard
def _sharding_rule_backward(grad, q, k, v, out, lse, documents, ends, causal, scale, window=0):
    return [
        (grads, [o, dq, dk, dv, o, s, numbers, e])
        for o, s, dq, dk, dv, numbers, e, grads in _rows(q, k, documents, ends)
    ]


@varlen_attention.costs
def _cost(out, q, k, v, documents, ends, causal, scale, window=0):
    """As one document, for how many there are is data: the most that it can cost."""
    return cost.attention(out, q, k, v, causal, documents, window=window)


@varlen_attention_backward.costs
def _backward_cost(out, grad, q, k, v, result, lse, documents, ends, causal, scale, window=0):
    return cost.attention(out, q, k, v, causal, grad, result, lse, documents, window=window, backward=True)
