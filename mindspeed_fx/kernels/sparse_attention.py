"""Attention of every query to the keys that were chosen for it, of which it reads no others.

    scores = scale q_s k_t of the chosen t;    out_s = sum over t of softmax(scores)_t v_t

Heads of queries share heads of keys in groups; in the absorbed form of latent attention there is one, its keys are the
latent and a rotated part, and its values the latent: the first channels of the keys. Keys of a block of queries are
gathered, so that work and memory are those of the chosen keys: queries x chosen, not queries x keys. With p the softmax
and dp_t = v_t dout,

    ds = scale p (dp - sum(p dp)),    dq = sum over t of ds_t k_t,    dk_t += ds q,    dv_t += p dout.

:func:`chosen_weights` adds p up over the heads: what the indexer of DeepSeek-V3.2 learns. Source: DeepSeek-AI 2025,
DeepSeek-V3.2, section 2.1; torch_npu's ``npu_sparse_flash_attention`` and its gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_fx.compat.placements import PARTIAL, REPLICATED, Even
from mindspeed_fx.cost.operators import SOFTMAX, once
from mindspeed_fx.kernels.base import LIBRARY, accumulation_dtype, operator
from mindspeed_fx.kernels.lightning_indexer import blocks, with_rows

SCHEMA = "Tensor q, Tensor k, Tensor? v, Tensor indices, float scale, SymInt v_width"


def _fake(q, k, v, indices, scale, v_width):
    return q.new_empty(*q.shape[:3], v_width), q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))


@operator(f"sparse_attention({SCHEMA}) -> (Tensor, Tensor)", _fake, opaque=True)
def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor | None, indices: Tensor, scale: float, v_width: int
) -> tuple[Tensor, Tensor]:
    """Attention to chosen keys.

    Args:
        q: [batch, queries, heads, width], float.
        k: [batch, keys, kv_heads, width], of which ``heads`` is a multiple.
        v: [batch, keys, kv_heads, v_width]; None: the first channels of k.
        indices: the places of the chosen keys [batch, queries, count], int; below 0: none. A query has at least one.
        scale: of the scores.
        v_width: channels of a value.

    Returns:
        [batch, queries, heads, v_width] in the type of q, and the logarithms of the sums of exponentials [batch,
        queries, heads], in float32 (float64 for float64).

    Raises:
        ValueError: keys or places of other batches or queries, or heads that are no multiple of the keys' heads.
    """
    _check(q, k, indices)
    out, lse = _fake(q, k, v, indices, scale, v_width)
    for number in range(q.shape[0]):
        for rows, qs, ks, vs, hidden, _ in _gathered(q, k, v, indices, v_width, number):
            scores = (qs @ ks.transpose(-1, -2)).mul_(scale).masked_fill_(hidden, float("-inf"))
            sums = scores.logsumexp(-1, keepdim=True)
            out[number, rows] = ((scores - sums).exp_() @ vs).flatten(1, 2).to(out.dtype)
            lse[number, rows] = sums.flatten(1)
    return out, lse


def _check(q: Tensor, k: Tensor, indices: Tensor) -> None:
    if indices.shape[:2] != q.shape[:2] or k.shape[0] != q.shape[0]:
        shapes = ", ".join(str(list(x.shape)) for x in (q, k, indices))
        raise ValueError(f"sparse_attention: q, k and indices are {shapes}; one batch and as many queries are expected")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"sparse_attention: {q.shape[2]} heads of {k.shape[2]} of keys; a multiple is expected")


def _gathered(q, k, v, indices, v_width, number):
    """Blocks of queries: rows, queries [rows, kv_heads, group, width], chosen keys and values [rows, kv_heads, count,
    width], which of them are none [rows, 1, 1, count], and their places [rows * count]."""
    kind = accumulation_dtype(q.dtype)
    count, kv_heads = indices.shape[-1], k.shape[2]
    ks = k[number].flatten(1)
    vs = None if v is None else v[number].flatten(1)
    numbers = count * (q.shape[2] + kv_heads * (k.shape[3] + (0 if v is None else v_width)))
    for rows in blocks(q.shape[1], numbers):
        chosen = indices[number, rows]
        place = chosen.clamp(min=0).flatten()
        keys = _take(ks, place, (len(chosen), count, kv_heads), kind)
        values = keys[..., :v_width] if vs is None else _take(vs, place, (len(chosen), count, kv_heads), kind)
        queries = q[number, rows].to(kind).unflatten(1, (kv_heads, -1))
        yield rows, queries, keys, values, (chosen < 0)[:, None, None], place


def _take(x: Tensor, place: Tensor, sizes: tuple[int, int, int], kind: torch.dtype) -> Tensor:
    """[rows, heads, count, width] of ``sizes`` rows, count and heads."""
    return x.index_select(0, place).to(kind).view(*sizes, x.shape[1] // sizes[2]).transpose(1, 2)


def _fake_backward(grad, q, k, v, indices, out, lse, scale, v_width):
    dv = k.new_empty(0) if v is None else torch.empty_like(v, memory_format=torch.contiguous_format)
    return *(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k)), dv


@operator(
    "sparse_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor? v, Tensor indices, Tensor out, Tensor lse, "
    "float scale, SymInt v_width) -> (Tensor, Tensor, Tensor)",
    _fake_backward,
    opaque=True,
)
def sparse_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    indices: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    v_width: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v (of no elements without v) in :func:`sparse_attention`, from that of its result, both
    results of it, and its arguments.
    """
    _check(q, k, indices)
    kind = lse.dtype
    dq = torch.empty(q.shape, dtype=kind, device=q.device)
    dk = torch.zeros(k.shape, dtype=kind, device=k.device)
    dv = None if v is None else torch.zeros(v.shape, dtype=kind, device=v.device)
    for number in range(q.shape[0]):
        for rows, qs, ks, vs, hidden, place in _gathered(q, k, v, indices, v_width, number):
            group = qs.shape[1:3]
            g, o = (x[number, rows].to(kind).unflatten(1, group) for x in (grad, out))
            sums = lse[number, rows].unflatten(1, group).unsqueeze(-1)
            p = (qs @ ks.transpose(-1, -2)).mul_(scale).masked_fill_(hidden, float("-inf")).sub_(sums).exp_()
            ds = (g @ vs.transpose(-1, -2)).sub_((g * o).sum(-1, keepdim=True)).mul_(p).mul_(scale)
            dq[number, rows] = (ds @ ks).flatten(1, 2)
            keys, values = ds.transpose(-1, -2) @ qs, p.transpose(-1, -2) @ g
            if dv is None:
                keys[..., :v_width] += values
            else:
                _add(dv[number], place, values)
            _add(dk[number], place, keys)
    empty = k.new_empty(0) if dv is None else dv.to(k.dtype)
    return dq.to(q.dtype), dk.to(k.dtype), empty


