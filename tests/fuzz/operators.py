"""Single operators on values of any shape: each function writes one or two lines and returns a name (or None)."""

from __future__ import annotations

from .writer import HIDDEN, Writer

UNARY = (
    "torch.exp({}.clamp(max=3))", "torch.tanh({})", "torch.sigmoid({})", "F.silu({})", "F.gelu({})", "torch.relu({})",
    'F.gelu({}, approximate="tanh")', "F.softplus({})", "torch.log1p({}.abs())", "torch.sqrt({}.abs() + 0.1)", "-{}",
    "torch.rsqrt({}.pow(2) + 1.0)", "{}.square()", "{} ** 3 * 0.1", "torch.erf({})", "{} * 0.5", "{} + 1.0",
    "1.5 - {}", "{} / 2", "{}.clamp(-1, 1)", "torch.where({0} > 0, {0}, 0.1 * {0})", "F.leaky_relu({})", "F.elu({})",
    "{}.abs()", "{}.neg().exp().clamp(max=9).add(1).reciprocal()", "F.mish({})", "torch.sin({})", "torch.cos({})",
    "F.hardswish({})", "{}.detach()", "{}.clone()", "torch.atan({})", "F.logsigmoid({})", "F.relu({}).square()",
    "{0} * torch.sigmoid({0})", "{0} * torch.sigmoid(1.702 * {0})", "F.dropout({}, 0.1, training=False)",
    "{}.contiguous()", "torch.nan_to_num({})", "{0} - {0}.detach()", "{}.masked_fill({} > 1, 0.5)",
    "F.threshold({}, 0.1, 0.2)", "{}.sign()", "{}.frac()",
)  # fmt: skip

BINARY = (
    "{} + {}", "{} - {}", "{} * {}", "{} / ({}.abs() + 1)", "torch.maximum({}, {})", "torch.minimum({}, {})",
    "torch.where({} > 0.1, {}, 0.25)", "torch.lerp({}, {}, 0.3)", "torch.addcmul({0}, {0}, {1}, value=0.5)",
    "torch.atan2({}, {}.abs() + 1)", "torch.hypot({}, {})", "torch.add({}, {}, alpha=0.5)", "F.silu({}) * {}",
    "{} * F.gelu({})", "torch.sub({}, {}, alpha=2)", "{}.mul({}).add(0.1)", "torch.logaddexp({}, {})",
)  # fmt: skip

REDUCED = (
    "{}.sum({d}, keepdim={k})", "{}.mean({d}, keepdim={k})", "{}.amax({d}, keepdim={k})", "{}.var({d}, keepdim={k})",
    "{}.logsumexp({d}, keepdim={k})", "{}.norm(dim={d}, keepdim={k})", "{}.pow(2).mean({d}, keepdim={k})",
    "{}.amin({d}, keepdim={k})", "{}.std({d}, unbiased=False, keepdim={k})", "{}.max({d}, keepdim={k}).values",
)  # fmt: skip

ALONG = (
    "torch.softmax({}, {d})", "torch.log_softmax({}, {d})", "torch.cumsum({}, {d})", "torch.flip({}, ({d},))",
    "torch.roll({}, 1, {d})", "{}.sort({d}).values", "F.normalize({}, dim={d})", "{0} - {0}.mean({d}, keepdim=True)",
    "{0} / {0}.abs().sum({d}, keepdim=True).clamp_min(0.1)",
    "{0} * torch.rsqrt({0}.pow(2).mean({d}, keepdim=True) + 1e-5)", "({0} - {0}.amax({d}, keepdim=True)).exp()",
    "torch.logcumsumexp({}, {d})", "F.softmin({}, {d})", "{}.diff(dim={d})", "{}.narrow({d}, 0, 1)",
    "torch.cat(({0}, -{0}), {d})", "torch.stack(({0}, {0} * 2), {d}).sum({d})", "{}.unsqueeze({d}).squeeze({d})",
    "{}.movedim({d}, 0)", "{}.transpose({d}, 0)", "{}.repeat_interleave(2, {d})", "{}.chunk(2, {d})[0]",
    "{}.select({d}, 0)", "{}.topk(1, {d}).values", "{}.unbind({d})[0]",
)  # fmt: skip

