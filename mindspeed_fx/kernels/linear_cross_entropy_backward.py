"""Backward of a linear followed by cross-entropy, from saved logits: the gradient of the logits exists a tile at a
time.

Beside :mod:`mindspeed_fx.kernels.linear_cross_entropy`, which keeps no logits: here they exist, because somebody else
reads them or because making them again would cost a fourth matrix product. Three products in all, as unfused, and the
second largest tensor of the step, shaped as the logits, is never allocated. Bounds: Wijmans et al. 2024, "Cut Your
Losses in Large-Vocabulary Language Models", do the same on one chip's memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_fx.compat.placements import PARTIAL, REPLICATED
from mindspeed_fx.cost.operators import SOFTMAX, Cost, as_product, size
from mindspeed_fx.kernels.base import accumulation_dtype, operator
from mindspeed_fx.kernels.cpu import narrow_product
from mindspeed_fx.kernels.linear_cross_entropy_chunks import add_product, times_weight

TILE = 8 * 2**20
"""Bytes of one tile of the gradient in the accumulation type: it stays in the last cache between the two products."""

ROWS = 4096
"""Rows of a tile at most. A tile as high as the tokens writes its part of the weight's gradient once; a higher one
would be too narrow for a matrix product."""


def _fake(grad, logits, target, lse, extra, hidden, weight, ignore_index, label_smoothing, needed):
    bias = logits.new_empty(logits.shape[1]) if needed[2] else logits.new_empty(0)
    return *(
        torch.empty(x.shape, dtype=x.dtype, device=x.device) if need else logits.new_empty(0)
        for x, need in zip((hidden, weight), needed)
    ), bias


@operator(
    "linear_cross_entropy_backward(Tensor grad, Tensor logits, Tensor target, Tensor lse, Tensor? extra, Tensor "
    "hidden, Tensor weight, int ignore_index, float label_smoothing, bool[3] needed) -> (Tensor, Tensor, Tensor)",
    _fake,
    opaque=True,
)
def linear_cross_entropy_backward(
    grad, logits, target, lse, extra, hidden, weight, ignore_index, label_smoothing, needed
):
    """Gradients for hidden, weight and bias of ``cross_entropy(hidden weight^T + bias, target)``.

    Args:
        grad: [tokens], gradient of each token's loss.
        logits: [tokens, vocab], float, as the forward made them.
        target: [tokens], int64; ``ignore_index`` marks tokens whose loss is zero.
        lse: [tokens], log-sum-exp of the logits, in the accumulation type.
        extra: [tokens, vocab], a gradient that reaches the logits some other way, or None.
        hidden: [tokens, hidden]; weight: [vocab, hidden]; both of the type of the logits.
        label_smoothing: weight in [0, 1) of the uniform distribution.
        needed: which gradients to compute: of hidden, weight, bias.

    Returns:
        gradients of hidden, weight and bias in their type, of size 0 where not needed. The gradient of the logits is
        rounded to their type before the products, as unfused, but where the products are our own; sums over tiles are
        kept in the accumulation type.
    """
    wide, (tokens, vocab) = accumulation_dtype(logits.dtype), logits.shape
    dhidden = torch.zeros(hidden.shape, dtype=wide, device=hidden.device) if needed[0] else None
    rows = max(1, min(tokens, ROWS))
    columns = max(1, min(vocab, TILE // wide.itemsize // rows))
    # One block of rows writes the weight's gradient once, in its own type; several add up in the accumulation type.
    dweight = (
        torch.empty(weight.shape, dtype=weight.dtype if tokens <= rows else wide, device=weight.device)
        if needed[1]
        else None
    )
    dbias = torch.zeros(vocab, dtype=wide, device=logits.device) if needed[2] else None
    work = torch.empty(rows * columns, dtype=wide, device=logits.device)
    is_wide = wide == logits.dtype or narrow_product.problem(logits.dtype, logits.device.type) is None
    short = None if is_wide else torch.empty(rows * columns, dtype=logits.dtype, device=logits.device)
    with torch.autocast(logits.device.type, enabled=False):  # what a caller's autocast would cast was cast before
        for top in range(0, tokens, rows):
            r = slice(top, min(tokens, top + rows))
            g = grad[r].to(wide).where(target[r] != ignore_index, 0.0)
            smooth = g.unsqueeze(1) * (label_smoothing / vocab) if label_smoothing else None
            terms = (g.unsqueeze(1), lse[r].unsqueeze(1), g * (label_smoothing - 1.0), smooth)
            for first in range(0, vocab, columns):
                c = slice(first, min(vocab, first + columns))
                shape = (r.stop - r.start, c.stop - c.start)
                d = _tile(
                    work[: shape[0] * shape[1]].view(shape),
                    logits[r, c],
                    target[r] - first,
                    terms,
                    None if extra is None else extra[r, c],
                )
                if dbias is not None:
                    dbias[c].add_(d.sum(0))
                if short is not None:
                    d = short[: d.numel()].view(shape).copy_(d)
                if dweight is not None:
                    add_product(dweight[c], d, hidden[r], 1.0, first=top == 0)
                if dhidden is not None:
                    dhidden[r].add_(times_weight(d, weight[c]))
    return tuple(logits.new_empty(0) if x is None else x.to(logits.dtype) for x in (dhidden, dweight, dbias))


def _tile(
    d: Tensor, logits: Tensor, target: Tensor, terms: tuple[Tensor, Tensor, Tensor, Tensor | None], extra: Tensor | None
) -> Tensor:
    """grad * (softmax - (1 - s) onehot - s / vocab) + extra of one tile, in ``d``; ``target`` counts from its first
    column.
    """
    grad, lse, hit, smooth = terms
    torch.sub(logits, lse, out=d).exp_().mul_(grad)
    inside = (target >= 0) & (target < d.shape[1])
    # One target per row, so that no element is hit twice; a row whose target lies elsewhere adds nothing to its first
    # column.
    d.scatter_add_(1, target.where(inside, 0).unsqueeze(1), hit.where(inside, 0.0).unsqueeze(1))
    if smooth is not None:
        d.sub_(smooth)
    return d if extra is None else d.add_(extra)


# --------------------------------------------------------------------------- sharding and cost


@linear_cross_entropy_backward.shard
def _sharding_rule(grad, logits, target, lse, extra, hidden, weight, ignore_index, label_smoothing, needed):
    """By token: each rank has the part of the weight's and bias' sums that its tokens give. By width: the logits are
    known, so each rank multiplies their gradient with its columns."""

    def results(*placements):
        return [p if need else REPLICATED for p, need in zip(placements, needed)]

    return [
        (results(0, PARTIAL, PARTIAL), [0, 0, 0, 0, 0, 0, REPLICATED]),
        (results(1, 1, REPLICATED), [REPLICATED] * 5 + [1, 1]),
    ]


@linear_cross_entropy_backward.costs
def _cost(out, grad, logits, target, lse, extra, hidden, weight, ignore_index, label_smoothing, needed):
    """Tiles stay in the last cache: logits are read once, the weight once and dweight updated for each block of
    rows.
    """
    (tokens, width), vocab = hidden.shape, weight.shape[0]
    products, item, blocks = int(needed[0]) + int(needed[1]), 8 if hidden.dtype == "float64" else 4, -(-tokens // ROWS)
    flops = 2 * products * tokens * width * vocab
    again = weight.bytes * (blocks - 1)
    read = size(grad, logits, target, lse, extra, hidden, weight) + again * products
    rows = min(tokens, ROWS) if isinstance(tokens, int) else ROWS
    tiles = blocks * (-(-vocab * item * rows // TILE))
    work = Cost(
        flops,
        flops,
        SOFTMAX * tokens * vocab,
        read,
        size(out) + again * int(needed[1]),
        hidden.dtype,
        "float64" if item == 8 else "float32",
        products * tiles,
        once=blocks == 1,
    )
    return as_product(work, rows, width, TILE / (item * max(1, rows)), in_turn=True)
