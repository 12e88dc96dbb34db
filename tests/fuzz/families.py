"""Blocks of the families that have passes of their own and that no transformer of ``blocks.py`` has: scans, doubly
stochastic matrices, sorted tokens, routers with groups, functions with a gradient of their own.
"""

from __future__ import annotations

from .collectives import over_ranks
from .recurrences import batched, chunked_delta_rule, state_space_dual
from .routing import documents, dropped, gathered, one_hot, runs_of_rows, shown_weights
from .writer import FFN, HIDDEN, Writer


def sinkhorn(w: Writer, x: str) -> str:
    """Matrices of which columns and rows are divided by their sums in turn."""
    eps = w.random.choice(["1e-6", "0.1"])
    y = w.emit("{}.unflatten(-1, (4, 4)).softmax(-1) + {}", w.linear(x, 16), eps)
    for turn in range(w.random.choice([1, 3, 6, 7])):
        y = w.emit("{0} / ({0}.sum({1}, keepdim=True) + {2})", y, (-2, -1)[turn % 2], eps)
    return w.linear(w.emit("{}.square().flatten(-2)", y), HIDDEN)


def scan(w: Writer, x: str) -> str:
    """Mamba's recurrence over the first tokens."""
    tokens, states = w.random.choice([2, 4]), 3

    def along(y: str) -> str:
        return w.emit("{}.transpose(1, 2)[..., :{}]", y, tokens)

    u, dt, b, c = along(x), along(w.linear(x, HIDDEN)), along(w.linear(x, states)), along(w.linear(x, states))
    if w.random.random() < 0.7:
        dt = w.emit("F.softplus({} + {}[:, None])", dt, w.gain())
    rate = w.random.choice(["-{}.exp()[None, :, None]", "(-{}.exp())[None, :, None]"])
    decay = w.emit("({}[..., None] * " + rate + ").exp()", dt, w.weight(HIDDEN, states))
    added = w.emit("{}[..., None] * ({}.transpose(1, 2)[:, None] * {}[..., None])", dt, b, u)
    state, outs = w.emit("torch.zeros_like({}[:, :, 0])", added), []
    by_sum, by_product = "({} * {}[:, :, {}][:, None]).sum(-1)", "({} @ {}.transpose(1, 2)[:, {}, :, None])[:, :, 0]"
    read = w.random.choice([by_sum, by_product])
    for t in range(tokens):
        state = w.emit("{0}[:, :, {3}] * {1} + {2}[:, :, {3}]", decay, state, added, t)
        outs.append(w.emit(read, state, c, t))
    y = w.emit("torch.stack(({},), -1)", ", ".join(outs))
    if w.random.random() < 0.5:
        y = w.emit("{} + {} * {}[:, None]", y, u, w.gain())
    if w.random.random() < 0.5:
        y = w.emit("{} * F.silu({})", y, along(w.linear(x, HIDDEN)))
    return w.emit("F.pad({}.transpose(1, 2), (0, 0, 0, s - {}))", y, tokens)


def sorted_tokens(w: Writer, x: str) -> str:
    """Copies of tokens in the order of their experts, a matrix for each copy, and back, added up by weight."""
    count, top = 4, w.random.choice([1, 2])
    flat = w.emit("{}.reshape(-1, {})", x, HIDDEN)
    scores = router(w, flat, count)
    picked = w.emit("{}.topk({}, -1)", scores, top)
    chosen, index = w.emit("{}[0]", picked), w.emit("{}[1].flatten()", picked)
    order = w.emit("{}.argsort(stable=True)", index)
    rows = w.emit(w.random.choice(["{}[{} // {}]", "{}.index_select(0, {} // {})"]), flat, order, top)
    up, down = w.weight(count, HIDDEN, FFN), w.weight(count, FFN, HIDDEN)
    at = w.emit("{}[{}]", index, order)
    h = w.emit("F.silu(torch.bmm({}.unsqueeze(1), {}[{}]))", rows, up, at)
    out = w.emit("torch.bmm({}, {}[{}]).squeeze(1)", h, down, at)
    if w.random.random() < 0.5:
        back = w.emit("{}[{}.argsort()].unflatten(0, (-1, {}))", out, order, top)
        return w.emit("({} * {}.unsqueeze(-1)).sum(1).view({}.shape)", back, chosen, x)
    share = w.emit("{} * {}.flatten()[{}].unsqueeze(-1)", out, chosen, order)
    return w.emit("torch.zeros_like({0}).index_add(0, {1} // {2}, {3}).view({4}.shape)", flat, order, top, share, x)


