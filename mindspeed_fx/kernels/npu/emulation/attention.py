"""CPU kernels of the fusion attention of torch_npu, versions 1 and 3, forward and backward.

Scores are ``scale * (q k^T + pse)`` (pse_type 1). A masked score becomes the smallest float32, not minus infinity: a
row that is masked whole averages the values, unless ``inner_precise`` is 2 or the mode is 3 with more queries than
keys; then it is zero. Statistics are float32 [batch, heads, q_seq, 8]: eight copies of each row's largest score and of
its sum.
"""

from __future__ import annotations

import torch

from mindspeed_fx.kernels.npu.emulation.registry import emulation

COMPRESSED = 2048
"""Side of the mask of the compressed modes: True above the diagonal."""

FULL = 2147483647

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


def masked(atten_mask, mode, pre, nxt, sq, skv, device):
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
    mask = masked(atten_mask, mode, pre, nxt, sq, skv, query.device)
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
    mask = masked(atten_mask, mode, pre, nxt, sq, skv, query.device)
    top, total = (s[..., :1] for s in stats)
    invalid = _invalid(mask, mode, inner_precise, sq, skv)
    *grads, dsink = _backward(
        q, k, v, d, o, top, total, pse, mask, scale, invalid, sink, lambda s: _keep(s, keep_prob, seed, offset)
    )
    return *(laid_out(g, layout) for g in grads), dsink


# --------------------------------------------------------------------------- the operators


