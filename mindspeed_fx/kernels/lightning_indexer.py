"""The indexer of DeepSeek's sparse attention: the earlier tokens with the largest scores, and these scores.

    score_st = sum over heads h of w_sh relu(q_sh k_t),    t <= s + T - S of S queries and T keys

The k largest of a row are chosen. Forward and backward go over blocks of queries: no tensor of queries times keys is
made, keys behind a block are not read, and the backward reads the chosen keys alone. With p_h = relu(q_h k_t) and g the
gradient of a score,

    dw_h += g p_h,    dq_h += g w_h [p_h > 0] k_t,    dk_t += g w_h [p_h > 0] q_h.

Source: DeepSeek-AI 2025, DeepSeek-V3.2, section 2.1; torch_npu's ``npu_lightning_indexer`` and its gradient.
"""

from __future__ import annotations

import dataclasses
from typing import Iterator

import torch
from torch import Tensor

from mindspeed_fx.compat.placements import PARTIAL, REPLICATED
from mindspeed_fx.cost.operators import Cost, once, visible_scores
from mindspeed_fx.kernels.base import LIBRARY, accumulation_dtype, operator

BLOCK = 1 << 20
"""Numbers of the products of a block; 4 MiB in float32, of the order of a core's cache."""


def _fake(q, k, weights, count):
    shape = (*q.shape[:2], count)
    return q.new_empty(shape, dtype=accumulation_dtype(q.dtype)), q.new_empty(shape, dtype=torch.int32)


def blocks(queries: int, numbers: int) -> Iterator[slice]:
    """Slices of the queries, of each of which there are so many numbers."""
    rows = max(1, BLOCK // max(1, numbers))
    return (slice(first, min(first + rows, queries)) for first in range(0, queries, rows))


@operator("lightning_indexer(Tensor q, Tensor k, Tensor weights, SymInt count) -> (Tensor, Tensor)", _fake, opaque=True)
def lightning_indexer(q: Tensor, k: Tensor, weights: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The best earlier tokens of every query.

    Args:
        q: [batch, queries, heads, width], float.
        k: [batch, keys, width]; the last query sees all of them.
        weights: [batch, queries, heads].
        count: tokens to choose, k.

    Returns:
        Their scores [batch, queries, count], in float32 (float64 for float64), minus infinity where a query sees fewer;
        and their places, int32, -1 there.

    Raises:
        ValueError: more queries than keys.
    """
    length, keys = q.shape[1], k.shape[1]
    if length > keys:
        raise ValueError(f"lightning_indexer: {length} queries of {keys} keys; at most as many queries are expected")
    scores, indices = (x.fill_(v) for x, v in zip(_fake(q, k, weights, count), (float("-inf"), -1)))
    for number, (qs, ks, ws) in enumerate(zip(q, k, weights)):
        qs, ks, ws = (x.to(scores.dtype) for x in (qs, ks, ws))
        for rows in blocks(length, q.shape[2] * keys):
            end = rows.stop + keys - length
            products = (qs[rows].flatten(0, 1) @ ks[:end].T).relu_().view(rows.stop - rows.start, q.shape[2], end)
            block = torch.bmm(ws[rows].unsqueeze(1), products).squeeze(1)
            late = (
                torch.arange(end, device=q.device) > torch.arange(end - block.shape[0], end, device=q.device)[:, None]
            )
            best, place = block.masked_fill_(late, float("-inf")).topk(min(count, end), -1)
            scores[number, rows, : best.shape[1]] = best
            indices[number, rows, : best.shape[1]] = place.masked_fill_(best == float("-inf"), -1).to(torch.int32)
    return scores, indices


def _fake_backward(grad, q, k, weights, indices):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, weights))


@operator(
    "lightning_indexer_backward(Tensor grad, Tensor q, Tensor k, Tensor weights, Tensor indices) -> (Tensor, Tensor, "
    "Tensor)",
    _fake_backward,
    opaque=True,
)
def lightning_indexer_backward(
    grad: Tensor, q: Tensor, k: Tensor, weights: Tensor, indices: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and weights in :func:`lightning_indexer`, from that of the scores [batch, queries, count]."""
    kind = accumulation_dtype(q.dtype)
    dq, dw = torch.empty(q.shape, dtype=kind, device=q.device), torch.empty(weights.shape, dtype=kind, device=q.device)
    dk = torch.zeros(k.shape, dtype=kind, device=k.device)
    count, (_, length, heads, width) = indices.shape[-1], q.shape
    for number in range(q.shape[0]):
        qs, ks, ws, gs = (x[number].to(kind) for x in (q, k, weights, grad))
        for rows in blocks(length, count * (heads + width)):
            place = indices[number, rows].clamp(min=0).flatten()
            chosen = ks.index_select(0, place).view(rows.stop - rows.start, count, width)
            products = torch.bmm(qs[rows], chosen.transpose(1, 2)).relu_()  # [rows, heads, count]
            g = gs[rows].masked_fill(indices[number, rows] < 0, 0)
            dw[number, rows] = torch.bmm(products, g.unsqueeze(2)).squeeze(2)
            inner = (products > 0) * g.unsqueeze(1) * ws[rows].unsqueeze(2)
            dq[number, rows] = torch.bmm(inner, chosen)
            dk[number].index_add_(0, place, torch.bmm(inner.transpose(1, 2), qs[rows]).flatten(0, 1))
    return dq.to(q.dtype), dk.to(k.dtype), dw.to(weights.dtype)


def _setup(ctx, inputs, output):
    q, k, weights, _ = inputs
    ctx.save_for_backward(q, k, weights, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, _):
    if grad is None:
        return None, None, None, None
    return *torch.ops.mindspeed.lightning_indexer_backward(grad, *ctx.saved_tensors), None


torch.library.register_autograd("mindspeed::lightning_indexer", _backward, setup_context=_setup, lib=LIBRARY)


@lightning_indexer.costs
def _cost(out, q, k, weights, count):
    batch, length, heads, width = q.shape
    seen = batch * heads * visible_scores(length, k.shape[1], True)
    flops = 2 * batch * heads * length * k.shape[1] * (width + 1)
    return once(out, q, k, weights, flops=flops, matrix=2 * (width + 1) * seen, vector=3 * seen, dtype=q.dtype)


@lightning_indexer_backward.costs
def _backward_cost(out, grad, q, k, weights, indices):
    batch, length, heads, width = q.shape
    chosen = batch * length * indices.shape[-1]
    work = 2 * chosen * heads * (3 * width + 1)
    cost = once(out, grad, q, weights, indices, flops=work, vector=4 * chosen * heads, dtype=q.dtype)
    return with_rows(cost, chosen * width * k.itemsize)


def with_rows(cost: Cost, gathered) -> Cost:
    """``cost``, which reads so many bytes of chosen rows too, some of them several times."""
    return dataclasses.replace(cost, read=cost.read + gathered, once=False)


@lightning_indexer.shard
def _sharding_rule(q, k, weights, count):
    return [([0, 0], [0, 0, 0])]


@lightning_indexer_backward.shard
def _sharding_rule_backward(grad, q, k, weights, indices):
    one = REPLICATED
    return [
        ([0, 0, 0], [0, 0, 0, 0, 0]),
        ([1, PARTIAL, 1], [1, 1, one, 1, 1]),
        ([2, PARTIAL, 2], [one, 2, one, 2, one]),
        ([PARTIAL, PARTIAL, PARTIAL], [2, one, one, one, 2]),
    ]
