"""Norms of queries and keys before their rotation, in the spellings of models: one operator, or the reason why not."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_fx.cost.hardware import hardware, names
from mindspeed_fx.cost.operators import spec
from mindspeed_fx.kernels import REGISTRY, triton
from tests.models import double, explain, function_agrees

NAME = "fusion.qk_norm_rope"
ops = torch.ops.mindspeed


def norm(x, w, offset=0.0, eps=1e-6):
    wide = x.float() if x.dtype == torch.bfloat16 else x
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * (w + offset)


def gemma_norm(x, w):
    wide = x.float() if x.dtype == torch.bfloat16 else x
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + w.to(wide.dtype))).type_as(x)


def half(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def pairs(x, cos, sin):
    return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin


def partial(x, cos, sin):
    r = cos.shape[-1]
    return torch.cat((half(x[..., :r], cos, sin), x[..., r:]), -1)


FORMS = {
    "qwen3": lambda x, w, c, s: half(norm(x.view(2, 3, 4, 8), w).transpose(1, 2), c, s),
    "gemma3": lambda x, w, c, s: half(gemma_norm(x.view(2, 3, 4, 8), w).transpose(1, 2), c, s),
    "heads first": lambda x, w, c, s: half(norm(x.view(2, 3, 4, 8).transpose(1, 2), w), c, s),
    "torch's norm": lambda x, w, c, s: half(
        torch.nn.functional.rms_norm(x.view(2, 3, 4, 8), (8,), w, 1e-5).transpose(1, 2), c, s
    ),
    "interleaved": lambda x, w, c, s: pairs(norm(x.view(2, 3, 4, 8), w, 1.0).transpose(1, 2), c, s),
    "sequence first": lambda x, w, c, s: half(
        norm(x.view(2, 3, 4, 8).permute(1, 0, 2, 3), w), c[:, None, None], s[:, None, None]
    ),
    "tokens in a row": lambda x, w, c, s: half(
        norm(x.view(2, 3, 4, 8), w).view(6, 4, 8), c.repeat(2, 1)[:, None], s.repeat(2, 1)[:, None]
    ),
    "no weight": lambda x, w, c, s: (
        half(torch.nn.functional.rms_norm(x.view(2, 3, 4, 8), (8,)).transpose(1, 2), c, s) * w
    ),
    "part of a projection": lambda x, w, c, s: half(
        norm(torch.cat((x, x), -1).view(2, 3, 8, 8)[:, :, 2:6], w).transpose(1, 2), c, s
    ),
    "partial": lambda x, w, c, s: partial(norm(x.view(2, 3, 4, 8), w).transpose(1, 2), c[:, :4], s[:, :4]),
    "transposed back": lambda x, w, c, s: (
        half(norm(x.view(2, 3, 4, 8), w).transpose(1, 2), c, s).transpose(1, 2).reshape(2, 3, 32)
    ),
}


def inputs(dtype=torch.double):
    x, w = (
        torch.randn(2, 3, 32, dtype=torch.double).to(dtype).requires_grad_(),
        (torch.rand(8, dtype=torch.double) + 0.5).to(dtype).requires_grad_(),
    )
    return x, w, torch.randn(3, 8, dtype=torch.double).to(dtype), torch.randn(3, 8, dtype=torch.double).to(dtype)


@pytest.mark.slow
def test_every_form():
    report = function_agrees(
        lambda x, w, c, s: tuple(f(x * i, w, c, s) for i, f in enumerate(FORMS.values(), 1)), *inputs()
    )
    assert report.counts[NAME] == len(FORMS) and not report.skipped(NAME)


def test_bfloat16():
    """Nothing is rounded between the two, so that the error is at most twice the unfused model's."""
    given = inputs(torch.bfloat16)
    exact = [i.detach().double().requires_grad_(i.requires_grad) for i in given]
    f = lambda *a: torch.stack([FORMS[name](*a) for name in ("qwen3", "gemma3", "partial")])  # noqa: E731
    compiled = torch.compile(f, backend="mindspeed", options={"codegen": "eager", "strict": True, "enable": [NAME]})
    outs = [g(*a) for g, a in ((f, exact), (f, given), (compiled, given))]
    up = torch.randn(outs[0].shape, dtype=torch.double).bfloat16()
    truth, own, have = (
        [o, *torch.autograd.grad(o, a[:2], up.to(o.dtype))] for o, a in zip(outs, (exact, given, given))
    )
    for t, o, h in zip(truth, own, have, strict=True):
        assert h.dtype == o.dtype and (h.double() - t).abs().max() <= 2 * (o.double() - t).abs().max()


