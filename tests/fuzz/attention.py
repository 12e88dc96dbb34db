"""Attention in spellings drawn at random: heads, rotations, scores, masks, soft-caps, softmaxes, products."""

from __future__ import annotations

from .writer import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, Writer


def attention(w: Writer, x: str) -> str:
    kv_heads = w.random.choice([HEADS, HEADS, KV_HEADS, 1])
    q, k, v = _heads(w, x, kv_heads)
    if w.random.random() < 0.2:
        eps = w.random.choice(["1e-5", "1e-6"])
        q, k = (
            w.emit("{0} * torch.rsqrt({0}.pow(2).mean(-1, keepdim=True) + {1}) * {2}", t, eps, w.gain(HEAD_DIM))
            for t in (q, k)
        )
    if w.random.random() < 0.6:
        q, k = _rotated(w, q, k)
    if w.random.random() < 0.35:
        y = _library(w, q, k, v, kv_heads)
    else:
        y = _by_hand(w, q, k, v, kv_heads)
    if w.random.random() < 0.15:
        y = w.emit("{} * torch.sigmoid({})", y, _split(w, w.linear(x, HIDDEN), HEADS))
    merged = w.emit(
        w.random.choice(
            [
                "{}.transpose(1, 2).reshape(b, s, -1)",
                "{}.transpose(1, 2).contiguous().view(b, s, -1)",
                "{}.permute(0, 2, 1, 3).flatten(2)",
            ]
        ),
        y,
    )
    return w.linear(merged, HIDDEN)


def _split(w: Writer, y: str, heads: int) -> str:
    text = w.random.choice(
        [
            "{}.view(b, s, {}, {}).transpose(1, 2)",
            "{}.reshape(b, s, {}, {}).permute(0, 2, 1, 3)",
            "{}.unflatten(-1, ({}, {})).transpose(1, 2)",
        ]
    )
    return w.emit(text, y, heads, HEAD_DIM)