def _shapes(query, key, value, heads, layout):
    if layout in ("BSH", "SBH"):
        dim = query.shape[2] // heads
        shape = (*query.shape[:2], heads * (value.shape[2] // (key.shape[2] // dim)))
        b, s = query.shape[:2] if layout == "BSH" else query.shape[1::-1]
    else:
        shape = (*query.shape[:-1], value.shape[-1])
        b, s = query.shape[0], query.shape[2 if layout == "BNSD" else 1]
    return shape, (*query.shape[:2], 8) if layout == "TND" else (b, heads, s, 8)


def _fake(query, key, value, head_num, input_layout):
    shape, stats = _shapes(query, key, value, head_num, input_layout)
    return query.new_empty(shape), *(query.new_empty(stats, dtype=torch.float32) for _ in range(2)), query.new_empty(0)


def _fake_v3(query, key, value, head_num, input_layout, *args, **kwargs):
    return *_fake(query, key, value, head_num, input_layout), *(query.new_empty(1, dtype=torch.int64) for _ in range(2))


def _fake_grad(query, key, value, dy, head_num, input_layout, *, sink=None, **kwargs):
    return (
        *(x.new_empty(x.shape) for x in (query, key, value)),
        query.new_empty(0),
        query.new_empty((), dtype=torch.float32) if sink is None else sink.new_empty(sink.shape),
    )


def _drawn(keep_prob):
    return int(torch.randint(2**31, ())) if keep_prob != 1.0 else 0


NAMES = (
    "pse",
    "padding_mask",
    "atten_mask",
    "scale",
    "keep_prob",
    "pre_tockens",
    "next_tockens",
    "inner_precise",
    "prefix",
    "actual_seq_qlen",
    "actual_seq_kvlen",
    "sparse_mode",
    "gen_mask_parallel",
    "sync",
    "softmax_layout",
    "sink",
)


def _setup(version):
    def setup(ctx, inputs, output):
        query, key, value, ctx.heads, ctx.layout = inputs[:5]
        ctx.given = dict(zip(NAMES, inputs[5 : 5 + len(NAMES)]))
        tensors = {n: x for n, x in ctx.given.items() if isinstance(x, torch.Tensor)}
        ctx.names = list(tensors)
        ctx.draw = None if version == 3 else output[4:7]
        ctx.save_for_backward(query, key, value, *output[:3], *(output[4:6] if version == 3 else ()), *tensors.values())

    return setup


def _gradient(version):
    def backward(ctx, grad, *_):
        query, key, value, out, top, total, *rest = ctx.saved_tensors
        draw, rest = (rest[:2], rest[2:]) if version == 3 else (ctx.draw, rest)
        given = {**ctx.given, **dict(zip(ctx.names, rest))}
        given["scale_value"] = given.pop("scale")
        op = torch.ops.npu.npu_fusion_attention_grad_v3 if version == 3 else torch.ops.npu.npu_fusion_attention_grad
        extra = {} if version == 3 else {"numels": draw[2]}
        dq, dk, dv, _, dsink = op(
            query,
            key,
            value,
            grad,
            ctx.heads,
            ctx.layout,
            softmax_max=top,
            softmax_sum=total,
            attention_in=out,
            seed=draw[0],
            offset=draw[1],
            **extra,
            **given,
        )
        grads = [None] * (21 if version == 3 else 24)
        grads[:3] = dq, dk, dv
        grads[20] = None if given["sink"] is None else dsink
        return tuple(grads)

    return backward


@emulation("npu_fusion_attention_v3", _fake_v3, _setup(3), _gradient(3))
def npu_fusion_attention_v3(
    query,
    key,
    value,
    head_num,
    input_layout,
    pse=None,
    padding_mask=None,
    atten_mask=None,
    scale=1.0,
    keep_prob=1.0,
    pre_tockens=FULL,
    next_tockens=FULL,
    inner_precise=0,
    prefix=None,
    actual_seq_qlen=None,
    actual_seq_kvlen=None,
    sparse_mode=0,
    gen_mask_parallel=True,
    sync=False,
    softmax_layout="",
    sink=None,
):
    """(out, softmax_max, softmax_sum, reserved, seed [1], offset [1])."""
    seed = _drawn(keep_prob)
    out, top, total = attention(
        query,
        key,
        value,
        head_num,
        input_layout,
        pse,
        atten_mask,
        scale,
        keep_prob,
        pre_tockens,
        next_tockens,
        inner_precise,
        actual_seq_qlen,
        actual_seq_kvlen,
        sparse_mode,
        softmax_layout,
        sink,
        seed,
        0,
    )
    return out, top, total, query.new_empty(0), torch.tensor([seed]), torch.tensor([0])


@emulation("npu_fusion_attention_grad_v3", _fake_grad)
def npu_fusion_attention_grad_v3(
    query,
    key,
    value,
    dy,
    head_num,
    input_layout,
    *,
    pse=None,
    padding_mask=None,
    atten_mask=None,
    softmax_max=None,
    softmax_sum=None,
    softmax_in=None,
    attention_in=None,
    scale_value=1.0,
    keep_prob=1.0,
    pre_tockens=FULL,
    next_tockens=FULL,
    inner_precise=0,
    seed=None,
    offset=None,
    prefix=None,
    actual_seq_qlen=None,
    actual_seq_kvlen=None,
    sparse_mode=0,
    gen_mask_parallel=True,
    sync=False,
    softmax_layout="",
    sink=None,
):
    """(dq, dk, dv, dpse of size 0, dsink)."""
    seed, offset = (0 if x is None else int(x) for x in (seed, offset))
    *grads, dsink = attention_grad(
        query,
        key,
        value,
        dy,
        attention_in,
        (softmax_max, softmax_sum),
        head_num,
        input_layout,
        pse,
        atten_mask,
        scale_value,
        keep_prob,
        pre_tockens,
        next_tockens,
        inner_precise,
        actual_seq_qlen,
        actual_seq_kvlen,
        sparse_mode,
        softmax_layout,
        sink,
        seed,
        offset,
    )
    return *grads, query.new_empty(0), query.new_empty((), dtype=torch.float32) if dsink is None else dsink


@emulation("npu_fusion_attention", lambda *args, **kwargs: (*_fake(*args[:5]), 0, 0, 0), _setup(1), _gradient(1))
def npu_fusion_attention(
    query,
    key,
    value,
    head_num,
    input_layout,
    pse=None,
    padding_mask=None,
    atten_mask=None,
    scale=1.0,
    keep_prob=1.0,
    pre_tockens=FULL,
    next_tockens=FULL,
    inner_precise=0,
    prefix=None,
    actual_seq_qlen=None,
    actual_seq_kvlen=None,
    sparse_mode=0,
    gen_mask_parallel=True,
    sync=False,
    softmax_layout="",
    sink=None,
    dropout_mask=None,
    seed=0,
    offset=0,
):
    """(out, softmax_max, softmax_sum, reserved, seed, offset, numels), the last three integers."""
    seed = _drawn(keep_prob)
    out, top, total = attention(
        query,
        key,
        value,
        head_num,
        input_layout,
        pse,
        atten_mask,
        scale,
        keep_prob,
        pre_tockens,
        next_tockens,
        inner_precise,
        actual_seq_qlen,
        actual_seq_kvlen,
        sparse_mode,
        softmax_layout,
        sink,
        seed,
        0,
    )
    return out, top, total, query.new_empty(0), seed, 0, 0


@emulation("npu_fusion_attention_grad", _fake_grad)
def npu_fusion_attention_grad(query, key, value, dy, head_num, input_layout, *, seed=0, offset=0, numels=0, **given):
    """(dq, dk, dv, dpse of size 0, dsink)."""
    return npu_fusion_attention_grad_v3(
        query, key, value, dy, head_num, input_layout, seed=seed, offset=offset, **given
    )
