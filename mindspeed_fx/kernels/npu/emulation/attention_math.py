"""The fusion attention of torch_npu in PyTorch, forward and backward, of every version: layouts, masks, sequences.

Scores are ``scale * (q k^T + pse)`` (pse_type 1). A masked score becomes the smallest float32, not minus infinity: a
row that is masked whole averages the values, unless ``inner_precise`` is 2 or the mode is 3 with more queries than
keys; then it is zero. Statistics are float32 [batch, heads, q_seq, 8]: eight copies of each row's largest score and of
its sum.
"""

from __future__ import annotations

import torch

COMPRESSED = 2048
"""Side of the mask of the compressed modes: True above the diagonal."""


# --------------------------------------------------------------------------- layouts


def bnsd(x, layout, heads):
    """``x`` as [batch, heads, seq, dim]."""
    if layout == "BNSD":
        return x
    if layout == "BSND":
        return x.transpose(1, 2)
    if layout == "BSH":
        return x.unflatten(2, (heads, -1)).transpose(1, 2)
    if layout == "SBH":
        return x.unflatten(2, (heads, -1)).permute(1, 2, 0, 3)
    raise ValueError(f"input_layout is {layout!r}; valid: BSH, SBH, BSND, BNSD, TND")


def laid_out(x, layout):
    """[batch, heads, seq, dim] in ``layout``, contiguous."""
    if layout == "BNSD":
        return x.contiguous()
    if layout == "SBH":
        return x.permute(2, 0, 1, 3).flatten(2).contiguous()
    x = x.transpose(1, 2)
    return (x.flatten(2) if layout == "BSH" else x).contiguous()


def kv_heads(q, k, layout, heads):
    """Heads of the keys, which layouts with a flat last dimension do not show: keys and queries have one head_dim."""
    return {"BNSD": lambda: k.shape[1], "BSND": lambda: k.shape[2], "TND": lambda: k.shape[1]}.get(
        layout, lambda: k.shape[2] // (q.shape[2] // heads)
    )()


# --------------------------------------------------------------------------- masks


def masked_scores(atten_mask, mode, pre, nxt, sq, skv, device):
    """Boolean [..., sq, skv], True where a score is masked; None without a mask, whatever the mode."""
    if atten_mask is None:
        return None
    ahead = (
        torch.arange(skv, device=device) - torch.arange(sq, device=device)[:, None]
    )  # how far the key is ahead of the query
    if mode in (0, 1):
        mask = atten_mask.bool()
        assert mask.shape[-2:] == (sq, skv) and mask.dim() in (2, 4), (
            f"atten_mask is {tuple(mask.shape)}, scores are {sq} x {skv}"
        )
        return mask if mode == 1 else mask | (ahead > nxt) | (ahead < -pre)
    if mode not in (2, 3, 4):
        raise NotImplementedError(
            f"npu fusion attention on CPU: sparse_mode {mode} (prefixes and split varlen) is not emulated, only 0 to "
            "4, which our lowerings call; "
            "run this call on an NPU, or write its mask out and give it as atten_mask with sparse_mode 1"
        )
    strict = torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool, device=device).triu(1)
    assert atten_mask.shape == strict.shape and torch.equal(atten_mask.bool(), strict), (
        f"sparse_mode {mode} takes the {COMPRESSED} x {COMPRESSED} strict upper triangle"
    )
    if mode == 2:
        return ahead > 0
    ahead = ahead - (skv - sq)  # from the bottom right corner
    return ahead > 0 if mode == 3 else (ahead > nxt) | (ahead < -pre)


def _scores(q, k, pse, mask, scale):
    groups = q.shape[1] // k.shape[1]
    scores = q.float() @ k.float().repeat_interleave(groups, 1).transpose(-1, -2)
    if pse is not None:
        scores = scores + pse.float()
    scores = scores * scale
    return scores if mask is None else scores.masked_fill(mask, torch.finfo(torch.float32).min)


