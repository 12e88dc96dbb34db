"""The cost model against published numbers: modelled, published, error. Nothing is run or timed, so the output is the
same everywhere.

    python -m benchmarks.cost_check

Rows marked * were used to set a constant of the model, so their error is no evidence; the median leaves them out.
"""

from __future__ import annotations

import statistics
from typing import Any, Callable

import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import mindspeed_fx
import mindspeed_fx.kernels  # noqa: F401
from mindspeed_fx.cost.collectives import collective_seconds
from mindspeed_fx.cost.graph import Estimate, estimate

ops = torch.ops.mindspeed
FAKE = FakeTensorMode(allow_non_fake_inputs=True)
BF16, GIB = torch.bfloat16, 2**30


def tensor(*shape: int, dtype: torch.dtype = BF16, grad: bool = True) -> torch.Tensor:
    with FAKE:
        return torch.empty(*shape, dtype=dtype, requires_grad=grad)


def trained(function: Callable, *inputs: torch.Tensor, hardware: str) -> Estimate:
    """Forward and backward as eager mode launches them: a kernel for each operator; ``function`` gives a tensor or
    several.
    """

    def step(*args: torch.Tensor) -> Any:
        out = function(*args)
        outs = out if isinstance(out, tuple) else (out,)
        return torch.autograd.grad(outs, [x for x in args if x.requires_grad], [torch.empty_like(o) for o in outs])

    with FAKE:
        return estimate(make_fx(step)(*inputs), hardware)


def forward(function: Callable, *inputs: torch.Tensor, hardware: str) -> Estimate:
    with FAKE:
        return estimate(make_fx(function)(*inputs), hardware)


# --------------------------------------------------------------------------- what models write, and what it becomes


def rms_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def fused_rms_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return ops.rms_norm(x, w, 1e-6, True)[0]


def swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Megatron's core attention with its defaults: the product scales, softmax in the type of the scores."""
    flat = [x.reshape(-1, *x.shape[-2:]) for x in (q, k, v)]
    scores = torch.baddbmm(
        q.new_empty(flat[0].shape[0], q.shape[2], k.shape[2]),
        flat[0],
        flat[1].transpose(1, 2),
        beta=0.0,
        alpha=q.shape[-1] ** -0.5,
    )
    p = torch.softmax(scores.view(*q.shape[:3], -1).masked_fill(mask, -10000.0), -1)
    return torch.bmm(p.view(scores.shape), flat[2]).view(q.shape)


FUSED = {
    "rms_norm": fused_rms_norm,
    "swiglu": lambda x: ops.swiglu(x, None),
    "rope": lambda x, cos, sin: ops.rope(x, cos, sin, False),
    "attention": lambda q, k, v, mask: ops.attention(q, k, v, None, True, q.shape[-1] ** -0.5)[0],
}
COMPOSED = {"rms_norm": rms_norm, "swiglu": swiglu, "rope": rope, "attention": attention}