WHOLE = (
    "{}.mean()", "{}.sum() * 0.01", "{}.pow(2).mean().sqrt()", "{}.flatten()", "{}.mT", "{}.reshape(-1)",
    "{}[..., 1:]", "{}[..., :-1]", "{}[..., ::2]", "{}[:, None]", "F.pad({}, (1, 2))", "F.pad({}, (1, 0), value=0.5)",
    "{}[0]", "{}[1:]", "F.layer_norm({0}, {0}.shape[-1:])", "F.rms_norm({0}, {0}.shape[-1:])", "{}.tril()",
    "{}.triu(1)", "{}[-1]", "torch.diagonal_scatter({0}, torch.zeros_like({0}.diagonal()))",
    "{}.expand(2, *{0}.shape)", "{}.to(torch.float32)",
)  # fmt: skip

WRITES = (
    "{}.mul_(0.5)", "{}.add_(1.0)", "{}[..., 0] = 0.25", "{}[..., 1:] += 0.5", "{}[0].mul_(2.0)", "{}.clamp_(-1, 1)",
    "{}.masked_fill_({0} > 0.5, 0.1)", "{}.transpose(0, -1).mul_(0.3)", "{}[:1].zero_()", "{}.view(-1)[1:].tanh_()",
    "{}.copy_({0}.detach() * 2)", "{}.exp_()", "{}.sigmoid_()", "{}.diagonal().add_(0.2)",
    "{}.index_fill_(0, torch.tensor([0]), 0.3)",
)  # fmt: skip


def pick(w: Writer, rank: int = 0) -> str | None:
    """A floating-point value of at least that many dimensions, later ones more often."""
    names = [n for n in w.visible if w.value(n).is_floating_point() and w.value(n).dim() >= rank]
    return names[min(int(len(names) * w.random.random() ** 0.5), len(names) - 1)] if names else None


def unary(w: Writer):
    x = pick(w)
    return w.emit(w.random.choice(UNARY), x, x)


def binary(w: Writer):
    x = pick(w)
    alike = [n for n in w.visible if w.value(n).is_floating_point() and _broadcasts(w.shape(x), w.shape(n))]
    pair = [x, w.random.choice(alike)]
    w.random.shuffle(pair)
    return w.emit(w.random.choice(BINARY), *pair)


def _broadcasts(one: tuple[int, ...], two: tuple[int, ...]) -> bool:
    return all(a == b or 1 in (a, b) for a, b in zip(reversed(one), reversed(two)))


def reduced(w: Writer):
    x = pick(w, 1)
    d = w.random.randrange(-w.value(x).dim(), w.value(x).dim())
    return w.emit(w.random.choice(REDUCED).replace("{d}", str(d)).replace("{k}", w.random.choice(["True", "False"])), x)


def along(w: Writer):
    x = pick(w, 1)
    d = w.random.randrange(-w.value(x).dim(), w.value(x).dim())
    return w.emit(w.random.choice(ALONG).replace("{d}", str(d)), x)


def whole(w: Writer):
    return w.emit(w.random.choice(WHOLE), pick(w, 1))


def product(w: Writer):
    x, y = pick(w, 1), pick(w, 1)
    return w.emit(
        w.random.choice(["{} @ {}.mT", "{} @ {}", "torch.matmul({}.mT, {})", 'torch.einsum("...i,...i->...", {}, {})']),
        x,
        y,
    )


def layer(w: Writer):
    return w.linear(pick(w, 1), w.random.choice([HIDDEN, 8, 2 * HIDDEN, 6]))


