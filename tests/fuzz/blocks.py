"""Blocks of transformers in spellings drawn at random; each takes and returns the name of a [b, s, hidden] value."""

from __future__ import annotations

from .attention import attention
from .families import family
from .writer import FFN, HIDDEN, Writer


def norm(w: Writer, x: str, width: int = HIDDEN) -> str:
    return w.random.choice([rms_norm, rms_norm, layer_norm, library_norm])(w, x, width)


def _weighted(w: Writer, x: str, normed: str, width: int) -> str:
    text = w.random.choice(["{0} * {1}", "{1} * {0}", "{0} * (1.0 + {1})", "{0}", "({1} * {0})"])
    return w.emit(text, normed, w.gain(width)) if text != "{0}" else normed


def rms_norm(w: Writer, x: str, width: int) -> str:
    eps = w.random.choice(["1e-5", "1e-6", "0.1"])
    y = w.emit("{}.float()", x) if w.random.random() < 0.15 else x
    spelling = w.random.randrange(7)
    if spelling == 0:
        normed = w.emit("{0} * torch.rsqrt({0}.pow(2).mean(-1, keepdim=True) + {1})", y, eps)
    elif spelling == 1:
        v = w.emit("{}.square().mean(dim=-1, keepdim=True)", y)
        normed = w.emit("{} / torch.sqrt({} + {})", y, v, eps)
    elif spelling == 2:
        v = w.emit("({0} * {0}).sum(-1, keepdim=True) / {1}", y, width)
        normed = w.emit("{} * ({} + {}).pow(-0.5)", y, v, eps)
    elif spelling == 3:
        normed = w.emit("{0} / ({0}.norm(2, dim=-1, keepdim=True) * {1} + {2})", y, f"{width**-0.5!r}", eps)
    elif spelling == 4:
        normed = w.emit("F.normalize({}, dim=-1) * {}", y, f"{width**0.5!r}")
    elif spelling == 5:
        v = w.emit("torch.mean({} ** 2, dim=-1, keepdim=True)", y)
        normed = w.emit("torch.rsqrt({} + {}) * {}", v, eps, y)
    else:
        normed = w.emit("{0} * {0}.pow(2).mean(-1, keepdim=True).add({1}).rsqrt()", y, eps)
    if y != x:
        normed = w.emit("{}.to({}.dtype)", normed, x)
    return _weighted(w, x, normed, width)


def layer_norm(w: Writer, x: str, width: int) -> str:
    eps = w.random.choice(["1e-5", "1e-6", "0.1"])
    centered = w.emit("{0} - {0}.mean(-1, keepdim=True)", x)
    text = w.random.choice(
        [
            "{c} / torch.sqrt({c}.pow(2).mean(-1, keepdim=True) + {eps})",
            "{c} * torch.rsqrt({x}.var(-1, keepdim=True, unbiased=False) + {eps})",
            "{c} / ({x}.std(-1, keepdim=True) + {eps})",
            "{c} * torch.rsqrt({c}.square().mean(-1, keepdim=True) + {eps})",
            "{c} * torch.rsqrt({x}.var(-1, keepdim=True) + {eps})",
        ]
    )
    normed = _weighted(w, x, w.emit(text.format(c=centered, x=x, eps=eps)), width)
    return w.emit("{} + {}", normed, w.gain(width)) if w.random.random() < 0.5 else normed


def library_norm(w: Writer, x: str, width: int) -> str:
    kind = w.random.choice(
        [
            f"nn.LayerNorm({width})",
            f"nn.LayerNorm({width}, bias=False)",
            f"nn.RMSNorm({width})",
            f"nn.LayerNorm({width}, elementwise_affine=False)",
            f"nn.RMSNorm({width}, eps=1e-5)",
            f"nn.LayerNorm({width}, eps=1e-3)",
        ]
    )
    return w.emit("{}({})", w.member(kind), x)


