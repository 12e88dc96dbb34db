"""Arguments for the Triton kernels, and their distance from the operators' float64 references; used on CPU and CUDA
alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable

import torch

import mindspeed_fx.kernels  # noqa: F401
from mindspeed_fx.report import recorder

ops = torch.ops.mindspeed

TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Two roundings of the type; for bfloat16 two truncations, which is what Triton's interpreter does."""


@dataclass(frozen=True)
class Case:
    name: str
    operator: str
    make: Callable[[Callable[..., torch.Tensor]], tuple]
    """From a maker of random tensors, ``new(*shape)``, to the arguments of the forward."""
    backward: Callable[[tuple, tuple, torch.Tensor], tuple] | None
    """From arguments, results and the gradient of the first result to the arguments of the backward; None: it has
    none."""
    rounded: bool = False
    """What float32 results are made from was rounded to the type of the inputs on its way."""
    roundings: int = 1
    """Tolerances allowed: results that one kernel of several leaves to the next are rounded too."""


def rms_norm(
    name: str, rows: int, hidden: int, weight: bool = True, cast_first: bool = False, strided: bool = False
) -> Case:
    def make(new):
        x = new(rows, 2 * hidden)[:, hidden:] if strided else new(rows, hidden)
        return x, new(hidden) if weight else None, 1e-5, cast_first

    return Case(
        f"rms_norm-{name}",
        "rms_norm",
        make,
        lambda args, out, grad: (grad, args[0], args[1], out[1], cast_first, weight),
    )


def exact_sum(x: torch.Tensor) -> torch.Tensor:
    """Eighths, whose sum 16 bits hold: statistics of a rounded sum are not those of float64."""
    return (x * 8).round() / 8


def add_rms_norm(
    name: str,
    rows: int,
    hidden: int,
    weight: bool = True,
    cast_first: bool = False,
    strided: bool = False,
    used: bool = True,
) -> Case:
    def make(new):
        residual = new(rows, 2 * hidden)[:, hidden:] if strided else new(rows, hidden)
        return exact_sum(new(rows, hidden)), exact_sum(residual), new(hidden) if weight else None, 1e-5, cast_first

    def backward(args, out, grad):
        return grad, grad.flip(0) if used else None, out[1], args[2], out[2], cast_first, weight

    return Case(f"add_rms_norm-{name}", "add_rms_norm", make, backward)


def layer_norm(
    name: str, rows: int, hidden: int, weight: bool = True, bias: bool = True, strided: bool = False
) -> Case:
    def make(new):
        x = new(rows, 2 * hidden)[:, hidden:] if strided else new(rows, hidden)
        return x + 3, new(hidden) if weight else None, new(hidden) if bias else None, 1e-5

    return Case(
        f"layer_norm-{name}",
        "layer_norm",
        make,
        lambda args, out, grad: (grad, args[0], args[1], *out[1:], weight, bias),
    )


def add_layer_norm(name: str, rows: int, hidden: int, used: bool = True) -> Case:
    def make(new):
        return exact_sum(new(rows, hidden)), exact_sum(new(rows, hidden)), new(hidden), new(hidden), 1e-5

    return Case(
        f"add_layer_norm-{name}",
        "add_layer_norm",
        make,
        lambda args, out, grad: (grad, grad.flip(0) if used else None, out[1], args[2], *out[2:], True, True),
    )


