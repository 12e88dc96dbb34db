"""Values that are no ordinary numbers (NaN, infinities, denormals, scores of 1e30) through compiled models: what is
finite in eager is equal, and what is not never becomes finite."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from mindspeed_fx.kernels import REGISTRY
from tests.models import explain, fusion_counts

INF = math.inf


def wide(x):
    return x if x.dtype == torch.float64 else x.float()


def attention(q, k, v):
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return F.softmax(wide(scores).masked_fill(later, -INF), -1).to(v.dtype) @ v


def attention_of_keys(k, q, v):
    return attention(q, k, v)


def attention_of_values(v, q, k):
    return attention(q, k, v)


def call(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def rms_norm(x, weight):
    y = wide(x)
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


def layer_norm(x, weight):
    return F.layer_norm(x, x.shape[-1:], weight, weight, 1e-5)


def swiglu(x, weight):
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def geglu(x, weight):
    gate, up = x.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


def cross_entropy(x, weight):
    return F.cross_entropy(wide(x), torch.arange(len(x)) % x.shape[1])


def linear_cross_entropy(x, weight):
    rows = weight * torch.linspace(0.5, 1.5, 12, dtype=x.dtype)[:, None]
    return F.cross_entropy(wide(x @ rows.t()), torch.arange(len(x)) % 12)


FUNCTIONS = {
    "attention": (attention, 3),
    "attention_of_keys": (attention_of_keys, 3),
    "attention_of_values": (attention_of_values, 3),
    "scaled_dot_product_attention": (call, 3),
    "rms_norm": (rms_norm, 1),
    "layer_norm": (layer_norm, 1),
    "swiglu": (swiglu, 1),
    "geglu": (geglu, 1),
    "cross_entropy": (cross_entropy, 1),
    "linear_cross_entropy": (linear_cross_entropy, 1),
}


def put(value):
    def change(x):
        x = x.clone()
        x.view(-1)[21] = value
        return x

    return change


FILLS = {
    "ordinary": lambda x: x,
    "zero": lambda x: x * 0,
    "denormal": lambda x: x * 1e-40,
    "1e4": lambda x: x * 1e4,
    "1e30": lambda x: x * 1e30,
    "nan": put(math.nan),
    "+inf": put(INF),
    "-inf": put(-INF),
}


def run(function, inputs):
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    out.sum().backward()
    return out.detach(), [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]


def check(result, want, tolerance, what, scale=0.0):
    lost = result.isfinite() & ~want.isfinite()
    assert not lost.any(), f"{what}: {int(lost.sum())} values that are not finite in eager are"
    finite = want.isfinite() & result.isfinite()
    a, b = result[finite].double(), want[finite].double()
    if a.numel():
        scale = max(scale, b.abs().max().item(), torch.finfo(torch.float32).tiny)
        assert (a - b).abs().max().item() <= tolerance * scale, what


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_as_in_eager(name, dtype):
    function, count = FUNCTIONS[name]
    shape = (1, 2, 6, 8) if count == 3 else (4, 8)
    inputs = [torch.randn(shape).to(dtype) for _ in range(count)] + ([(torch.rand(8) + 0.5).to(dtype)] * (count == 1))
    compiled = torch.compile(function, backend="mindspeed", options={"codegen": "eager"})
    tolerance = 1e-4 if dtype == torch.float32 else 4e-2
    for fill, change in FILLS.items():
        changed = [change(inputs[0]), *inputs[1:]]
        out, grads = run(compiled, changed)
        expected, expected_grads = run(function, changed)
        finite = bool(expected.isfinite().all())
        if fill in ("ordinary", "zero", "denormal") or (fill in ("1e4", "1e30") and count == 3):
            assert finite, fill
        check(out, expected, tolerance, f"{fill}, result")
        if finite:
            # Where one weight is one, the gradient of the scores is what rounding leaves, times the other operand.
            largest = max(x.abs().max().item() for x in changed) if fill in ("1e4", "1e30") else 0.0
            for i, (grad, want) in enumerate(zip(grads, expected_grads, strict=True)):
                check(grad, want, tolerance, f"{fill}, gradient {i}", scale=largest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_fully_masked_rows_are_zero_with_finite_gradients(dtype):
    allowed = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    allowed[..., 2, :] = False

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)

    inputs = [torch.randn(1, 2, 6, 8).to(dtype) for _ in range(3)]
    out, grads = run(torch.compile(attend, backend="mindspeed", options={"codegen": "eager"}), inputs)
    expected, expected_grads = run(attend, inputs)
    assert out[..., 2, :].eq(0).all() and grads[0][..., 2, :].eq(0).all()
    tolerance = 4e-2 if dtype == torch.bfloat16 else 1e-5
    for a, b in zip((out, *grads), (expected, *expected_grads), strict=True):
        check(a, b, tolerance, "fully masked")


def test_a_log_sum_exp_of_minus_infinity_leaves_gradients_finite_in_every_kernel():
    """Kernels differ in what they say of a row without any allowed key: -inf, or 0 as ATen's flash kernel does."""
    ops = torch.ops.mindspeed
    allowed = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    allowed[..., 1, :] = False
    forward, backward = REGISTRY[ops.attention.default], REGISTRY[ops.attention_backward.default]
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        q, k, v, grad = (torch.randn(1, 2, 4, 8).to(dtype) for _ in range(4))
        out, lse = forward.reference(q, k, v, allowed, False, 0.5)
        assert lse[..., 1].eq(-INF).all()
        args = (grad, q, k, v, out, lse, allowed, False, 0.5)
        kernels = [x for x in backward.lowerings["cpu"] if x.supports(*args) is None]
        assert kernels
        for kernel in kernels:
            for a, b in zip(kernel.build(*args), backward.reference(*args), strict=True):
                torch.testing.assert_close(a, b, rtol=4e-2, atol=4e-2)


@pytest.mark.parametrize("name", ["attention", "rms_norm", "swiglu", "cross_entropy", "linear_cross_entropy"])
def test_what_is_compared_is_fused(name):
    function, count = FUNCTIONS[name]
    inputs = [torch.randn(1, 2, 6, 8, requires_grad=True) for _ in range(3)]
    inputs = inputs if count == 3 else [torch.randn(4, 8, requires_grad=True), torch.rand(8)]
    assert fusion_counts(explain(function, *inputs))


def test_the_reference_of_attention_keeps_nan():
    """What stood for rows without any allowed key made zeros of NaN, too."""
    q, k, v = (torch.randn(1, 2, 4, 8, dtype=torch.double) for _ in range(3))
    q[0, 1, 2, 3] = math.nan
    out, lse = torch.ops.mindspeed.attention(q, k, v, None, True, 0.5)
    assert out[0, 1, 2].isnan().all() and lse[0, 1, 2].isnan() and int(out.isnan().sum()) == 8
    dq, dk, dv = torch.ops.mindspeed.attention_backward(torch.ones_like(out), q, k, v, out, lse, None, True, 0.5)
    assert dq[0, 1, 2].isnan().all() and dk[0, 1].isnan().any() and dv[0, 1].isnan().any()
