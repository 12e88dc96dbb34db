"""CPU kernels of torch_npu's indexer and its attention to chosen keys: dense, by formula."""

from __future__ import annotations

import torch

from mindspeed_fx.kernels.npu.emulation.registry import emulation


def _scores(query, key, weights):
    """[batch, queries, keys], and relu of the products [batch, queries, heads, keys]; minus infinity for later keys."""
    assert key.shape[2] == 1 and query.shape[2:] == (64, 128), "N2 is 1, N1 64, D 128"
    products = torch.einsum("bshd,btd->bsht", query.float(), key.squeeze(2).float()).relu()
    length, keys = query.shape[1], key.shape[1]
    late = torch.ones(length, keys, dtype=torch.bool).triu(1 + keys - length)
    return torch.einsum("bsh,bsht->bst", weights.float(), products).masked_fill(late, float("-inf")), products


def _fake_indexer(query, key, weights, *, sparse_count=2048, return_value=False, **others):
    shape = (*query.shape[:2], 1, sparse_count)
    return query.new_empty(shape, dtype=torch.int32), query.new_empty(shape if return_value else 0)


@emulation("npu_lightning_indexer", _fake_indexer)
def npu_lightning_indexer(query, key, weights, *, sparse_count=2048, sparse_mode=3, return_value=False, **others):
    """(places int32 [B, S1, 1, count], -1 where there is none; scores or empty, undefined there)."""
    assert sparse_mode == 3 and query.dtype == key.dtype == weights.dtype and not query.dtype == torch.float32
    indices, values = _fake_indexer(query, key, weights, sparse_count=sparse_count, return_value=return_value)
    scores, _ = _scores(query, key, weights)
    best, place = scores.topk(min(sparse_count, scores.shape[-1]), -1)
    indices.fill_(-1)[..., 0, : best.shape[-1]] = place.masked_fill(best == float("-inf"), -1).to(torch.int32)
    if return_value:
        values.fill_(float("nan"))[..., 0, : best.shape[-1]] = best.masked_fill(best == float("-inf"), float("nan"))
    return indices, values


def _fake_indexer_grad(query, key, dy, sparse_indices, weights, *others, **more):
    return tuple(torch.empty_like(x) for x in (query, key, weights))


@emulation("npu_lightning_indexer_grad", _fake_indexer_grad)
def npu_lightning_indexer_grad(
    query,
    key,
    dy,
    sparse_indices,
    weights,
    actual_seq_lengths_query=None,
    actual_seq_lengths_key=None,
    layout="BSND",
    sparse_mode=3,
    pre_tokens=None,
    next_tokens=None,
):
    """Gradients of query, key and weights; dy is of the chosen scores."""
    assert layout == "BSND" and sparse_mode == 3 and dy.shape == sparse_indices.shape and dy.dtype == query.dtype
    chosen = sparse_indices.squeeze(2)
    g = torch.zeros(*query.shape[:2], key.shape[1] + 1)
    g.scatter_(-1, torch.where(chosen < 0, key.shape[1], chosen).long(), dy.squeeze(2).float())
    g, (_, products) = g[..., :-1], _scores(query, key, weights)
    inner = g.unsqueeze(2) * weights.float().unsqueeze(-1) * (products > 0)
    dq = torch.einsum("bsht,btd->bshd", inner, key.squeeze(2).float())
    dk = torch.einsum("bsht,bshd->btd", inner, query.float()).unsqueeze(2)
    dw = torch.einsum("bst,bsht->bsh", g, products)
    return tuple(d.to(x.dtype) for d, x in ((dq, query), (dk, key), (dw, weights)))