GATES = (
    "F.silu({g}) * {u}", "{u} * F.silu({g})", "{g} * torch.sigmoid({g}) * {u}", "F.gelu({g}) * {u}",
    "torch.sigmoid({g}) * {u}", 'F.gelu({g}, approximate="tanh") * {u}', "F.relu({g}) * {u}",
    "{g} / (1 + torch.exp(-{g})) * {u}", "{g} * {u}", "F.relu({g}).square() * {u}",
    "{g} * torch.sigmoid(1.702 * {g}) * ({u} + 1)", "torch.tanh({g}) * {u}",
    "F.silu({g}.clamp(max=7.0)) * {u}.clamp(-7.0, 7.0)", "{g} * 0.5 * (1.0 + torch.erf({g} / math.sqrt(2.0))) * {u}",
    "0.5 * {g} * (1 + torch.tanh(0.7978845608028654 * ({g} + 0.044715 * {g} * {g} * {g}))) * {u}",
    "F.softplus({g}) * {u}",
)  # fmt: skip

ACTIVATIONS = (
    "F.gelu({})", 'F.gelu({}, approximate="tanh")', "F.relu({})", "F.silu({})", "F.relu({}).square()",
    "torch.tanh({})", "{0} * 0.5 * (1.0 + torch.erf({0} / 1.4142135623730951))", "{0} * torch.sigmoid(1.702 * {0})",
    "F.mish({})", "0.5 * {0} * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * ({0} + 0.044715 * torch.pow({0}, 3.0))))",
    "F.softplus({})",
)  # fmt: skip


def halves(w: Writer, x: str, size: int) -> tuple[str, str]:
    """Gate and up of width ``size``: from two layers, or from one by one of the ways to take a half."""
    kind = w.random.choice(["two", "chunk", "split", "slice", "unbind", "strided"])
    if kind == "two":
        return w.linear(x, size), w.linear(x, size)
    y = w.linear(x, 2 * size)
    if kind == "slice":
        return w.emit("{}[..., :{}]", y, size), w.emit("{}[..., {}:]", y, size)
    if kind == "strided":
        return w.emit("{}[..., ::2]", y), w.emit("{}[..., 1::2]", y)
    pair = {
        "chunk": f"{y}.chunk(2, dim=-1)",
        "split": f"torch.split({y}, {size}, dim=-1)",
        "unbind": f"{y}.unflatten(-1, (2, {size})).unbind(-2)",
    }[kind]
    gate = w.emit("{}[0]", pair)
    return gate, w.emit("{}[1]", pair)


def gated(w: Writer, x: str) -> str:
    if w.random.random() < 0.1:
        return w.linear(w.emit("F.glu({}, -1)", w.linear(x, 2 * FFN)), HIDDEN)
    g, u = halves(w, x, FFN)
    if w.random.random() < 0.2:
        g, u = u, g
    return w.linear(w.emit(w.random.choice(GATES).replace("{g}", g).replace("{u}", u)), HIDDEN)


def mlp(w: Writer, x: str) -> str:
    return w.linear(w.emit(w.random.choice(ACTIVATIONS), w.linear(x, FFN)), HIDDEN)