def swiglu(name: str, rows: int, ffn: int, up: bool, strided: bool = False) -> Case:
    def make(new):
        if strided:
            return new(rows, 2, ffn).unbind(1)
        return (new(rows, ffn), new(rows, ffn)) if up else (new(2, rows // 2, 2 * ffn),)

    return Case(f"swiglu-{name}", "swiglu", make, lambda args, out, grad: (grad, *args))


def glu(name: str, activation: str, rows: int, ffn: int, up: bool) -> Case:
    def make(new):
        return (2 * new(rows, ffn), new(rows, ffn), activation) if up else (2 * new(rows, 2 * ffn), None, activation)

    return Case(f"glu-{name}", "glu", make, lambda args, out, grad: (grad, *args))


def rope(name: str, x: tuple, angles: tuple, interleaved: bool, transposed: bool = False) -> Case:
    def make(new):
        return (new(*x).transpose(1, 2) if transposed else new(*x)), new(*angles), new(*angles), interleaved

    return Case(f"rope-{name}", "rope", make, lambda args, out, grad: (grad, *args, False))


def causal_conv1d(name: str, x: tuple, size: int, silu: bool, bias: bool = True, channels_last: bool = True) -> Case:
    def make(new):
        batch, channels, seq = x
        first = new(batch, seq, channels).transpose(1, 2) if channels_last else new(batch, channels, seq)
        return first, new(channels, size), new(channels) if bias else None, silu

    return Case(f"causal_conv1d-{name}", "causal_conv1d", make, lambda args, out, grad: (grad, *args))


def rope_pair(name: str, q: tuple, k: tuple, angles: tuple, interleaved: bool, backward: bool) -> Case:
    def make(new):
        return new(*q).transpose(1, 2), new(*k).transpose(1, 2), new(*angles), new(*angles), interleaved, backward

    return Case(f"rope_pair-{name}", "rope_pair", make, None)


def attention_lse(name: str, batch: int, heads: int, seq: int) -> Case:
    def make(new):
        top, total = new(batch, heads, seq, 1), new(batch, heads, seq, 1).abs() + 1
        return top.expand(-1, -1, -1, 8).contiguous(), total.expand(-1, -1, -1, 8).contiguous()

    return Case(f"attention_lse-{name}", "attention_lse", make, None)


def qk_norm_rope(
    name: str, x: tuple, angles: tuple, interleaved: bool, weight: bool = True, transposed: bool = False
) -> Case:
    def make(new):
        whole = new(*x[:-2], 2 * x[-2], x[-1])[..., x[-2] :, :]  # some heads of a joint projection
        return (
            (whole.transpose(1, 2) if transposed else whole),
            new(x[-1]) if weight else None,
            new(*angles),
            new(*angles),
            1e-5,
            False,
            interleaved,
        )

    return Case(
        f"qk_norm_rope-{name}",
        "qk_norm_rope",
        make,
        lambda args, out, grad: (grad, *args[:2], out[1], *args[2:4], interleaved, weight),
    )


def cross_entropy(
    name: str,
    tokens: int,
    vocab: int,
    smoothing: float = 0.0,
    ignored: int | None = None,
    strided: bool = False,
    mean: bool = False,
) -> Case:
    def make(new):
        logits = 2 * (new(tokens, vocab + 5)[:, :vocab] if strided else new(tokens, vocab))
        logits[0, : vocab // 2] = float("-inf") if not smoothing else 0.0
        target = (torch.arange(tokens) * 7919 + vocab - 1).remainder(vocab)
        if ignored is not None:
            target[1::3] = ignored
        return logits, target.to(logits.device), -100 if ignored is None else ignored, smoothing

    def backward(args, out, grad):
        # The gradient of a mean is one number, expanded.
        return (grad[:1].expand(tokens) if mean else grad, args[0], args[1], out[1], *args[2:])

    return Case(f"cross_entropy-{name}", "cross_entropy", make, backward)


def dropout_add(name: str, rows: int, hidden: int, p: float, bias: bool = True, strided: bool = False) -> Case:
    def make(new):
        x = new(rows, 2 * hidden)[:, hidden:] if strided else new(rows, hidden)
        # The second number makes 32-bit words wrap; the first is the largest there is.
        return (
            x,
            new(hidden) if bias else None,
            new(rows, hidden),
            torch.tensor([2**31 - 2, 1234567890], dtype=torch.int32, device=x.device),
            p,
        )

    return Case(f"dropout_add_seeded-{name}", "dropout_add_seeded", make, lambda args, out, grad: (grad, args[3], p))


def moe_unpermute(name: str, tokens: int, k: int, hidden: int, probs: bool = True) -> Case:
    def make(new):
        order = torch.randperm(tokens * k, generator=torch.Generator().manual_seed(1))
        x = new(tokens * k, hidden)
        return x, order.to(x.device), new(tokens, k) if probs else None, k

    return Case(
        f"moe_unpermute-{name}", "moe_unpermute", make, lambda args, out, grad: (grad, args[0], args[1], args[2], k)
    )


def linear_cross_entropy(
    name: str,
    tokens: int,
    hidden: int,
    vocab: int,
    bias: bool = False,
    settings: tuple[float, float, float] = (0.0, 0.0, 0.0),
) -> Case:
    """A loss per token: the forward makes losses alone, the backward gradients with an upstream gradient each."""

    def make(new):
        target = (torch.arange(tokens) * 7919).remainder(vocab)
        target[1] = -100
        x, weight = new(tokens, hidden), new(vocab, hidden) / hidden**0.5
        return x, weight, new(vocab) if bias else None, target.to(x.device), -100, *settings

    return Case(
        f"linear_cross_entropy-{name}",
        "linear_cross_entropy_tokens",
        make,
        lambda args, out, grad: (grad, *args, [True, True, bias]),
        rounded=True,
    )


def gated_delta_rule(
    name: str,
    batch: int,
    key_heads: int,
    heads: int,
    seq: int,
    widths: tuple[int, int],
    whole: bool,
    chunk: int,
    turned: bool = False,
) -> Case:
    """``whole``: with gates, a norm and a first state; ``turned``: the sequence is stored last, as by a convolution."""
    eps = 1e-6 if whole else None

    def make(new):
        q, k = (new(batch, seq, key_heads, widths[0]).transpose(1, 2) / widths[0] ** 0.5 for _ in range(2))
        v, state = new(batch, seq, heads, widths[1]).transpose(1, 2), new(batch, heads, *widths)
        g, beta = (new(batch, seq, heads).transpose(1, 2) for _ in range(2))
        q, k, v = (x.transpose(2, 3).contiguous().transpose(2, 3) if turned else x for x in (q, k, v))
        return q, k, v, -g.abs() if whole else None, beta.sigmoid(), state if whole else None, 0.5, eps, chunk

    def backward(args, out, grad):
        return grad, out[1].flip(0) if whole else None, out[2], *args

    return Case(f"gated_delta_rule-{name}", "gated_delta_rule", make, backward, rounded=True, roundings=2)


def ssd(
    name: str, batch: int, groups: int, heads: int, seq: int, widths: tuple[int, int], whole: bool, chunk: int
) -> Case:
    """``whole``: with a skip and a first state."""

    def make(new):
        x, dt = new(batch, seq, heads, widths[0]), new(batch, seq, heads).sigmoid()
        b, c = (new(batch, seq, groups, 2 * widths[1])[..., widths[1] :] for _ in range(2))
        skip, state = (new(heads), new(batch, heads, *widths)) if whole else (None, None)
        return x, dt, -new(heads).abs(), b / widths[1] ** 0.5, c, skip, state, chunk

    def backward(args, out, grad):
        return grad, out[1].flip(0) if whole else None, out[2], *args

    return Case(f"ssd-{name}", "ssd", make, backward, rounded=True, roundings=2)


def selective_scan(name: str, batch: int, channels: int, n: int, seq: int, whole: bool) -> Case:
    """``whole``: with a skip, a gate, a bias, a softplus and a first state; memory's last dimension are the channels
    there, else the sequence."""

    def make(new):
        def rows(width):
            return new(batch, seq, 2 * width)[..., width:].transpose(1, 2) if whole else new(batch, width, seq)

        u, dt, b, c = rows(channels), rows(channels), rows(n), rows(n)
        rest = new(channels), rows(channels), new(channels), new(batch, channels, n)
        rest = rest if whole else (None,) * 4
        return u, dt if whole else dt.sigmoid(), -new(channels, n).abs(), b, c, *rest, whole

    def backward(args, out, grad):
        return grad, out[1].flip(0) if whole else None, out[2], *args

    return Case(f"selective_scan-{name}", "selective_scan", make, backward, rounded=True, roundings=2)


def sinkhorn_knopp(name: str, shape: tuple, iterations: int) -> Case:
    def make(new):
        return new(*shape), iterations, 1e-6

    return Case(f"sinkhorn_knopp-{name}", "sinkhorn_knopp", make, lambda args, out, grad: (grad, *args), rounded=True)


CASES = [
    rms_norm("narrow", 300, 64),
    rms_norm("odd", 37, 100, cast_first=True),
    rms_norm("three", 5, 3),
    rms_norm("plain", 7, 1000, weight=False),
    rms_norm("strided", 9, 300, strided=True),
    rms_norm("row", 8, 4096, cast_first=True),
    rms_norm("wide-backward", 10, 9001),
    rms_norm("wide-backward-cast-first", 10, 9001, cast_first=True),
    rms_norm("wide", 5, 33000, cast_first=True),
    rms_norm("wide-plain", 4, 33000, weight=False),
    add_rms_norm("narrow", 30, 64),
    add_rms_norm("odd", 9, 1001, cast_first=True, strided=True),
    add_rms_norm("alone", 7, 300, weight=False, used=False),
    add_rms_norm("wide", 4, 33000),
    layer_norm("narrow", 30, 64),
    layer_norm("odd", 9, 1001, bias=False, strided=True),
    layer_norm("plain", 7, 300, weight=False, bias=False),
    layer_norm("wide-backward", 6, 5003),
    layer_norm("wide", 4, 17000, weight=False),
    add_layer_norm("row", 6, 768),
    add_layer_norm("wide", 4, 17000, used=False),
    swiglu("two", 9, 1000, True),
    swiglu("packed", 8, 1001, False),
    swiglu("blocks", 4, 5003, True),
    swiglu("blocks-packed", 4, 5003, False),
    swiglu("strided", 7, 300, True, strided=True),
    glu("gelu", "gelu", 5, 1000, True),
    glu("gelu-packed", "gelu", 3, 301, False),
    glu("tanh", "gelu_tanh", 5, 5003, True),
    glu("relu", "relu", 5, 64, True),
    glu("sigmoid", "sigmoid", 5, 64, False),
    rope("half-sbhd", (6, 2, 5, 64), (6, 1, 1, 64), False),
    rope("half-bhsd", (2, 5, 6, 64), (1, 1, 6, 64), False),
    rope("half-transposed", (2, 6, 5, 64), (2, 1, 6, 64), False, transposed=True),
    rope("interleaved-sbhd", (6, 2, 5, 48), (6, 1, 1, 48), True),
    rope("interleaved-bhsd", (2, 5, 6, 48), (6, 48), True),
    rope("many-heads", (5, 1, 40, 256), (5, 1, 1, 256), False),
    rope("tokens", (70, 6), (70, 6), True),
    causal_conv1d("channels-last", (2, 150, 70), 4, True),
    causal_conv1d("seq-last", (1, 40, 200), 3, True, bias=False, channels_last=False),
    causal_conv1d("plain", (2, 33, 5), 2, False),
    rope_pair("half", (2, 6, 5, 64), (2, 6, 2, 64), (2, 1, 6, 64), False, False),
    rope_pair("one-key-head", (1, 7, 3, 48), (1, 7, 1, 48), (1, 1, 7, 48), True, True),
    attention_lse("odd", 2, 5, 70),
    attention_lse("heads", 1, 32, 33),
    qk_norm_rope("sbhd", (6, 2, 5, 64), (6, 1, 1, 64), False),
    qk_norm_rope("transposed", (2, 6, 5, 128), (2, 1, 6, 128), False, transposed=True),
    qk_norm_rope("partial", (2, 6, 3, 80), (1, 1, 6, 32), False, transposed=True),
    qk_norm_rope("interleaved-partial", (6, 2, 40, 96), (6, 1, 1, 64), True),
    qk_norm_rope("plain", (7, 5, 48), (7, 1, 48), True, weight=False),
    cross_entropy("small", 7, 7, ignored=-100),
    cross_entropy("odd", 10, 1000, 0.1, ignored=3),
    cross_entropy("blocks", 5, 50257, ignored=-1),
    cross_entropy("blocks-smooth", 4, 12289, 0.2, mean=True),
    cross_entropy("widest", 4, 2**18),
    cross_entropy("strided", 8, 5003, ignored=-100, strided=True),
    linear_cross_entropy("plain", 9, 32, 1000),
    linear_cross_entropy("all", 7, 32, 5003, True, (0.1, 0.01, 5.0)),
    moe_unpermute("row", 6, 2, 1024),
    moe_unpermute("odd", 5, 3, 1001),
    moe_unpermute("blocks-plain", 3, 2, 5003, probs=False),
    dropout_add("row", 9, 4096, 0.1),
    dropout_add("odd", 30, 1001, 0.5, bias=False),
    dropout_add("blocks", 4, 5003, 0.0, strided=True),
    gated_delta_rule("shared", 1, 1, 2, 70, (12, 20), True, 16),
    gated_delta_rule("plain", 1, 1, 1, 16, (16, 16), False, 4),
    gated_delta_rule("turned", 1, 2, 2, 24, (8, 16), True, 8, turned=True),
    ssd("shared", 1, 1, 18, 40, (12, 20), True, 8),
    ssd("plain", 1, 2, 4, 70, (40, 16), False, 64),
    selective_scan("whole", 2, 35, 5, 43, True),
    selective_scan("plain", 1, 16, 16, 20, False),
    sinkhorn_knopp("streams", (3, 50, 4, 4), 5),
    sinkhorn_knopp("once", (7, 8, 8), 1),
]


def in_turn(case: Case) -> torch.dtype:
    """The type in which the default run has a case: every type comes in turn; the others are run with the slow
    tests.
    """
    types = list(TOLERANCE)
    return types[CASES.index(case) % len(types)]


def distances(case: Case, dtype: torch.dtype, device: str) -> dict[str, float]:
    """Result -> largest error against float64, in tolerances of its size; at most 1 when all is well."""
    generator = torch.Generator().manual_seed(0)

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).to(device)

    args = case.make(new)
    exact = tuple(map(_double, args))
    own = "_triton" if hasattr(ops, f"{case.operator}_triton") else ""  # else the operator launches it on its way
    have, want = _run(case.operator + own, args), _run(case.operator, exact)
    to = dtype if case.rounded else None
    allowed = case.roundings if dtype != torch.float32 else 1
    found = {f"out{i}": _distance(h, w, to) / allowed for i, (h, w) in enumerate(zip(have, want, strict=True))}
    if case.backward is None:
        return found
    grad = new(*have[0].shape).to(have[0].dtype)
    have = _run(f"{case.operator}_backward{own}", case.backward(args, have, grad))
    want = _run(case.operator + "_backward", case.backward(exact, want, _double(grad)))
    return found | {
        f"grad{i}": _distance(h, w, to) / allowed for i, (h, w) in enumerate(zip(have, want, strict=True)) if w.numel()
    }


def equal_shares(weight: torch.dtype, device: str) -> dict[str, float]:
    """Share of RMSNorm's float16 elements that are, bit for bit, the reference's in the same types: by ``cast_first``
    of the kernel and of the reference. The order of the two roundings shows here, and nowhere else."""
    x, w = torch.randn(16, 512).to(device, torch.float16), (torch.rand(512) + 0.5).to(device, weight)
    kernel, reference = (
        {flag: op(x, w, 1e-5, flag)[0] for flag in (True, False)} for op in (ops.rms_norm_triton, ops.rms_norm)
    )
    assert all(kernel[flag].dtype == reference[flag].dtype for flag in kernel)
    return {f"{a}-{b}": (kernel[a] == reference[b]).float().mean().item() for a in kernel for b in reference}


def without_rows(device: str) -> list[list[int]]:
    """Shapes that the kernels return for no rows at all; the gradient of the weight must be zero."""
    x, w = torch.empty(0, 64, device=device), torch.ones(64, device=device)
    y, rstd = ops.rms_norm_triton(x, w, 1e-5, True)
    dx, dw = ops.rms_norm_backward_triton(y, x, w, rstd, True, True)
    assert not dw.any()
    wide = torch.empty(0, 9000, device=device)
    dwide = ops.rms_norm_backward_triton(wide, wide, wide.sum(0), rstd, True, True)[1]
    loss, lse = ops.cross_entropy_triton(x, torch.empty(0, dtype=torch.int64, device=device), -100, 0.0)
    rotated = ops.rope_triton(x[:, None], x[:, None], x[:, None], False)
    return [list(t.shape) for t in (y, rstd, dx, dw, dwide, ops.swiglu_triton(x), loss, lse, rotated)]


def far_apart(device: str) -> list[bool]:
    """Whether a convolution and its gradients are the same where tokens lie 2**25 elements apart, so that the 65th
    one's place takes more than 31 bits. Of the memory only what is touched is taken.
    """
    from mindspeed_fx.kernels.triton import causal_conv1d

    near, w = torch.randn(1, 70, 5, device=device).bfloat16().transpose(1, 2), torch.randn(5, 2, device=device)
    room = torch.empty(70 * 2**25, dtype=torch.bfloat16, device=device)
    far = room.as_strided((1, 5, 70), (room.numel(), 1, 2**25)).copy_(near)
    results = [
        [causal_conv1d.forward(x, w, None, True), *causal_conv1d.backward(x, x, w, None, True)] for x in (far, near)
    ]
    # The order in which tokens are summed for the weight's gradient follows how the tokens are stored.
    return [a is b is None or torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(*results, strict=True)]


def adamw(device: str) -> dict[str, float]:
    """Distances of three steps of the kernel from torch's optimizer in float64, of the weights, the moments and the
    copy.
    """
    from mindspeed_fx.kernels.adamw import adamw_, unable

    n, settings = 5003, {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    weight = torch.randn(n, dtype=torch.float64).float()
    want = torch.nn.Parameter(weight.double())
    optimizer = torch.optim.AdamW([want], **settings)
    weight, m, v = weight.to(device), torch.zeros(n, device=device), torch.zeros(n, device=device)
    copy = torch.empty(n, dtype=torch.bfloat16, device=device)
    for step in range(1, 4):
        grad = torch.randn(n).to(device, torch.bfloat16)
        assert unable(weight, grad, m, v, copy) is None
        adamw_(weight, grad, m, v, copy, step=step, grad_scale=0.5, **settings)
        want.grad = 0.5 * grad.double().cpu()
        optimizer.step()
    state = optimizer.state[want]
    pairs = {
        "weight": (weight, want),
        "exp_avg": (m, state["exp_avg"]),
        "exp_avg_sq": (v, state["exp_avg_sq"]),
        "copy": (copy, want),
    }
    return {name: _distance(have.cpu(), w.detach()) for name, (have, w) in pairs.items()}


class Model(torch.nn.Module):
    """A norm, a gated product, a rotation and a loss, spelled as models spell them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(32) + 0.5)
        self.up = torch.nn.Linear(32, 128)
        self.head = torch.nn.Linear(64, 50)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight
        gate, up = self.up(x).chunk(2, -1)
        x = (torch.nn.functional.silu(gate) * up).unflatten(-1, (4, 16)).transpose(1, 2)
        a, b = x.chunk(2, -1)
        x = x * cos + torch.cat((-b, a), -1) * sin
        return torch.nn.functional.cross_entropy(
            self.head(x.transpose(1, 2).flatten(2)).flatten(0, 1), target.flatten()
        )


def through_the_backend(device: str, options: dict) -> dict[str, Any]:
    """The kernels chosen for :class:`Model`, and the largest error of its loss and gradients against eager."""
    torch.manual_seed(0)
    model = Model().to(device)
    inputs = [
        t.to(device) for t in (torch.randn(2, 6, 32), torch.randn(6, 16), torch.randn(6, 16), torch.randint(50, (2, 6)))
    ]

    def gradients(run: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        loss = run(*inputs)
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    torch._dynamo.reset()
    with recorder.collecting() as records:
        have = gradients(torch.compile(model, backend="mindspeed", options=options))
    error = max((h - w).abs().max().item() for h, w in zip(have, gradients(model), strict=True))
    return {
        "kernels": sorted({f"{row['operator']}: {row['kernel']}" for r in records for row in r.lowered}),
        "error": error,
    }


def _run(name: str, args: tuple) -> tuple[torch.Tensor, ...]:
    out = getattr(ops, name)(*args)
    return out if isinstance(out, tuple) else (out,)


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _distance(have: torch.Tensor, want: torch.Tensor, rounded: torch.dtype | None = None) -> float:
    assert have.shape == want.shape and [s for s, n in zip(have.stride(), have.shape) if n > 1] == [
        s for s, n in zip(want.stride(), want.shape) if n > 1
    ]
    # -inf logits have an infinite loss where they are the target: equal infinities are no distance.
    size = want.abs() + want[want.isfinite()].square().mean().sqrt()
    error = torch.where(have.double() == want, 0.0, (have.double() - want).abs() / size)
    return (error / TOLERANCE[rounded or have.dtype]).max().item()
