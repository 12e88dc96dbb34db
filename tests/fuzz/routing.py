"""Mixtures of experts in the spellings that passes of their own read: rows gathered by expert, GShard's one-hot
products, runs of rows, routers; and documents packed into one sequence.
"""

from __future__ import annotations

from .writer import FFN, HEAD_DIM, HEADS, HIDDEN, Writer

EXPERTS = 4


def chosen(w: Writer, flat: str, top: int) -> tuple[str, str]:
    """Weights and numbers [tokens, top] of the experts of each token, by one of the routers."""
    logits = w.linear(flat, EXPERTS, bias=False)
    kind = w.random.choice(["softmax", "sigmoid", "biased", "last"])
    if kind == "last":
        picked = w.emit("{}.topk({}, -1)", logits, top)
        return w.emit("{}[0].softmax(-1)", picked), w.emit("{}[1]", picked)
    scores = w.emit("{}.softmax(-1)" if kind == "softmax" else "{}.sigmoid()", logits)
    if kind == "biased":
        index = w.emit("({} + {}.detach()).topk({}, -1)[1]", scores, w.gain(EXPERTS), top)
        weights = w.emit("{}.gather(1, {})", scores, index)
    else:
        picked = w.emit("{}.topk({}, -1)", scores, top)
        weights, index = w.emit("{}[0]", picked), w.emit("{}[1]", picked)
    if w.random.random() < 0.5:
        weights = w.emit("{0} / ({0}.sum(-1, keepdim=True) + 1e-20)", weights)
    return (w.emit("{} * 2.5", weights) if w.random.random() < 0.3 else weights), index


def gathered(w: Writer, x: str) -> str:
    """Each row times a copy of its expert's matrix."""
    top = w.random.choice([1, 2])
    flat = w.emit("{}.reshape(-1, {})", x, HIDDEN)
    weights, index = chosen(w, flat, top)
    ids = w.emit("{}.reshape(-1)", index)
    rows = w.emit("{}.repeat_interleave({}, 0)", flat, top) if top > 1 else flat
    up, down = w.weight(EXPERTS, HIDDEN, FFN), w.weight(EXPERTS, FFN, HIDDEN)
    product = w.random.choice(
        ["torch.bmm({}.unsqueeze(1), {}[{}]).squeeze(1)", "({}[:, None] @ {}.index_select(0, {}))[:, 0]"]
    )
    h = w.emit("F.silu({})", w.emit(product, rows, up, ids))
    out = w.emit(product, h, down, ids)
    return w.emit("({}.unflatten(0, (-1, {})) * {}.unsqueeze(-1)).sum(1).view({}.shape)", out, top, weights, x)


def one_hot(w: Writer, x: str) -> str:
    """GShard: masks [tokens, experts, capacity] put tokens into places of experts and take them back."""
    capacity = 6
    flat = w.emit("{}.reshape(-1, {})", x, HIDDEN)
    gates = w.emit("{}.softmax(-1)", w.linear(flat, EXPERTS, bias=False))
    if w.random.random() < 0.5:
        mask = w.emit("F.one_hot({}.argmax(1), {})", gates, EXPERTS)
        order = w.emit("torch.cumsum({}, 0) - 1", mask)
        kept = w.emit("{} * ({} < {})", mask, order, capacity)
        gate = w.emit("({} * {}).sum(1)", gates, kept)
        place = w.emit("F.one_hot(({} * {}).sum(1), {}).to({}.dtype)", order, kept, capacity, x)
        combine = w.emit("{}[:, None, None] * {}.to({}.dtype).unsqueeze(-1) * {}.unsqueeze(1)", gate, kept, x, place)
    else:
        picked = w.emit("{}.topk(2, -1)", gates)
        hot = w.emit("({}[1][..., None] == torch.arange({})).to({}.dtype)", picked, EXPERTS, x)
        order = w.emit("({0}.flatten(0, 1).cumsum(0).view_as({0}) * {0}).sum(-1).long() - 1", hot)
        place = w.emit("({}.unsqueeze(-1) == torch.arange({})).to({}.dtype)", order, capacity, x)
        combine = w.emit('torch.einsum("sk,ske,skc->sec", {}[0], {}, {})', picked, hot, place)
    if not w.finite(
        combine
    ):  # zero times what is infinite is no zero, and true: a dispatch of all tokens to all places
        raise ValueError("an infinite share of an expert")
    there = w.emit('torch.einsum("sec,sm->ecm", {}.bool().to({}.dtype), {})', combine, x, flat)
    out = w.emit("torch.bmm(F.relu({}), {})", there, w.weight(EXPERTS, HIDDEN, HIDDEN))
    return w.emit('torch.einsum("sec,ecm->sm", {}, {}).view({}.shape)', combine, out, x)