def router(w: Writer, flat: str, count: int) -> str:
    logits = w.linear(flat, count, bias=False)
    scores = w.emit(
        w.random.choice(["{}.softmax(-1)", "torch.sigmoid({})", "{0}.softmax(-1, dtype={0}.dtype)"]), logits
    )
    if w.random.random() < 0.4:
        groups = w.emit("({} + {}).unflatten(-1, (2, -1))", scores, w.gain(count))
        best = w.emit("{}.topk(2, -1)[0].sum(-1).argmax(-1, keepdim=True)", groups)
        kept = w.emit(
            "torch.zeros_like({}[..., 0]).scatter(1, {}, 1).unsqueeze(-1).expand_as({})", groups, best, groups
        )
        scores = w.emit("{}.masked_fill(~{}.flatten(1).bool(), 0.0)", scores, kept)
    if w.random.random() < 0.4:
        scores = w.emit("{0} / ({0}.sum(-1, keepdim=True) + 1e-20) * 2.5", scores)
    return scores


def weighted_gate(w: Writer, x: str) -> str:
    """A gated product with a weight for each row."""
    weight = w.emit("torch.sigmoid({})", w.linear(x, 1))
    g, u = w.linear(x, FFN), w.linear(x, FFN)
    text = w.random.choice(["F.silu({0}) * {1} * {2}", "{2} * (F.silu({0}) * {1})", "(F.silu({0}) * {2}) * {1}"])
    return w.linear(w.emit(text, g, u, weight), HIDDEN)


def own_gradient(w: Writer, x: str) -> str:
    """A function whose gradient is written by hand, right or as a straight-through estimator."""
    y = w.emit("{}.apply({}, {})", w.random.choice(["Gate", "Straight"]), w.linear(x, HIDDEN), x)
    return w.emit("{} * {}", y, w.gain())


def delta_rule(w: Writer, x: str) -> str:
    """A state that forgets what a key held before it takes the value, over the first tokens."""
    q, k, v = (w.linear(x, 8) for _ in range(3))
    q, k = (w.emit("F.normalize({}, dim=-1)", t) for t in (q, k))
    beta, decay = (w.emit("torch.sigmoid({})", w.linear(x, 1)) for _ in range(2))
    state, outs = w.emit("torch.zeros_like({}[:, 0, :, None] * {}[:, 0, None])", k, v), []
    for t in range(3):
        state = w.emit("{} * {}[:, {}, :, None]", state, decay, t)
        held = w.emit("({} * {}[:, {}, :, None]).sum(1)", state, k, t)
        new = w.emit("({1}[:, {3}] - {0}) * {2}[:, {3}]", held, v, beta, t)
        state = w.emit("{0} + {1}[:, {3}, :, None] * {2}[:, None]", state, k, new, t)
        outs.append(w.emit("({} * {}[:, {}, :, None]).sum(1)", state, q, t))
    y = w.emit("torch.stack(({},), 1)", ", ".join(outs))
    return w.linear(w.emit("F.pad({}, (0, 0, 0, s - 3))", y), HIDDEN)


FAMILIES = (
    sinkhorn, scan, sorted_tokens, weighted_gate, own_gradient, delta_rule, chunked_delta_rule, state_space_dual,
    batched, gathered, one_hot, runs_of_rows, documents, shown_weights, dropped, over_ranks,
)  # fmt: skip


def family(w: Writer, x: str) -> str:
    return w.random.choice(FAMILIES)(w, x)
