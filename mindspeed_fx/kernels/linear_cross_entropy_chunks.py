"""The work of linear cross-entropy: losses and gradients, one chunk of rows of logits at a time.

Sums over chunks are kept in float32 for 16-bit inputs, whose logits and their gradients are rounded to 16 bits as
unfused ones are, or, where our own products make them, not rounded. What happens to one chunk is
:mod:`mindspeed_fx.kernels.linear_cross_entropy_work`.
"""

from __future__ import annotations

from typing import Callable, Iterator, Sequence

import torch
from torch import Tensor

from mindspeed_fx.compat import dispatcher, fake
from mindspeed_fx.kernels import triton
from mindspeed_fx.kernels.base import accumulation_dtype
from mindspeed_fx.kernels.cpu import narrow_product, weight_gradient
from mindspeed_fx.kernels.linear_cross_entropy_work import BLOCK, Linear, chunk_in_triton, onednn, work

BLOCK_OF_DEVICE = 256 * 2**20
"""Bytes of a product on an accelerator before it is added to the sum."""

FEW = 16
"""Ignored tokens are multiplied, too, where they are at most one of so many: the others need not be gathered then, nor
what is made of them scattered, which takes the memory of the hidden states twice."""


def run_in_chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    upstream: Tensor | float,
    needed: Sequence[bool],
    upstream_of: Callable[[slice | Tensor, Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Losses, and the gradients of sum(upstream * losses).

    Args:
        hidden: [tokens, hidden]; weight: [vocab, hidden]; bias: [vocab] or None.
        target: [tokens], int64.
        upstream: [tokens], or one number for all, on an accelerator as a tensor [], which the host need not wait for.
        needed: which gradients to compute: of hidden, weight, bias.
        upstream_of: gives, from which tokens a chunk has and their losses, what their gradients are multiplied with.

    Returns:
        losses [tokens] in the accumulation type, zero where ignored; gradients, None where not needed, those of weight
        and bias in the accumulation type, that of the weight in bfloat16 where one chunk has all tokens.
    """
    wide, vocab = accumulation_dtype(hidden.dtype), weight.shape[0]
    chunk = work(hidden, weight, bias, (label_smoothing, z_loss, softcap), any(needed), needed[1])
    losses = hidden.new_zeros(hidden.shape[0], dtype=wide)
    # float16 waits for its scale in float32: before, gradients of a mean underflow.
    like = torch.float32 if hidden.dtype == torch.float16 else hidden.dtype
    dhidden = dweight = None
    is_one = chunk.rounds and chunk.rows >= hidden.shape[0]  # then there is nothing to sum over chunks
    summed = like if is_one else wide
    dbias = hidden.new_zeros(vocab, dtype=wide) if needed[2] else None
    scale, per_token, later = _factors(upstream, chunk.rounds and hidden.dtype == torch.bfloat16, target, wide)
    target, places, marked = _places(target, ignore_index, vocab, chunk)
    first = True
    with torch.autocast(hidden.device.type, enabled=False):  # what a caller's autocast would cast was cast before
        for at in places:
            x = hidden[at]
            d, losses[at] = chunk(x, target[at], None if per_token is None else per_token[at])
            if upstream_of is not None and d is not None:
                factor = upstream_of(at, losses[at])
                # Of an ignored token anything may come, and zero times infinity is not zero.
                d = d.mul_(factor.where(target[at] >= 0, 0.0).unsqueeze(1) if marked else factor.unsqueeze(1))
            if dbias is not None:
                dbias.add_(d.sum(0, dtype=wide), alpha=scale)
            if needed[0]:
                part = times_weight(d, weight).to(like).mul_(scale)
                if len(part) < len(hidden):
                    dhidden = hidden.new_zeros(hidden.shape, dtype=like) if dhidden is None else dhidden
                    dhidden[at] = part
                else:
                    dhidden = part
            if needed[1]:
                # Made here, not before: oneDNN's copies in the other product lie where it will.
                dweight = torch.empty(weight.shape, dtype=summed, device=hidden.device) if first else dweight
                add_product(dweight, d, x, scale, first)
            first = False
    if first:  # every token is ignored
        dhidden = hidden.new_zeros(hidden.shape, dtype=like) if needed[0] else None
        dweight = hidden.new_zeros(weight.shape, dtype=summed) if needed[1] else None
    if later is not None:
        dhidden, dweight, dbias = (None if g is None else g.mul_(later) for g in (dhidden, dweight, dbias))
    return losses, dhidden, dweight, dbias


def is_waited_for(device: torch.device) -> bool:
    """Whether the host may look at values of ``device``: elsewhere it queues work while the device computes."""
    return device.type == "cpu"


def _factors(
    upstream: Tensor | float, rounds: bool, target: Tensor, wide: torch.dtype
) -> tuple[float, Tensor | None, Tensor | None]:
    """What gradients are multiplied with: a number when they are summed, a number for each token before they are
    rounded, and a tensor [] in the end."""
    if isinstance(upstream, Tensor) and upstream.dim():
        return 1.0, upstream, None
    if isinstance(upstream, Tensor):
        return (1.0, upstream.expand(target.shape), None) if rounds else (1.0, None, upstream)
    return (1.0, target.new_full(target.shape, upstream, dtype=wide), None) if rounds else (upstream, None, None)


def _mark_ignored(target: Tensor, ignore_index: int, vocab: int) -> Tensor:
    """``target`` with -1 where a token is ignored; what is no class stops the device, or, where that cannot assert, has
    NaN for a loss. The host waits for nothing."""
    kept = target != ignore_index
    if dispatcher.asserts_async(target.device):
        torch._assert_async(((target >= 0) & (target < vocab) | ~kept).all(), "Target is out of bounds.")
    return target.where(target >= 0, vocab).where(kept, -1)


def parts(
    hidden: Tensor,
    weight: Tensor,
    per_token: bool,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    needed: Sequence[bool],
) -> list[tuple[str, list]]:
    """The launch of a full chunk, for :attr:`mindspeed_fx.kernels.base.Operator.parts`."""
    if hidden.dtype not in triton.DTYPES:
        return []
    vocab = fake.hint(weight.shape[0])
    tokens, width = map(fake.hint, hidden.shape)
    rows = chunk_in_triton(tokens, width, vocab, accumulation_dtype(hidden.dtype), needed[1])
    target, upstream = (
        hidden.new_empty(rows, dtype=torch.int64),
        hidden.new_empty(rows, dtype=torch.float32) if per_token else None,
    )
    return [
        (
            "linear_cross_entropy_chunk",
            [hidden.new_empty(rows, vocab), target, upstream, label_smoothing, z_loss, softcap, any(needed)],
        )
    ]


def _places(
    target: Tensor, ignore_index: int, vocab: int, chunk: Linear
) -> tuple[Tensor, Iterator[slice | Tensor], bool]:
    """The targets, which tokens make up each chunk, of about equal size, and whether ignored ones are among them, their
    targets -1: elsewhere they are left out, by indices."""
    if chunk.takes_ignored and not is_waited_for(target.device):
        return _mark_ignored(target, ignore_index, vocab), slices(len(target), chunk.rows), True
    is_kept = target != ignore_index
    kept = is_kept.nonzero().squeeze(1)
    if not len(kept):
        return target, iter(()), False
    low, high = torch.aminmax(target if len(kept) == len(target) else target[kept])
    for t in (low.item(), high.item()):
        if not 0 <= t < vocab:
            raise IndexError(f"Target {t} is out of bounds.")
    ignored = len(target) - len(kept)
    if chunk.takes_ignored and 0 < FEW * ignored <= len(target):
        return target.where(is_kept, -1), slices(len(target), chunk.rows), True
    return target, pieces(kept, len(target), chunk.rows), False


def pieces(kept: Tensor, tokens: int, rows: int) -> Iterator[slice | Tensor]:
    """``kept`` [any], the numbers of some of ``tokens`` tokens in order, in pieces of at most ``rows`` and about equal
    size: slices where no token is left out."""
    for at in slices(len(kept), rows):
        yield at if len(kept) == tokens else kept[at]


def slices(tokens: int, rows: int) -> Iterator[slice]:
    """So many tokens in pieces of at most ``rows`` and about equal size."""
    step = -(-tokens // -(-tokens // rows)) if tokens else 1
    for start in range(0, tokens, step):
        yield slice(start, min(tokens, start + step))


def times_weight(d: Tensor, weight: Tensor) -> Tensor:
    """``d @ weight``, in the type of ``d``, which may be float32 beside a narrow weight where our own products run."""
    if d.dtype != weight.dtype:
        return narrow_product.multiply(d, weight)
    return (
        torch.ops.mkldnn._linear_pointwise(d, weight.t(), None, "none", [], "")
        if onednn(d, weight)
        else torch.mm(d, weight)
    )


def add_product(into: Tensor, d: Tensor, x: Tensor, scale: float, first: bool) -> None:
    """into [vocab, hidden] += scale d^T x; what ``into`` held does not count for the ``first``."""
    is_sum = into.dtype != d.dtype and narrow_product.unable_to_sum(d.dtype, d.device.type) is None
    if d.dtype != x.dtype or is_sum:
        narrow_product.multiply(d.t(), x, into, scale=scale, add=not first)
        return
    if first and scale == 1.0 and into.dtype == d.dtype == torch.bfloat16:
        torch.mm(d.t(), x, out=into)
        return
    if into.dtype == d.dtype:
        if into.is_contiguous() and weight_gradient.problem(d, x) is None:
            weight_gradient.weight_gradient(d, x, into, scale, add=not first)
            return
        torch.addmm(into, d.t(), x, beta=0 if first else 1, alpha=scale, out=into)
        return
    if into.dtype == torch.float32 and dispatcher.adds_narrow_products(d.dtype, d.device):
        torch.addmm(into, d.t(), x, out_dtype=torch.float32, beta=0 if first else 1, alpha=scale, out=into)
        return
    step = max(1, (BLOCK if d.device.type == "cpu" else BLOCK_OF_DEVICE) // max(1, x.shape[1] * d.itemsize))
    if first:
        into.zero_()
    for i in range(0, len(into), step):
        into[i : i + step].add_(torch.mm(d[:, i : i + step].t(), x), alpha=scale)