def runs_of_rows(w: Writer, x: str) -> str:
    """The first rows of each sequence in runs, a matrix for each run."""
    sizes = w.random.choice([(2, 0, 4), (3, 3, 2), (1, 4, 3)])
    flat = w.emit("{}[:, :{}].transpose(0, 1)", x, sum(sizes))
    weight, outs, start = w.weight(len(sizes), HIDDEN, HIDDEN), [], 0
    row = w.emit("{}[:, 0]", flat)
    for i, size in enumerate(sizes):
        outs.append(w.emit("{}[{}:{}] @ {}[{}]", row, start, start + size, weight, i))
        start += size
    y = w.emit("torch.cat([{}])", ", ".join(outs))
    return w.emit("{} + F.pad({}, (0, 0, 0, s - {}))", x, y, sum(sizes))


def documents(w: Writer, x: str) -> str:
    """Attention inside of documents that are packed into one sequence, by a mask. (torch's varlen_attn does not run on
    a processor, so that there is nothing to compare with.)"""
    q, k, v = (w.emit("{}.view(b, s, {}, {})", w.linear(x, HIDDEN), HEADS, HEAD_DIM) for _ in range(3))
    causal = w.random.choice([True, False])
    number = w.random.choice(
        ["torch.searchsorted(torch.tensor([0, 5, 9, 30]), torch.arange(s), right=True)", "torch.arange(s) // 5"]
    )
    d = w.emit(number)
    allowed = w.emit("({0}[:, None] == {0})" + " & torch.ones(s, s, dtype=torch.bool).tril()" * causal, d)
    q, k, v = (w.emit("{}.transpose(1, 2)", t) for t in (q, k, v))
    y = w.emit("F.scaled_dot_product_attention({}, {}, {}, {})", q, k, v, allowed)
    return w.linear(w.emit("{}.transpose(1, 2).flatten(2)", y), HIDDEN)


def shown_weights(w: Writer, x: str) -> str:
    """Attention whose weights are read besides, so that no kernel of attention may take them; 32 queries."""
    q, k, v = (w.emit("{}.view(b, s, {}, {}).transpose(1, 2)", w.linear(x, HIDDEN), HEADS, HEAD_DIM) for _ in range(3))
    q, k, v = (w.emit("F.pad({}, (0, 0, 0, 32 - s))", t) for t in (q, k, v))
    mask = w.emit("torch.ones(32, 32, dtype=torch.bool).triu(1)")
    low = w.random.choice(["-10000.0", "float('-inf')"])
    text = w.random.choice(
        ["({} * 0.5).masked_fill({}, {}).softmax(-1)", "torch.where(~{1}, {0} / 2, {2}).softmax(-1)"]
    )
    weights = w.emit(text, w.emit("{} @ {}.mT", q, k), mask, low)
    seen = w.emit("{}.square().sum(1).sum(-1)[:, :s, None]", weights)
    y = w.emit("({} @ {})[:, :, :s].transpose(1, 2).flatten(2)", weights, v)
    return w.emit("{} + {}", w.linear(y, HIDDEN), seen)


def dropped(w: Writer, x: str) -> str:
    """Dropout that draws, before a residual is added; drawn alike wherever the seed is the same."""
    y = w.emit("F.dropout({}, {}, training=True)", w.linear(x, HIDDEN), w.random.choice(["0.1", "0.5"]))
    return w.emit(w.random.choice(["{} + {}", "torch.add({}, {})"]), *w.random.sample([x, y], 2))