def _weights(query, key, sparse_indices, scale, query_rope, key_rope):
    """Scores [batch, heads, queries, keys] and which keys are chosen."""
    assert query.shape[-1] == key.shape[-1] == 512 and query_rope.shape[-1] == key_rope.shape[-1] == 64
    assert key.shape[2] == 1 and query.dtype in (torch.float16, torch.bfloat16) and sparse_indices.dtype == torch.int32
    q, k = torch.cat([query, query_rope], -1).float(), torch.cat([key, key_rope], -1).float().squeeze(2)
    chosen = sparse_indices.squeeze(2)
    seen = torch.zeros(*query.shape[:2], k.shape[1] + 1, dtype=torch.bool)
    seen.scatter_(-1, torch.where(chosen < 0, k.shape[1], chosen).long(), True)
    scores = torch.einsum("bshd,btd->bhst", q, k) * scale
    return scores.masked_fill(~seen[:, None, :, :-1], float("-inf")), q, k


def _fake_attention(query, key, value, sparse_indices, scale_value, *, return_softmax_lse=False, **others):
    statistics = (query.shape[0], key.shape[2], query.shape[1], query.shape[2]) if return_softmax_lse else 0
    return torch.empty_like(query), *(query.new_empty(statistics, dtype=torch.float32) for _ in range(2))


@emulation("npu_sparse_flash_attention", _fake_attention)
def npu_sparse_flash_attention(
    query,
    key,
    value,
    sparse_indices,
    scale_value,
    *,
    query_rope=None,
    key_rope=None,
    sparse_block_size=1,
    sparse_mode=3,
    attention_mode=0,
    return_softmax_lse=False,
    **others,
):
    """(out, largest score and sum of exponentials [B, 1, S1, N1] or empty)."""
    assert attention_mode == 2 and sparse_block_size == 1 and sparse_mode == 3, "attention_mode 2 alone"
    scores, _, _ = _weights(query, key, sparse_indices, scale_value, query_rope, key_rope)
    top = scores.amax(-1, keepdim=True)
    p = (scores - top).exp()
    total = p.sum(-1, keepdim=True)
    out = torch.einsum("bhst,btd->bshd", p / total, value.squeeze(2).float()).to(query.dtype)
    if not return_softmax_lse:
        return out, *(out.new_empty(0, dtype=torch.float32) for _ in range(2))
    return out, *(x.squeeze(-1).transpose(1, 2).unsqueeze(1).contiguous() for x in (top, total))


def _fake_attention_grad(
    query, key, value, indices, d_out, out, top, total, scale, block, query_rope=None, key_rope=None, *others, **more
):
    return tuple(torch.empty_like(x) for x in (query, key, value, query_rope, key_rope))


@emulation("npu_sparse_flash_attention_grad", _fake_attention_grad)
def npu_sparse_flash_attention_grad(
    query,
    key,
    value,
    sparse_indices,
    d_out,
    out,
    softmax_max,
    softmax_sum,
    scale_value,
    sparse_block_size,
    query_rope=None,
    key_rope=None,
    actual_seq_qlen=None,
    actual_seq_kvlen=None,
    layout="BSND",
    sparse_mode=3,
    pre_tokens=None,
    next_tokens=None,
    attention_mode=0,
):
    """Gradients of query, key, value, query_rope and key_rope: keys and values each have their own part."""
    assert attention_mode == 2 and sparse_block_size == 1 and layout == "BSND" and sparse_mode == 3
    scores, q, k = _weights(query, key, sparse_indices, scale_value, query_rope, key_rope)
    top, total = (x.squeeze(1).transpose(1, 2).unsqueeze(-1) for x in (softmax_max, softmax_sum))
    p, g, v = (scores - top).exp() / total, d_out.float(), value.squeeze(2).float()
    own = (g * out.float()).sum(-1).transpose(1, 2).unsqueeze(-1)
    ds = p * (torch.einsum("bshd,btd->bhst", g, v) - own) * scale_value
    dq, dk = torch.einsum("bhst,btd->bshd", ds, k), torch.einsum("bhst,bshd->btd", ds, q).unsqueeze(2)
    dv = torch.einsum("bhst,bshd->btd", p, g).unsqueeze(2)
    width = query.shape[-1]
    parts = dq[..., :width], dk[..., :width], dv, dq[..., width:], dk[..., width:]
    return tuple(x.to(query.dtype).contiguous() for x in parts)