def indexed(w: Writer):
    x = pick(w, 1)
    first = w.shape(x)[0]
    text = w.random.choice(
        [
            "{}[torch.arange({n} - 1, -1, -1)]",
            "{}.index_select(0, torch.arange({n}) // 2)",
            "torch.zeros_like({0}).index_add(0, torch.arange({n}) // 2, {0})",
            "{}.gather(0, torch.zeros_like({0}, dtype=torch.long))",
            "torch.zeros_like({0}).scatter_add(0, torch.zeros_like({0}, dtype=torch.long), {0})",
            "{}[{0}.detach().argmax(0)].mean()",
            "torch.where(torch.arange({n}).view(-1, *[1] * ({0}.dim() - 1)) < 1, {0}, {0} * 0.5)",
            "{0} * F.one_hot(torch.arange({n}) % 2, 2).to({0}.dtype).sum(-1).view(-1, *[1] * ({0}.dim() - 1))",
        ]
    )
    return w.emit(text.replace("{n}", w.size(first)), x)


def shaped(w: Writer):
    """The last dimension in two, two in one, or all in another order."""
    x = pick(w, 2)
    shape = w.shape(x)
    kind = w.random.randrange(3)
    if kind == 0 and shape[-1] % 2 == 0:
        return w.emit("{}.{}({}, 2, {})", x, w.random.choice(["reshape", "view"]), w.sizes(shape[:-1]), shape[-1] // 2)
    if kind == 1:
        return w.emit("{}.flatten(-2)", x)
    order = list(range(len(shape)))
    w.random.shuffle(order)
    return w.emit("{}.permute({})", x, ", ".join(map(str, order)))


def written(w: Writer):
    """A copy, maybe a view of it, written in place; sometimes the copy is read after the view was written."""
    base = w.emit("{}.clone()", pick(w, 1))
    if w.random.random() < 0.3:
        w.emit("{} * 1.5", base)
    view = base
    if w.random.random() < 0.5:
        view = w.emit(
            w.random.choice(["{}.mT", "{}[..., 1:]", "{}.flatten()", "{}[0]", "{}.unsqueeze(0)", "{}.detach()"]), base
        )
    w.run(w.random.choice(WRITES).format(view))
    return w.emit("{} + 0.0", base)


def constant(w: Writer):
    x = pick(w, 1)
    n = w.size(w.shape(x)[-1])
    text = w.random.choice(
        [
            "{} + torch.arange({n}) * 0.1", "{} * torch.ones({n})", "{0} + {0}.new_full(({n},), 0.3)",
            "{} - torch.tensor(0.7)", "{} * torch.linspace(0, 1, {n}).to({0}.dtype)",
            "{} * (torch.arange({n}) % 2 == 0)", "{0} + torch.zeros_like({0})", "{0} * torch.full_like({0}, 2.0)",
            "{} + torch.eye({n}).to({0}.dtype)", "{} * math.sqrt({n})", "{} / {n}",
        ]
    )  # fmt: skip
    return w.emit(text.replace("{n}", n), x)


def parameter(w: Writer):
    x = pick(w, 1)
    size = w.shape(x)[-1]
    if size in (w.b, w.s):
        return None
    return w.emit(w.random.choice(["{} * {}", "{} + {}", "{} * (1 + {})", "{} - {}.square()"]), x, w.gain(size))


def cast(w: Writer):
    x = pick(w)
    there_and_back = w.random.choice(["{}.float().to({0}.dtype)", "{}.to(torch.bfloat16).to({0}.dtype)", "{}.float()"])
    return w.emit(there_and_back, x)


OPERATORS = (
    (unary, 6), (binary, 6), (reduced, 4), (along, 5), (whole, 3), (product, 3), (layer, 3), (indexed, 2), (shaped, 4),
    (written, 3), (constant, 2), (parameter, 2), (cast, 0.4),
)  # fmt: skip


def some_operator(w: Writer):
    functions, weights = zip(*OPERATORS)
    return w.random.choices(functions, weights)[0](w)