def _heads(w: Writer, x: str, kv_heads: int) -> list[str]:
    """Queries [b, heads, s, dim], keys and values [b, kv_heads, s, dim]: three layers, or one that is split."""
    width = kv_heads * HEAD_DIM
    if w.random.random() < 0.6:
        return [_split(w, w.linear(x, size), size // HEAD_DIM) for size in (HIDDEN, width, width)]
    y = w.linear(x, HIDDEN + 2 * width)
    if kv_heads == HEADS and w.random.random() < 0.5:
        packed = w.emit("{}.view(b, s, {}, 3, {})", y, HEADS, HEAD_DIM)
        return [w.emit("{}[..., {}, :].transpose(1, 2)", packed, i) for i in range(3)]
    parts = w.emit("{}.split(({}, {}, {}), -1)", y, HIDDEN, width, width)
    return [_split(w, f"{parts}[{i}]", size // HEAD_DIM) for i, size in enumerate((HIDDEN, width, width))]


def _rotated(w: Writer, q: str, k: str) -> list[str]:
    half = HEAD_DIM // 2
    base = w.random.choice(["10000.0", "100.0"])
    angles = w.emit(
        "torch.outer(torch.arange(s).float(), 1.0 / {} ** (torch.arange({}) / {})).to({}.dtype)", base, half, half, q
    )
    kind = w.random.choice(["halves", "halves", "interleaved", "complex", "stacked", "partial"])
    if kind == "complex":
        wave = w.emit("torch.polar(torch.ones_like({0}), {0})", angles)
        pairs = "torch.view_as_real(torch.view_as_complex({0}.reshape(*{0}.shape[:-1], -1, 2)) * {1}).flatten(-2)"
        return [w.emit(pairs, t, wave) for t in (q, k)]
    if kind in ("interleaved", "stacked"):
        cos, sin = w.emit("{}.cos()", angles), w.emit("{}.sin()", angles)
        if kind == "interleaved":
            cos, sin = (w.emit("{}.repeat_interleave(2, -1)", t) for t in (cos, sin))
            turned = "torch.stack((-{0}[..., 1::2], {0}[..., ::2]), -1).flatten(-2)"
            return [w.emit("{0} * {1} + " + turned + " * {2}", t, cos, sin) for t in (q, k)]
        even = "{0}[..., ::2] * {1} - {0}[..., 1::2] * {2}"
        pair = f"torch.stack(({even}, {{0}}[..., 1::2] * {{1}} + {{0}}[..., ::2] * {{2}}), -1).flatten(-2)"
        return [w.emit(pair, t, cos, sin) for t in (q, k)]
    if kind == "partial":
        cos, sin = (w.emit("torch.cat(({0}[..., :1], {0}[..., :1]), -1).{1}()", angles, f) for f in ("cos", "sin"))
        text = "torch.cat(({0}[..., :2] * {1} + torch.cat((-{0}[..., 1:2], {0}[..., :1]), -1) * {2}, {0}[..., 2:]), -1)"
        return [w.emit(text, t, cos, sin) for t in (q, k)]
    both = w.emit("torch.cat(({0}, {0}), -1)", angles)
    cos, sin = (w.emit("{}.{}()[None, None]", both, f) for f in ("cos", "sin"))
    sign = w.random.choice(
        [
            "torch.cat((-{0}[..., {h}:], {0}[..., :{h}]), -1)",
            "torch.cat((-{0}.chunk(2, -1)[1], {0}.chunk(2, -1)[0]), -1)",
        ]
    )
    return [w.emit("({0} * {1}) + (" + sign.replace("{h}", str(half)) + " * {2})", t, cos, sin) for t in (q, k)]


def _repeated(w: Writer, t: str, kv_heads: int) -> str:
    if kv_heads == HEADS:
        return t
    times = HEADS // kv_heads
    text = w.random.choice(
        [
            "{}.repeat_interleave({}, dim=1)",
            "{}[:, :, None].expand(-1, -1, {}, -1, -1).reshape(b, {heads}, s, {dim})",
            "torch.stack([{}] * {}, 2).flatten(1, 2)",
        ]
    )
    return w.emit(text.replace("{heads}", str(HEADS)).replace("{dim}", str(HEAD_DIM)), t, times)


def _library(w: Writer, q: str, k: str, v: str, kv_heads: int) -> str:
    arguments = [w.random.choice(["is_causal=True", "is_causal=True", "", "attn_mask={m}", "attn_mask={a}"])]
    if "{m}" in arguments[0]:
        arguments[0] = arguments[0].replace("{m}", _allowed(w))
    if "{a}" in arguments[0]:
        arguments[0] = arguments[0].replace(
            "{a}", w.emit("torch.zeros(s, s).masked_fill(~{}, float('-inf')).to({}.dtype)", _allowed(w), q)
        )
    if w.random.random() < 0.3:
        arguments.append(f"scale={w.random.choice(['0.3', '1.0', '0.125'])}")
    if kv_heads != HEADS and w.random.random() < 0.5:
        arguments.append("enable_gqa=True")
    else:
        k, v = _repeated(w, k, kv_heads), _repeated(w, v, kv_heads)
    return w.emit("F.scaled_dot_product_attention({}, {}, {}, {})", q, k, v, ", ".join(filter(None, arguments)))


def _allowed(w: Writer) -> str:
    """A [s, s] or [b, 1, s, s] bool: True where a query may look; every row has a key."""
    text = w.random.choice(
        [
            "torch.ones(s, s, dtype=torch.bool).tril()", "torch.arange(s)[:, None] >= torch.arange(s)",
            "(torch.arange(s)[:, None] - torch.arange(s) < 4) & (torch.arange(s)[:, None] >= torch.arange(s))",
            "(torch.arange(s)[:, None] - torch.arange(s)).abs() <= 3",
            "~torch.triu(torch.ones(s, s, dtype=torch.bool), 1)",
            "torch.arange(s)[:, None] // 4 >= torch.arange(s) // 4",
            "torch.ones(s, s, dtype=torch.bool).tril(-2).logical_not()",
            "(torch.arange(s)[:, None] >= torch.arange(s)) | (torch.arange(s) < 3)",
            "(torch.arange(s) < s - torch.arange(b)[:, None])[:, None, None, :].expand(b, 1, s, s)",
            "torch.ones(s, s).tril().bool() & (torch.arange(s) < s - torch.arange(b)[:, None])[:, None, None]",
            "(torch.arange(s)[:, None] // 5 == torch.arange(s) // 5) & (torch.arange(s)[:, None] >= torch.arange(s))",
        ]
    )  # fmt: skip
    return w.emit(text)


def _by_hand(w: Writer, q: str, k: str, v: str, kv_heads: int) -> str:
    k, v = _repeated(w, k, kv_heads), _repeated(w, v, kv_heads)
    scale = w.random.choice([HEAD_DIM**-0.5, HEAD_DIM**-0.5, 1.0, 0.3])
    text = w.random.choice(
        [
            "{0} @ {1}.transpose(-1, -2) * {2}", "torch.matmul({0}, {1}.mT) / {3}",
            "({0} * {2}) @ {1}.transpose(2, 3)", 'torch.einsum("bhid,bhjd->bhij", {0}, {1}) * {2}',
            "({0} * {4}) @ ({1} * {4}).mT", "{2} * ({0} @ {1}.permute(0, 1, 3, 2))",
            "torch.bmm({0}.flatten(0, 1), {1}.flatten(0, 1).mT).view(b, -1, s, s) * {2}",
            "{0}.new_zeros(1).baddbmm({0}.flatten(0, 1), {1}.mT.flatten(0, 1), beta=0, alpha={2}).view(b, -1, s, s)",
        ]
    )  # fmt: skip
    scores = w.emit(text, q, k, scale, 1 / scale, scale**0.5)
    if w.random.random() < 0.15:
        scores = w.emit("{1} * torch.tanh({0} / {1})", scores, w.random.choice(["2.0", "30.0"]))
    if w.random.random() < 0.15:
        slopes = w.emit("torch.tensor([0.5, 0.25, 0.125, 0.0625]).to({}.dtype)", q)
        scores = w.emit("{} - {}[:, None, None] * (torch.arange(s)[:, None] - torch.arange(s)).abs()", scores, slopes)
    if w.random.random() < 0.1:
        scores = w.emit(
            "{} + {}({}).permute(2, 0, 1)",
            scores,
            w.member(f"nn.Embedding(40, {HEADS})"),
            "(torch.arange(s)[:, None] - torch.arange(s)).abs()",
        )
    if not w.finite(scores):  # a score that a boolean mask hides is added to -inf by ATen's kernel, too
        raise ValueError("an infinite score")
    scores = _masked(w, scores)
    weights = w.emit(_softmax(w, scores), scores)
    return w.emit(
        w.random.choice(["{} @ {}", "torch.matmul({}, {})", 'torch.einsum("bhij,bhjd->bhid", {}, {})']), weights, v
    )


def _softmax(w: Writer, scores: str) -> str:
    text = w.random.choice(
        [
            "torch.softmax({0}, -1)", "F.softmax({0}, dim=-1)", "{0}.softmax(-1)",
            "F.softmax({0}, dim=-1, dtype={0}.dtype)",
            "(lambda e: e / e.sum(-1, keepdim=True))(torch.exp({0} - {0}.amax(-1, keepdim=True)))",
            "torch.exp({0} - torch.logsumexp({0}, -1, keepdim=True))", "torch.exp(F.log_softmax({0}, -1))",
            "torch.cat(({0}, torch.zeros_like({0}[..., :1])), -1).softmax(-1)[..., :-1]",
            "F.dropout({0}.softmax(-1), 0.1, training=False)", "torch.sigmoid({0})",
        ]
    )  # fmt: skip
    # A row of one number that is so low that log(s) is lost beside it has weights of 1 in eager PyTorch, not of 1 / s.
    # So has a column, whose sum a near miss takes.
    largest = [w.value(scores).detach().amax(dim) for dim in (-1, -2)]
    hidden = min(float(x.min()) for x in largest) < -1e8
    return "torch.softmax({0}, -1)" if hidden and "logsumexp" in text else text


def _masked(w: Writer, scores: str) -> str:
    if w.random.random() < 0.15:
        return scores
    numbers = ["float('-inf')", "torch.finfo({}.dtype).min", "-1e9", "-10000.0"]
    # Scores of thousands would show through a mask that adds -10000, which is read as one that lets nothing through.
    low = w.random.choice(numbers if w.largest(scores) < 50 else numbers[:2]).format(scores)
    text = w.random.choice(
        [
            "{0}.masked_fill(~{1}, {2})", "torch.where({1}, {0}, {2})",
            "{0} + torch.zeros_like({0}).masked_fill(~{1}, {2})", "{0}.masked_fill({1}.logical_not(), {2})",
            "{0} + torch.where({1}, 0.0, {2}).to({0}.dtype)", "torch.where({1} == 0, {2}, {0})",
        ]
    )  # fmt: skip
    return w.emit(text, scores, _allowed(w), low)