@settings(max_examples=3, deadline=None, derandomize=True)
@given(
    st.sampled_from(["none", "x", "w"]),
    st.booleans(),
    st.sampled_from([2, 6, 8]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0.0, 1e-3]),
)
def test_variants(frozen, swapped, turned, interleaved, late, eps):
    """Frozen inputs, other orders of operands, partial and interleaved rotation, heads transposed before or after the
    norm.
    """
    x, w, c, s = inputs()
    x, w = x.detach().requires_grad_(frozen != "x"), w.detach().requires_grad_(frozen != "w")

    def f(x, w, c, s):
        n = x.view(2, 3, 4, 8) if late else x.view(2, 3, 4, 8).transpose(1, 2)
        n = torch.rsqrt(n.square().mean(-1, keepdim=True) + eps) * n
        n = w * n if swapped else n * w
        n = n.transpose(1, 2) if late else n
        c, s, first = c[:, :turned], s[:, :turned], n[..., :turned]
        y = (pairs if interleaved else half)(first, c, s)
        return torch.cat((y, n[..., turned:]), -1) if turned < 8 else y

    assert function_agrees(f, x, w, c, s).counts[NAME] == 1


NEAR = [
    # OLMo 2
    (
        lambda x, w, c, s: half(norm(x, w.repeat(4)).view(2, 3, 4, 8).transpose(1, 2), c, s),
        "the norm is over 32 elements, each head has 8",
    ),
    (lambda x, w, c, s: (n := norm(x.view(2, 3, 4, 8), w).transpose(1, 2), half(n, c, s))[1] + n, "used elsewhere"),
    (lambda x, w, c, s: half(norm(x.view(2, 3, 4, 8), w).transpose(1, 2), c * w, s), "cos and sin need gradients"),
    (
        lambda x, w, c, s: half(norm(x.view(2, 3, 4, 8), w).transpose(1, 2)[..., 4:], c[:, :4], s[:, :4]),
        "elements 4 to 8 of 8 turn",
    ),
    (
        lambda x, w, c, s: half(
            norm(x.view(2, 3, 4, 8).transpose(2, 3).reshape(2, 3, 4, 8), w)
            .transpose(2, 3)
            .reshape(2, 3, 4, 8)
            .transpose(1, 2),
            c,
            s,
        ),
        "moved between",
    ),
    (
        lambda x, w, c, s: half(
            norm(torch.cat((x, x), -1).view(2, 3, 8, 8)[:, :, 2:6], w).reshape(6, 4, 8),
            c.repeat(2, 1)[:, None],
            s.repeat(2, 1)[:, None],
        ),
        "would copy them",
    ),
]


def test_near_misses_say_why():
    report = function_agrees(lambda x, w, c, s: tuple(f(x * i, w, c, s) for i, (f, _) in enumerate(NEAR, 1)), *inputs())
    reasons = [skipped.reason for skipped in report.skipped(NAME)]
    assert report.counts[NAME] == 0 and len(reasons) == len(NEAR)
    assert all(wanted in found for (_, wanted), found in zip(NEAR, reasons)), reasons


def test_a_norm_or_a_rotation_alone_is_left():
    report = function_agrees(
        lambda x, w, c, s: half(x.view(2, 3, 4, 8).transpose(1, 2), c, s) + norm(x.view(2, 3, 4, 8), w).transpose(1, 2),
        *inputs(),
    )
    assert (
        report.counts["fusion.rope"] == report.counts["fusion.rms_norm"] == 1
        and report.counts[NAME] == 0
        and not report.skipped(NAME)
    )