def _keep(scores, keep_prob, seed, offset):
    """What dropout multiplies the weights with; drawn from seed and offset alone, so that the backward draws the
    same.
    """
    if keep_prob == 1.0:
        return None
    generator = torch.Generator().manual_seed(int(seed) * 2654435761 % 2**31 + int(offset))
    return (torch.rand(scores.shape, generator=generator) < keep_prob).float() / keep_prob


# --------------------------------------------------------------------------- one sequence length


def _invalid(mask, mode, inner_precise, sq, skv):
    """Rows that are masked whole and known to be: their result is zero."""
    return mask.all(-1, keepdim=True) if mask is not None and (inner_precise == 2 or (mode == 3 and sq > skv)) else None


def _forward(q, k, v, pse, mask, scale, invalid, sink, dropout):
    scores = _scores(q, k, pse, mask, scale)
    top = scores.amax(-1, keepdim=True)
    if sink is not None:
        top = top.maximum(sink.float()[:, None, None])
    weights = (scores - top).exp()
    if invalid is not None:
        weights = weights.masked_fill(invalid, 0.0)
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + (sink.float()[:, None, None] - top).exp()
    p = (weights / total).nan_to_num(0.0) if invalid is not None else weights / total
    keep = dropout(scores)
    out = (p if keep is None else p * keep) @ v.float().repeat_interleave(q.shape[1] // v.shape[1], 1)
    return out.to(q.dtype), top, total


def _backward(q, k, v, dy, out, top, total, pse, mask, scale, invalid, sink, dropout):
    groups = q.shape[1] // k.shape[1]
    p = (_scores(q, k, pse, mask, scale) - top).exp() / total
    if invalid is not None:
        p = p.masked_fill(invalid, 0.0)
    g, keep = dy.float(), dropout(p)
    delta = (g * out.float()).sum(-1, keepdim=True)
    dp = g @ v.float().repeat_interleave(groups, 1).transpose(-1, -2)
    ds = p * ((dp if keep is None else dp * keep) - delta)
    dq = ds @ k.float().repeat_interleave(groups, 1) * scale

    def shared(x):
        return x.unflatten(1, (k.shape[1], groups)).sum(2)

    dk = shared(ds.transpose(-1, -2) @ q.float() * scale)
    dv = shared((p if keep is None else p * keep).transpose(-1, -2) @ g)
    dsink = (
        None
        if sink is None
        else -((sink.float()[:, None, None] - top).exp() / total * delta).sum((0, 2, 3)).to(sink.dtype)
    )
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsink


# --------------------------------------------------------------------------- several: TND


def _segments(q_lengths, kv_lengths):
    """(start, end) of queries and keys of each sequence, from cumulative lengths; sequences after a final 0 take no
    part.
    """
    ends = [[int(n) for n in lengths] for lengths in (q_lengths, kv_lengths)]
    starts = [[0, *e[:-1]] for e in ends]
    return [rows for rows in zip(*starts, *ends) if rows[2] > rows[0]]


def _from_ntd(stat, layout):
    """Statistics [tokens, heads, 8] whose memory is ordered [heads, tokens, 8] unless ``softmax_layout`` is "TND"."""
    t, n, copies = stat.shape
    return stat if layout == "TND" else stat.reshape(n, t, copies).transpose(0, 1)


def _to_ntd(stat, layout):
    return stat.contiguous() if layout == "TND" else stat.transpose(0, 1).contiguous().view(stat.shape)


def attention(
    query,
    key,
    value,
    heads,
    layout,
    pse,
    atten_mask,
    scale,
    keep_prob,
    pre,
    nxt,
    inner_precise,
    q_lengths,
    kv_lengths,
    mode,
    softmax_layout,
    sink,
    seed,
    offset,
):
    """(out, softmax_max, softmax_sum) of every version."""
    if layout == "TND":
        out = query.new_full((*query.shape[:2], value.shape[2]), float("nan"))
        stats = [query.new_full((*query.shape[:2], 8), float("nan"), dtype=torch.float32) for _ in range(2)]
        for i, (q0, k0, q1, k1) in enumerate(_segments(q_lengths, kv_lengths)):
            parts = (x[a:b].transpose(0, 1)[None] for x, a, b in ((query, q0, q1), (key, k0, k1), (value, k0, k1)))
            own = atten_mask[: q1 - q0, : k1 - k0] if atten_mask is not None and mode in (0, 1) else atten_mask
            o, *rows = attention(
                *parts,
                heads,
                "BNSD",
                pse,
                own,
                scale,
                keep_prob,
                pre,
                nxt,
                inner_precise,
                None,
                None,
                mode,
                "",
                sink,
                seed,
                offset + i,
            )
            out[q0:q1] = o[0].transpose(0, 1)
            for stat, row in zip(stats, rows):
                stat[q0:q1] = row[0].transpose(0, 1)
        return out, *(_to_ntd(s, softmax_layout) for s in stats)
    q, k, v = bnsd(query, layout, heads), *(bnsd(x, layout, kv_heads(query, key, layout, heads)) for x in (key, value))
    sq, skv = q.shape[2], k.shape[2]
    mask = masked_scores(atten_mask, mode, pre, nxt, sq, skv, query.device)
    out, top, total = _forward(
        q,
        k,
        v,
        pse,
        mask,
        scale,
        _invalid(mask, mode, inner_precise, sq, skv),
        sink,
        lambda s: _keep(s, keep_prob, seed, offset),
    )
    return laid_out(out, layout), *(s.expand(*s.shape[:3], 8).contiguous() for s in (top, total))


def attention_grad(
    query,
    key,
    value,
    dy,
    out,
    stats,
    heads,
    layout,
    pse,
    atten_mask,
    scale,
    keep_prob,
    pre,
    nxt,
    inner_precise,
    q_lengths,
    kv_lengths,
    mode,
    softmax_layout,
    sink,
    seed,
    offset,
):
    """(dq, dk, dv, dsink or None) of every version."""
    if layout == "TND":
        grads, dsink = (
            [torch.zeros_like(x) for x in (query, key, value)],
            None if sink is None else torch.zeros_like(sink),
        )
        stats = [_from_ntd(s, softmax_layout) for s in stats]
        for i, (q0, k0, q1, k1) in enumerate(_segments(q_lengths, kv_lengths)):
            q, d, o, *rows = (x[q0:q1].transpose(0, 1)[None] for x in (query, dy, out, *stats))
            k, v = (x[k0:k1].transpose(0, 1)[None] for x in (key, value))
            own = atten_mask[: q1 - q0, : k1 - k0] if atten_mask is not None and mode in (0, 1) else atten_mask
            *parts, ds = attention_grad(
                q,
                k,
                v,
                d,
                o,
                rows,
                heads,
                "BNSD",
                pse,
                own,
                scale,
                keep_prob,
                pre,
                nxt,
                inner_precise,
                None,
                None,
                mode,
                "",
                sink,
                seed,
                offset + i,
            )
            for grad, part, a, b in zip(grads, parts, (q0, k0, k0), (q1, k1, k1)):
                grad[a:b] = part[0].transpose(0, 1)
            if sink is not None:
                dsink += ds
        return *grads, dsink
    q, d, o = (bnsd(x, layout, heads) for x in (query, dy, out))
    k, v = (bnsd(x, layout, kv_heads(query, key, layout, heads)) for x in (key, value))
    sq, skv = q.shape[2], k.shape[2]
    mask = masked_scores(atten_mask, mode, pre, nxt, sq, skv, query.device)
    top, total = (s[..., :1] for s in stats)
    invalid = _invalid(mask, mode, inner_precise, sq, skv)
    *grads, dsink = _backward(
        q, k, v, d, o, top, total, pse, mask, scale, invalid, sink, lambda s: _keep(s, keep_prob, seed, offset)
    )
    return *(laid_out(g, layout) for g in grads), dsink
