"""Arguments of operators that have Triton kernels, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

import torch

ops = torch.ops.mindspeed


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


def kimi_delta_attention(
    name: str, batch: int, heads: int, seq: int, widths: tuple[int, int], whole: bool, strength: float = 1.0
) -> Case:
    """``whole``: with a norm and a first state, gates in float32, the sequence of q and g stored last; ``strength`` of
    the gates of every other channel."""

    def make(new):
        q, k, g = (new(batch, seq, heads, widths[0]).transpose(1, 2) / widths[0] ** 0.5 for _ in range(3))
        q, g = (x.transpose(2, 3).contiguous().transpose(2, 3) if whole else x for x in (q, g))
        g[..., ::2] *= strength
        v, beta = new(batch, seq, heads, widths[1]).transpose(1, 2), new(batch, seq, heads).transpose(1, 2)
        state, eps = (new(batch, heads, *widths), 1e-6) if whole else (None, None)
        return q, k, v, -g.abs().to(torch.float32 if whole else g.dtype), beta.sigmoid(), state, 0.5, eps

    def backward(args, out, grad):
        return grad, out[1].flip(0) if whole else None, out[2], *args

    return Case(f"kimi_delta_attention-{name}", "kimi_delta_attention", make, backward, rounded=True, roundings=2)


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