@pytest.mark.parametrize(
    "options, reason",
    [
        pytest.param({"codegen": "inductor"}, "measured no slower", marks=pytest.mark.slow),
        ({"target": "npu"}, None),
        ({"target": "cuda"}, None),
        ({"target": "npu", "enable": [NAME]}, None),
    ],
)
def test_where_it_pays(monkeypatch, options, reason):
    monkeypatch.setattr(triton, "missing", lambda: None)
    x, w, c, s = (i.detach().float().requires_grad_(i.requires_grad and "codegen" not in options) for i in inputs())
    report = explain(FORMS["qwen3"], x, w, c, s, **options)
    assert report.counts[NAME] == (reason is None) and (reason is None or reason in report.skipped(NAME)[0].reason)


@pytest.mark.parametrize(
    "dtype, missing, reason",
    [
        (torch.float64, None, "x is float64"),
        (
            torch.float32,
            "triton is not installed",
            "no kernel for both: triton, norm and rotation in one read of a head: triton is not installed",
        ),
    ],
)
def test_without_a_kernel_they_stay_apart(monkeypatch, dtype, missing, reason):
    monkeypatch.setattr(triton, "missing", lambda: missing)
    report = explain(
        FORMS["qwen3"], *(i.detach().to(dtype).requires_grad_(i.requires_grad) for i in inputs()), target="cuda"
    )
    assert report.counts[NAME] == 0 and reason in report.skipped(NAME)[0].reason


def seconds(device, *calls):
    total = 0.0
    for op, args in calls:
        out = torch.utils._pytree.tree_map(lambda t: spec(t), op(*args))
        total += (
            REGISTRY[op.default]
            .cost(out, *(spec(a) if isinstance(a, torch.Tensor) else a for a in args))
            .seconds(device)
        )
    return total


@pytest.mark.parametrize("device", [n for n in names() if hardware(n).target in ("npu", "cuda")])
def test_the_model_says_that_it_pays_on_every_device(device):
    x, w, angles = (
        torch.empty(1, 32, 4096, 128, dtype=torch.bfloat16, device="meta"),
        torch.empty(128, dtype=torch.bfloat16, device="meta"),
        torch.empty(1, 1, 4096, 128, dtype=torch.bfloat16, device="meta"),
    )
    rstd = torch.empty(1, 32, 4096, 1, device="meta")
    together = seconds(
        hardware(device),
        (ops.qk_norm_rope, (x, w, angles, angles, 1e-6, True, False)),
        (ops.qk_norm_rope_backward, (x, x, w, rstd, angles, angles, False, True)),
    )
    apart = seconds(
        hardware(device),
        (ops.rms_norm, (x, w, 1e-6, True)),
        (ops.rope, (x, angles, angles, False)),
        (ops.rope_backward, (x, x, angles, angles, False, False)),
        (ops.rms_norm_backward, (x, x, w, rstd, True, True)),
    )
    assert together < 0.7 * apart


def test_angles_that_need_gradients_are_refused():
    x, w, c, s = inputs()
    with pytest.raises(NotImplementedError, match="no gradient for cos and sin"):
        ops.qk_norm_rope(x.view(2, 3, 4, 8).transpose(1, 2), w, c.requires_grad_(), s, 1e-6, True, False)


def test_any_length():
    x, w, c, s = inputs()
    f = torch.compile(
        lambda x, w, c, s: half(norm(x.view(2, -1, 4, 8), w).transpose(1, 2), c, s),
        backend="mindspeed",
        options={"codegen": "eager", "strict": True, "enable": [NAME]},
    )
    for length in (3, 7, 5):
        x, c, s = double(2, length, 32), double(length, 8, grad=False), double(length, 8, grad=False)
        want = half(norm(x.view(2, -1, 4, 8), w).transpose(1, 2), c, s)
        have = f(x, w, c, s)
        torch.testing.assert_close(have, want)
        for h, t in zip(torch.autograd.grad(have.sum(), (x, w)), torch.autograd.grad(want.sum(), (x, w)), strict=True):
            torch.testing.assert_close(h, t)
