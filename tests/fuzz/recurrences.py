"""Recurrences of linear attention computed chunk by chunk, and scans that are written in other ways: over the first
tokens, so that a program runs with any length.
"""

from __future__ import annotations

from .writer import HIDDEN, Writer

TOKENS, CHUNK, STATES = 8, 4, 3


def _first(w: Writer, y: str, *shape: int) -> str:
    """The first tokens of [b, s, ...], whose last dimension becomes ``shape``."""
    return w.emit("{}[:, :{}].unflatten(-1, ({},))", y, TOKENS, ", ".join(map(str, shape)))


def _back(w: Writer, y: str, width: int) -> str:
    """[b, tokens, heads, dim] -> [b, s, hidden]."""
    flat = w.emit("F.pad({}.flatten(2), (0, 0, 0, s - {}))", y, TOKENS)
    return flat if width == HIDDEN else w.linear(flat, HIDDEN)


def chunked_delta_rule(w: Writer, x: str) -> str:
    """The gated delta rule, two chunks: a triangular system of each, and the state that goes from one to the other."""
    heads, dim, wide = 2, 3, 4
    q, k = (_first(w, w.linear(x, heads * dim), heads, dim) for _ in range(2))
    v = _first(w, w.linear(x, heads * wide), heads, wide)
    g = w.emit("-F.softplus({})[:, :{}]", w.linear(x, heads), TOKENS)
    beta = w.emit("torch.sigmoid({})[:, :{}]", w.linear(x, heads), TOKENS)
    q, k, v, g, beta = (w.emit("{}.transpose(1, 2)", t) for t in (q, k, v, g, beta))
    if w.random.random() < 0.7:
        norm = w.random.choice(
            ["{0} * torch.rsqrt(({0} * {0}).sum(-1, keepdim=True) + 1e-6)", "F.normalize({0}, dim=-1)"]
        )
        q, k = (w.emit(norm, t) for t in (q, k))
    q = w.emit("{} / {}", q, f"{dim**0.5!r}")
    q, k, v, g, beta = (w.emit("{}.unflatten(2, (-1, {}))", t, CHUNK) for t in (q, k, v, g, beta))
    gates = w.emit("{}.cumsum(-1)", g)
    above = w.emit(
        w.random.choice(
            [f"torch.ones({CHUNK}, {CHUNK}, dtype=torch.bool).triu(1)", f"~torch.ones({CHUNK}, {CHUNK}).tril().bool()"]
        )
    )
    pairs = w.emit("({0}.unsqueeze(-1) - {0}.unsqueeze(-2)).masked_fill({1}, -math.inf).exp()", gates, above)
    column, grown = w.emit("{}.unsqueeze(-1)", beta), w.emit("{}.exp().unsqueeze(-1)", gates)
    if w.random.random() < 0.5:
        system = w.emit("({0} * {1}) @ {0}.transpose(-1, -2) * {2}", k, column, pairs)
    else:
        system = w.emit("{2} * {1} * ({0} @ {0}.mT)", k, column, pairs)
    solve = "torch.linalg.solve_triangular({}, {} * {}, upper=False, unitriangular=True)"
    u, kept = w.emit(solve, system, v, column), w.emit(solve, system, k, w.emit("{} * {}", column, grown))
    scores, state = w.emit("{} @ {}.transpose(-1, -2) * {}", q, k, pairs), w.emit("{0}.new_zeros(b, 2, 3, 4)", v)
    last, outs, written = w.emit("{}[..., -1].exp()[..., None, None]", gates), [], w.random.random() < 0.7
    q, k = w.emit("{} * {}", q, grown), w.emit("{0} * ({1}[..., -1:] - {1}).exp().unsqueeze(-1)", k, gates)
    every = w.emit("torch.zeros_like({})", u) if written else ""
    for i in range(TOKENS // CHUNK):
        new = w.emit("{0}[:, :, {3}] - {1}[:, :, {3}] @ {2}", u, kept, state, i)
        outs.append(w.emit("{0}[:, :, {4}] @ {1} + {2}[:, :, {4}] @ {3}", q, state, scores, new, i))
        if written:
            w.run(f"{every}[:, :, {i}] = {outs[-1]}")
        state = w.emit("{0} * {1}[:, :, {4}] + {2}[:, :, {4}].transpose(-1, -2) @ {3}", state, last, k, new, i)
    y = every or w.emit("torch.stack(({},), 2)", ", ".join(outs))
    y = w.emit("{}.flatten(2, 3).transpose(1, 2)", y)
    return _back(w, y, heads * wide)


def _segments(w: Writer, a: str, length: int) -> str:
    """exp of the sums of ``a`` over (s, l], zero where s > l."""
    above = w.emit("torch.ones({0}, {0}, dtype=torch.bool).triu(1)", length)
    if w.random.random() < 0.5:
        c = w.emit("{}.cumsum(-1)", a)
        return w.emit("({0}[..., :, None] - {0}[..., None, :]).masked_fill({1}, -math.inf).exp()", c, above)
    text = "{0}[..., None].expand(*{0}.shape, {1}).masked_fill(~torch.ones({1}, {1}, dtype=torch.bool).tril(-1), 0)"
    return w.emit("{}.cumsum(-2).masked_fill({}, -math.inf).exp()", w.emit(text, a, length), above)


def state_space_dual(w: Writer, x: str) -> str:
    """Mamba-2 over two chunks: inside of each, and the states between them."""
    heads, dim = 2, 4
    u = _first(w, w.linear(x, heads * dim), heads, dim)
    dt = w.emit("F.softplus({})[:, :{}]", w.linear(x, heads), TOKENS)
    B, C = (_first(w, w.linear(x, heads * STATES), heads, STATES) for _ in range(2))
    skip = w.emit("{}[:, None] * {}", w.gain(heads), u) if w.random.random() < 0.7 else None
    a = w.emit("{} * -{}.exp()", dt, w.gain(heads))
    steps, B, C = (w.emit("{}.unflatten(1, (-1, {}))", t, CHUNK) for t in (w.emit("{} * {}[..., None]", u, dt), B, C))
    a = w.emit("{}.unflatten(1, (-1, {})).permute(0, 3, 1, 2)", a, CHUNK)
    sums, pairs = w.emit("{}.cumsum(-1)", a), _segments(w, a, CHUNK)
    scores = w.emit('torch.einsum("bclhn,bcshn->bclsh", {}, {})', C, B)
    weights = w.emit("{} * {}.permute(0, 2, 3, 4, 1)", scores, pairs)
    inside = w.emit('torch.einsum("bclsh,bcshp->bclhp", {}, {})', weights, steps)
    rest = w.emit("({0}[..., -1:] - {0}).exp().permute(0, 2, 3, 1)[..., None]", sums)
    added = w.emit('torch.einsum("bclhn,bclhp->bchpn", {}, {})', w.emit("{} * {}", B, rest), steps)
    line = w.emit("torch.cat([torch.zeros_like({0}[:, :1]), {0}], 1)", added)
    between = _segments(w, w.emit("F.pad({}[..., -1], (1, 0))", sums), TOKENS // CHUNK + 1)
    line = w.emit('torch.einsum("bzch,bzhpn->bchpn", {}.transpose(1, 3), {})', between, line)
    grown = w.emit("{}.exp().permute(0, 2, 3, 1)[..., None]", sums)
    across = w.emit('torch.einsum("bclhn,bchpn->bclhp", {}, {}[:, :-1]) * {}', C, line, grown)
    y = w.emit("({} + {}).flatten(1, 2)", inside, across)
    return _back(w, w.emit("{} + {}", y, skip) if skip else y, heads * dim)


def batched(w: Writer, x: str) -> str:
    """Sums and products under vmap, as associative scans combine neighbours."""
    a, b = w.emit("torch.sigmoid({})", w.linear(x, HIDDEN)), w.emit("{} * {}", x, w.gain())
    text = w.random.choice(["lambda p, q: p * q + q", "lambda p, q: p + p * q", "lambda p, q: q * q + p"])
    y = w.emit("torch.func.vmap({})({}, {})", text, a, b)
    return w.linear(y, HIDDEN)