def _add(x: Tensor, place: Tensor, rows: Tensor) -> None:
    """Adds [rows, kv_heads, count, width] to x [keys, kv_heads, width] at their places."""
    x.index_add_(0, place, rows.transpose(1, 2).reshape(len(place), *x.shape[1:]))


def _fake_weights(q, k, indices, lse, scale):
    return torch.empty(indices.shape, dtype=lse.dtype, device=lse.device)


@operator(
    "chosen_weights(Tensor q, Tensor k, Tensor indices, Tensor lse, float scale) -> Tensor", _fake_weights, opaque=True
)
def chosen_weights(q: Tensor, k: Tensor, indices: Tensor, lse: Tensor, scale: float) -> Tensor:
    """The weights of the chosen keys in :func:`sparse_attention`, added up over the heads: [batch, queries, count] in
    the type of ``lse``, 0 where there is no key. It has no gradient.
    """
    _check(q, k, indices)
    weights = _fake_weights(q, k, indices, lse, scale)
    for number in range(q.shape[0]):
        for rows, qs, ks, _, hidden, _ in _gathered(q, k, None, indices, 0, number):
            sums = lse[number, rows].unflatten(1, qs.shape[1:3]).unsqueeze(-1)
            scores = (qs @ ks.transpose(-1, -2)).mul_(scale).masked_fill_(hidden, float("-inf"))
            weights[number, rows] = scores.sub_(sums).exp_().sum((1, 2))
    return weights


def _setup(ctx, inputs, output):
    q, k, v, indices, ctx.scale, ctx.v_width = inputs
    ctx.save_for_backward(q, k, v, indices, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad, _):
    calls, v = torch.ops.mindspeed, ctx.saved_tensors[2]
    dq, dk, dv = calls.sparse_attention_backward(grad, *ctx.saved_tensors, ctx.scale, ctx.v_width)
    return dq, dk, None if v is None else dv, None, None, None


torch.library.register_autograd("mindspeed::sparse_attention", _backward, setup_context=_setup, lib=LIBRARY)


def _work(out, q, k, indices, products, others=(), values=0):
    """The cost of so many multiply-adds for each head and chosen key; keys and values are read where they are chosen,
    once for a query."""
    batch, length, heads, _ = q.shape
    chosen = batch * length * indices.shape[-1]
    cost = once(
        out, q, indices, *others, flops=2 * heads * chosen * products, vector=SOFTMAX * heads * chosen, dtype=q.dtype
    )
    return with_rows(cost, chosen * k.shape[2] * (k.shape[3] + values) * k.itemsize)


@sparse_attention.costs
def _cost(out, q, k, v, indices, scale, v_width):
    return _work(out, q, k, indices, q.shape[3] + v_width, values=0 if v is None else v_width)


@sparse_attention_backward.costs
def _backward_cost(results, grad, q, k, v, indices, out, lse, scale, v_width):
    products = 3 * q.shape[3] + 2 * v_width
    return _work(results, q, k, indices, products, (grad, out, lse), 0 if v is None else v_width)


@chosen_weights.costs
def _weights_cost(out, q, k, indices, lse, scale):
    return _work(out, q, k, indices, q.shape[3], (lse,))


def _strategies(q, k):
    """Rows of placements: what is of the queries, keys, places, and the gradients of keys.

    By batch, by query, by head: those that share a key together, or all of them beside the one key.
    """
    yield 0, 0, 0, 0
    yield 1, REPLICATED, 1, PARTIAL
    if k.shape[2] == 1:
        yield 2, REPLICATED, REPLICATED, PARTIAL
    else:
        yield 2, 2 if q.shape[2] == k.shape[2] else Even(2), REPLICATED, 2


@sparse_attention.shard
def _sharding_rule(q, k, v, indices, scale, v_width):
    return [([own, own], [own, keys, keys, places]) for own, keys, places, _ in _strategies(q, k)]


@sparse_attention_backward.shard
def _sharding_rule_backward(grad, q, k, v, indices, out, lse, scale, v_width):
    return [
        ([own, more, REPLICATED if v is None else more], [own, own, keys, keys, places, own, own])
        for own, keys, places, more in _strategies(q, k)
    ]


@chosen_weights.shard
def _sharding_rule_weights(q, k, indices, lse, scale):
    rows = [([PARTIAL if own == 2 else own], [own, keys, places, own]) for own, keys, places, _ in _strategies(q, k)]
    return [*rows, ([2], [REPLICATED, REPLICATED, 2, REPLICATED])]
