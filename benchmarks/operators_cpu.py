"""Every fused operator on CPU against what Inductor makes of the unfused form: forward and backward, over a grid of
shapes.

    python -m benchmarks.operators_cpu [--rounds 11] [--only attention]

The same function is compiled twice, with backend "inductor" and with backend "mindspeed", and timed interleaved.
"""

from __future__ import annotations

import math
import statistics
from typing import Callable

import torch
import torch.nn.functional as F

from benchmarks import common


def rms_norm(x, w):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w


def add_rms_norm(x, r, w):
    s = x + r
    return rms_norm(s, w) + s


def swiglu(gate, up):
    return F.silu(gate) * up


def geglu(x, g, u):
    return F.gelu(x @ g) * (x @ u)


def rope(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def attention(q, k, v, window=0, cap=0.0):
    groups, s = q.shape[1] // k.shape[1], q.shape[2]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if cap:
        scores = torch.tanh(scores / cap) * cap
    keep = torch.ones(s, s, dtype=torch.bool).tril()
    keep = keep.triu(1 - window) if window else keep
    return scores.masked_fill(~keep, float("-inf")).softmax(-1) @ v


def cross_entropy(logits, target):
    return F.cross_entropy(logits.float(), target)


def cases():
    for rows, width in ((1024, 512), (4096, 2048), (512, 8192)):
        yield "rms_norm", (rows, width), rms_norm, [(rows, width), (width,)]
        yield "add_rms_norm", (rows, width), add_rms_norm, [(rows, width), (rows, width), (width,)]
        yield "swiglu", (rows, width), swiglu, [(rows, width), (rows, width)]
    yield "geglu", (1024, 512, 1408), geglu, [(1024, 512), (512, 1408), (512, 1408)]
    for batch, heads, seq, dim in ((2, 8, 512, 64), (1, 32, 2048, 128)):
        yield "rope", (batch, heads, seq, dim), rope, [(batch, heads, seq, dim), (1, 1, seq, dim), (1, 1, seq, dim)]
    for b, h, kv, s, d in ((2, 8, 4, 256, 64), (2, 8, 4, 512, 64), (1, 8, 8, 1024, 128), (1, 8, 2, 2048, 64)):
        yield "attention", (b, h, kv, s, d), attention, [(b, h, s, d), (b, kv, s, d), (b, kv, s, d)]
        yield (
            "attention, window 128",
            (b, h, kv, s, d),
            lambda q, k, v: attention(q, k, v, window=128),
            [(b, h, s, d), (b, kv, s, d), (b, kv, s, d)],
        )
        yield (
            "attention, soft-cap",
            (b, h, kv, s, d),
            lambda q, k, v: attention(q, k, v, cap=30.0),
            [(b, h, s, d), (b, kv, s, d), (b, kv, s, d)],
        )
    for tokens, vocab in ((1024, 8192), (1024, 32768), (512, 128256)):
        yield "cross_entropy", (tokens, vocab), cross_entropy, [(tokens, vocab), tokens]


def step_of(f: Callable, backend: str, inputs: list[torch.Tensor]) -> common.Step:
    torch._dynamo.reset()
    compiled = torch.compile(f, backend=backend)
    leaves = [x for x in inputs if x.requires_grad]
    grad = torch.randn_like(f(*inputs))

    def step() -> None:
        torch.autograd.grad(compiled(*inputs), leaves, grad)

    return step


def main() -> None:
    args = common.arguments(rounds=11, only="")
    common.header("fused operators on CPU, forward and backward, float32")
    ratios: dict[str, list[float]] = {}
    for name, shape, f, shapes in cases():
        if args.only not in name:
            continue
        inputs = [
            torch.randn(s).requires_grad_(name != "rope" or i == 0)
            if isinstance(s, tuple)
            else torch.randint(shapes[0][1], (s,))
            for i, s in enumerate(shapes)
        ]
        steps = {b: step_of(f, b, inputs) for b in ("inductor", "mindspeed")}
        once = statistics.median(common.interleaved(steps, 5)["inductor"])
        times = common.interleaved(steps, max(args.rounds, min(200, round(0.2 / once))))  # short calls are noisy
        a, b = (statistics.median(times[n]) * 1e3 for n in ("inductor", "mindspeed"))
        ratios.setdefault(name.split(",")[0], []).append(b / a)
        print(f"{name:<24}{str(shape):<26}{a:>10.2f} ms{b:>10.2f} ms{b / a:>8.3f}", flush=True)
    for name, result in ratios.items():
        print(f"{name}: geometric mean {math.exp(statistics.mean(map(math.log, result))):.3f}, worst {max(result):.3f}")


if __name__ == "__main__":
    main()
