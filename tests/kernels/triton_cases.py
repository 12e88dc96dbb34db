"""Arguments for the Triton kernels, and their distance from the operators' float64 references; used on CPU and CUDA
alike.
"""

from __future__ import annotations

from typing import Any, Callable

import torch

import mindspeed_fx.kernels  # noqa: F401
from mindspeed_fx.report import recorder
from tests.kernels.triton_arguments import (
    Case,
    add_layer_norm,
    add_rms_norm,
    attention_lse,
    causal_conv1d,
    cross_entropy,
    dropout_add,
    gated_delta_rule,
    glu,
    kimi_delta_attention,
    layer_norm,
    linear_cross_entropy,
    moe_unpermute,
    qk_norm_rope,
    rms_norm,
    rope,
    rope_pair,
    selective_scan,
    sinkhorn_knopp,
    ssd,
    swiglu,
)

ops = torch.ops.mindspeed

TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Two roundings of the type; for bfloat16 two truncations, which is what Triton's interpreter does."""


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
    layer_norm("three-parts", 5, 9001, strided=True),
    layer_norm("wide", 4, 17000, weight=False),
    add_layer_norm("row", 6, 768),
    add_layer_norm("parts", 5, 16384),
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
    kimi_delta_attention("spans", 1, 1, 270, (12, 20), True),
    kimi_delta_attention("plain", 2, 1, 40, (16, 40), False),
    kimi_delta_attention("strong", 1, 1, 70, (20, 16), True, 300.0),
    ssd("shared", 1, 1, 18, 40, (12, 20), True, 8),
    ssd("plain", 1, 2, 4, 70, (40, 16), False, 64),
    selective_scan("whole", 2, 35, 5, 43, True),
    selective_scan("plain", 1, 16, 16, 20, False),
    sinkhorn_knopp("streams", (3, 50, 4, 4), 5),
    sinkhorn_knopp("once", (7, 8, 8), 1),
    selective_scan("two-segments", 1, 20, 5, 100, True),
    selective_scan("three-segments", 1, 16, 4, 70, False),
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