def experts(w: Writer, x: str) -> str:
    """A mixture of experts: routed densely, by loops over masks, or by weights gathered per token."""
    count, top = 4, w.random.choice([1, 2])
    logits = w.linear(x, count, bias=False)
    scores = w.emit(w.random.choice(["torch.softmax({}, -1)", "torch.sigmoid({})", "F.softmax({}, dim=-1)"]), logits)
    picked = w.emit("{}.topk({}, -1)", scores, top)
    chosen, index = w.emit("{}[0]", picked), w.emit("{}[1]", picked)
    if w.random.random() < 0.5:
        chosen = w.emit("{0} / {0}.sum(-1, keepdim=True)", chosen)
    up, down = w.weight(count, HIDDEN, FFN), w.weight(count, FFN, HIDDEN)
    kind = w.random.randrange(4)
    if kind == 0:  # every expert on every token
        share = w.emit("torch.zeros_like({}).scatter(-1, {}, {})", scores, index, chosen)
        h = w.emit('F.silu(torch.einsum("bsh,ehf->bsef", {}, {}))', x, up)
        y = w.emit('torch.einsum("bsef,efh->bseh", {}, {})', h, down)
        return w.emit("({} * {}.unsqueeze(-1)).sum(-2)", y, share)
    if kind == 1:  # one-hot products
        hot = w.emit("F.one_hot({}, {}).to({}.dtype)", index, count, x)
        share = w.emit("({} * {}.unsqueeze(-1)).sum(-2)", hot, chosen)
        h = w.emit('F.gelu(torch.einsum("bsh,ehf->ebsf", {}, {}))', x, up)
        y = w.emit("{} @ {}[:, None]", h, down)
        return w.emit("({} * {}.movedim(-1, 0).unsqueeze(-1)).sum(0)", y, share)
    if kind == 2:  # weights of each token
        flat = w.emit("{}.reshape(-1, {})", x, HIDDEN)
        rows = w.emit("{}.reshape(-1, {})", index, top)
        h = w.emit('F.silu(torch.einsum("th,tkhf->tkf", {}, {}[{}]))', flat, up, rows)
        y = w.emit('torch.einsum("tkf,tkfh->tkh", {}, {}[{}])', h, down, rows)
        return w.emit("({} * {}.reshape(-1, {}, 1)).sum(1).view({}.shape)", y, chosen, top, x)
    out = w.emit("torch.zeros_like({})", x)  # a loop over experts
    for e in range(count):
        share = w.emit("({} * ({} == {})).sum(-1, keepdim=True)", chosen, index, e)
        out = w.emit("{} + {} * (F.relu({} @ {}[{}]) @ {}[{}])", out, share, x, up, e, down, e)
    return out


def mixer(w: Writer, x: str) -> str:
    """What is neither attention nor a perceptron: convolutions along tokens, shifts, short recurrences."""
    kind = w.random.randrange(4)
    if kind == 0:
        layer = w.member(f"nn.Conv1d({HIDDEN}, {HIDDEN}, 3, groups={HIDDEN}, padding=2)")
        return w.emit("F.silu({}({}.transpose(1, 2))[..., :s]).transpose(1, 2)", layer, x)
    if kind == 1:
        shifted = w.emit("F.pad({}, (0, 0, 1, 0))[:, :-1]", x)
        return w.emit("torch.lerp({}, {}, torch.sigmoid({}))", x, shifted, w.gain())
    if kind == 2:
        decay = w.emit("torch.sigmoid({})", w.linear(x, HIDDEN))
        return w.emit("torch.cumsum({} * {}, 1) / torch.arange(1, s + 1)[:, None]", decay, x)
    state = w.emit("torch.zeros_like({}[:, 0])", x)
    for t in range(3):
        state = w.emit("torch.tanh({} * 0.5 + {}[:, {}])", state, x, t)
    return w.emit("{} + {}.unsqueeze(1)", x, state)


def branch(w: Writer, x: str) -> str:
    return w.random.choices([attention, gated, mlp, experts, mixer, family], [4, 3, 1, 1, 1, 8])[0](w, x)


def block(w: Writer, x: str) -> str:
    """A branch and its residual: norm first, norm last, both, parallel branches, scaled sums."""
    kind = w.random.choice(["pre", "pre", "post", "sandwich", "parallel", "scaled", "bare"])
    if kind == "post":
        return norm(w, w.emit("{} + {}", x, branch(w, x)))
    if kind == "bare":
        return branch(w, norm(w, x))
    y = norm(w, x)
    z = branch(w, y)
    if kind == "sandwich":
        z = norm(w, z)
    if kind == "parallel":
        return w.emit("{} + {} + {}", x, z, branch(w, y))
    if kind == "scaled":
        return w.emit(w.random.choice(["{} * 0.5 + {}", "{} + 0.25 * {}", "torch.add({}, {}, alpha=0.3)"]), x, z)
    if w.random.random() < 0.15:
        z = w.emit("F.dropout({}, 0.2, training=False)", z)
    if w.random.random() < 0.1:
        x = w.emit("{}.clone()", x)
        w.run(f"{x} += {z}")
        return w.emit("{} + 0", x)
    return w.emit("{} + {}", *w.random.sample([x, z], 2))