def llama_step(
    hardware: str,
    composed: str | None,
    s: int = 4096,
    h: int = 4096,
    n: int = 32,
    ffn: int = 11008,
    vocab: int = 32000,
    layers: int = 32,
) -> float:
    """Seconds of a step of Llama2-7B on one card without optimizer: 32 layers and the head; ``composed`` is left as
    models write it.
    """
    use = {k: (COMPOSED if k == composed else FUSED)[k] for k in FUSED}

    def layer(x, n1, n2, qkv, out, up, down, cos, sin, mask):
        q, k, v = F.linear(use["rms_norm"](x, n1), qkv).view(1, s, 3, n, h // n).permute(2, 0, 3, 1, 4)
        a = use["attention"](use["rope"](q, cos, sin), use["rope"](k, cos, sin), v, mask)
        x = x + F.linear(a.transpose(1, 2).reshape(1, s, h), out)
        return x + F.linear(use["swiglu"](F.linear(use["rms_norm"](x, n2), up)), down)

    weights = [tensor(*w) for w in ((1, s, h), (h,), (h,), (3 * h, h), (h, h), (2 * ffn, h), (h, ffn))]
    angles = [tensor(s, h // n, grad=False) for _ in range(2)]
    one = trained(layer, *weights, *angles, tensor(1, 1, s, s, dtype=torch.bool, grad=False), hardware=hardware).seconds
    head = trained(
        lambda x, w, t: F.cross_entropy(F.linear(x, w).float(), t),
        tensor(s, h),
        tensor(vocab, h),
        tensor(s, dtype=torch.int64, grad=False),
        hardware=hardware,
    ).seconds
    return layers * one + head


# --------------------------------------------------------------------------- rows


def rows() -> list[tuple[str, str, float, float, str, str]]:
    """(section, what, published, modelled, unit, source); a * at the end of what: used to set a constant."""
    results = []

    def add(section: str, what: str, published: float, modelled: float, unit: str, source: str) -> None:
        results.append((section, what, published, modelled, unit, source))

    section = "NVIDIA, operators"
    rms = tensor(2048, 32768), tensor(32768)
    fused, eager = (trained(f, *rms, hardware="a100").seconds * 1e3 for f in (fused_rms_norm, rms_norm))
    add(section, "RMSNorm fwd+bwd 2048x32768 bf16 A100, fused", 1.23, fused, "ms", "Liger CSV")
    add(section, "  the same in eager", 6.91, eager, "ms", "Liger CSV, HF")
    wide = tensor(32768, 8192, dtype=torch.float32), tensor(8192, dtype=torch.float32)
    one, many = (forward(f, *wide, hardware="h100") for f in (fused_rms_norm, rms_norm))
    add(
        section,
        "RMSNorm fwd H100, fused * (QuACK; fp32 assumed)",
        3.03,
        one.bytes / one.seconds / 1e12,
        "TB/s",
        "HF bench",
    )
    add(section, "  eager: bytes of the fused one / time", 0.78, one.bytes / many.seconds / 1e12, "TB/s", "HF bench")
    gated = tensor(8192, 65536)
    add(
        section,
        "SwiGLU fwd+bwd 8192 x 2*32768 bf16 H100, fused",
        1.91,
        trained(FUSED["swiglu"], gated, hardware="h100").seconds * 1e3,
        "ms",
        "Liger CSV",
    )
    add(
        section,
        "  the same in eager",
        4.57,
        trained(swiglu, gated, hardware="h100").seconds * 1e3,
        "ms",
        "Liger CSV, torch",
    )
    norm = (
        tensor(2048, 32768, dtype=torch.float32),
        tensor(2048, 32768, dtype=torch.float32),
        tensor(32768, dtype=torch.float32),
    )

    eager, fused = (
        trained(f, *norm, hardware="h100").seconds
        for f in (
            lambda x, r, w: (rms_norm(x + r, w), x + r),
            lambda x, r, w: ops.add_rms_norm(x, r, w, 1e-6, True)[:2],
        )
    )
    add(
        section,
        "add + RMSNorm fwd+bwd fp32 H100, eager / fused",
        3.63 / 1.55,
        eager / fused,
        "x",
        "Liger CSV; rows assumed long",
    )
    product = lambda x, w, t: F.cross_entropy(F.linear(x, w).float(), t)  # noqa: E731
    chunked = lambda x, w, t: ops.linear_cross_entropy(x, w, None, t)  # noqa: E731
    head = tensor(32768, 4096), tensor(128256, 4096), tensor(32768, dtype=torch.int64, grad=False)
    add(
        section,
        "linear + cross-entropy 32768x4096x128256 bf16 A100, eager",
        452,
        trained(product, *head, hardware="a100").seconds * 1e3,
        "ms",
        "Liger CSV",
    )
    add(
        section,
        "  fused in chunks",
        511,
        trained(chunked, *head, hardware="a100").seconds * 1e3,
        "ms",
        "Liger CSV; its chunks differ",
    )
    heads = [tensor(1, 16, 16384, 128) for _ in range(3)]
    result = forward(lambda q, k, v: ops.attention(q, k, v, None, False, 0.1)[0], *heads, hardware="h100")
    add(
        section,
        "attention fwd head 128, 16K, H100",
        740,
        result.flops / result.seconds / 1e12,
        "TFLOP/s",
        "FlashAttention-3 paper",
    )

    section = "Ascend, operators"
    square = [tensor(8192, 8192) for _ in range(2)]
    result = forward(lambda a, b: a @ b, *square, hardware="ascend910b1")
    add(section, "matrix product bf16 910B", 328, result.flops / result.seconds / 1e12, "TFLOP/s", "limulidae")
    result = forward(
        lambda a, b: a @ b, *[tensor(8192, 8192, dtype=torch.float32) for _ in range(2)], hardware="ascend910b1"
    )
    add(section, "matrix product fp32 910B", 87, result.flops / result.seconds / 1e12, "TFLOP/s", "limulidae")
    result = forward(lambda q, k, v: ops.attention(q, k, v, None, False, 0.1)[0], *heads, hardware="ascend910b2")
    add(
        section,
        "attention fwd head 128, 16K, 910B2",
        123,
        result.flops / result.seconds / 1e12,
        "TFLOP/s",
        "vendor's kernel, pto-isa README",
    )

    section = "Ascend, collectives on 8, 4, 2 cards of a 910B machine (tensor bytes / time)"
    for kind, published in (("all_gather", (149, 64, 38)), ("all_reduce", (72, 30, 18))):
        for ranks, rate in zip((8, 4, 2), published):
            add(
                section,
                f"{kind} over {ranks} cards *",
                rate,
                GIB / collective_seconds(kind, GIB, ranks, "ascend910b1") / 1e9,
                "GB/s",
                "limulidae",
            )

    section = (
        "Ascend, gains of a Llama2-7B step, all else fused (sequence 4096, one sequence, one 910B2, no "
        "optimizer: assumed)"
    )
    base = llama_step("ascend910b2", None)
    for name, what, gain in (
        ("attention", "FlashAttention", 34.0),
        ("swiglu", "SwiGLU", 4.7),
        ("rms_norm", "RMSNorm", 2.7),
        ("rope", "RoPE", 1.0),
    ):
        add(section, what, gain, (llama_step("ascend910b2", name) / base - 1) * 100, "% gain", "MindSpeed docs")
    # Unfused, the product writes dW in bf16 and a kernel adds it to the float32 sum; fused, the product adds.
    weights = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 32000 * 4096
    from mindspeed_fx.cost.hardware import hardware

    hw = hardware("ascend910b2")
    add(
        section,
        "weight gradients added in float32",
        2.0,
        (weights * 4 / hw.memory_rate + (32 * 5 + 1) * hw.launch) / base * 100,
        "% gain",
        "MindSpeed docs",
    )
    return results


def main() -> None:
    print(
        f"mindspeed_fx {mindspeed_fx.__version__}: modelled against published; nothing was run. * set a constant of "
        "the model\n"
    )
    result, last = rows(), ""
    for section, what, published, modelled, unit, source in result:
        if section != last:
            print(f"{section}\n  {'':<62}{'published':>10}{'modelled':>10}{'error':>8}")
        last = section
        print(
            f"  {what:<62}{published:>10.2f}{modelled:>10.2f}{(modelled / published - 1) * 100:>+7.0f}%  {unit} "
            f"({source})"
        )
    for label, chosen in (
        ("times and rates", [r for r in result if "gain" not in r[4]]),
        ("gains", [r for r in result if "gain" in r[4]]),
    ):
        errors = [abs(m / p - 1) * 100 for _, what, p, m, *_ in chosen if "*" not in what]
        print(
            f"\n{label}: median error {statistics.median(errors):.0f} %, largest {max(errors):.0f} % of {len(errors)} "
            "(without *)",
            end="",
        )
    print()


if __name__ == "__main__":
    main()
