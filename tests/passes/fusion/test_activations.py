"""Squared ReLU, quick GELU, clipped and weighted SwiGLU."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models import double, function_agrees

ONE, CLIPPED, WEIGHTED, SWIGLU = "fusion.activation", "fusion.clipped_swiglu", "fusion.weighted_swiglu", "fusion.swiglu"

IN_ONE_GRAPH = {
    "relu * x": lambda x: F.relu(x) * x,
    "maximum": lambda x: torch.maximum(x, torch.zeros_like(x)) ** 2,
    "maximum of a number": lambda x: torch.maximum(x, torch.tensor(0.0, dtype=x.dtype)).square(),
    "max": lambda x: torch.max(x, torch.zeros_like(x)).square(),
    "where": lambda x: torch.where(x > 0, x, 0.0) ** 2,
    "mask": lambda x: (x * (x > 0)) ** 2,
    "mask cast": lambda x: ((x >= 0).to(x.dtype) * x).pow(2),
    "where of the square": lambda x: torch.where(x > 0, x * x, 0.0),
    "mask of the square": lambda x: x.pow(2) * (x > 0),
    "threshold": lambda x: F.threshold(x, 0.0, 0.0) ** 2,
    "quick, divided": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "quick, of a scaled x": lambda x: (x * 2.0) / (1 + torch.exp(-1.702 * (x * 2.0))),
    "quick, tanh": lambda x: 0.5 * x * (1 + torch.tanh(0.851 * x)),
    "quick, gating": lambda x: x * x.sin() * torch.sigmoid(1.702 * x),
}
ACTIVATIONS = {
    "power": lambda x: F.relu(x) ** 2,
    "square": lambda x: torch.square(torch.relu(x)),
    "product": lambda x: x.relu() * x.relu(),
    "clamp": lambda x: torch.clamp(x, min=0).pow(2),
    "clamp_min": lambda x: x.clamp_min(0.0).square(),
    "quick": lambda x: x * torch.sigmoid(1.702 * x),
    "quick, reversed": lambda x: (x * 1.702).sigmoid() * x,
}


def _written_part(x):
    zeros = torch.zeros(x.shape[-1], dtype=x.dtype)
    zeros[1:3] = 0.7
    return torch.maximum(x, zeros).square()


def _written_threshold(x):
    zeros = torch.full((x.shape[-1],), 0.0, dtype=x.dtype)
    zeros[0].fill_(0.9)
    return torch.where(x > zeros, x * x, 0.0)


def _written_after_a_cast(x):
    zeros = torch.zeros(x.shape[-1]).to(x.dtype)
    zeros[2] = 0.6
    return torch.maximum(x, zeros).square()


@pytest.mark.parametrize("function", [_written_part, _written_threshold, _written_after_a_cast])
def test_zeros_that_were_written_to_are_none(function):
    assert not function_agrees(function, torch.randn(5, 8, dtype=torch.float64, requires_grad=True)).counts.get(ONE)


def call_of(report, name, operator):
    run = next(r for r in report.graphs[0].runs if r.report.name == name)
    return next(line for line in run.after.splitlines() if f"mindspeed.{operator}" in line)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_spelling(name, dtype):
    x = torch.randn(4, 8, dtype=torch.double).to(dtype).requires_grad_()
    report = function_agrees(
        ACTIVATIONS[name], x, tolerance=1e-9 if dtype == torch.float64 else 4 * torch.finfo(dtype).eps
    )
    assert report.counts[ONE] == 1 and not report.skipped(ONE)


def test_more_spellings():
    report = function_agrees(lambda x: tuple(f(x) for f in IN_ONE_GRAPH.values()), double(4, 8))
    assert report.counts[ONE] == len(IN_ONE_GRAPH) and not report.skipped(ONE)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: F.relu(x) ** 3,
        lambda x: x * torch.sigmoid(1.5 * x),
        lambda x: torch.clamp(x, min=0, max=6) ** 2,
        lambda x: x.cos() * torch.sigmoid(1.702 * x),
    ],
)
def test_others_are_left_alone(f):
    report = function_agrees(f, double(4, 8))
    assert report.counts[ONE] == 0 and not report.skipped(ONE)


def test_gradients_partly_off_is_skipped_with_the_reason():
    def f(x):
        with torch.no_grad():
            r = F.relu(x)
        return r**2 + x

    report = function_agrees(f, double(4, 8))
    assert report.counts[ONE] == 0 and "gradients off" in report.skipped(ONE)[0].reason


def clip(gate, up, limit=0.9):
    return gate.clamp(min=None, max=limit), up.clamp(min=-limit, max=limit)


def columns(x):
    gate, up = clip(x[..., ::2], x[..., 1::2])
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def halves(x):
    gate, up = clip(*x.chunk(2, -1))
    return F.silu(gate) * up


def halves_with_offset(x):
    gate, up = clip(*x.chunk(2, -1))
    return F.silu(gate) * (1.0 + up)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "f, call",
    [
        (columns, ", None, 1.702, 0.9, 1.0, True)"),
        (halves, ", None, 1.0, 0.9, 0.0, False)"),
        (halves_with_offset, ", None, 1.0, 0.9, 1.0, False)"),
    ],
)
def test_clipped(f, call, dtype):
    x = torch.randn(4, 5, 16, dtype=torch.double).to(dtype).requires_grad_()
    report = function_agrees(f, x, tolerance=1e-9 if dtype == torch.float64 else 3e-2)
    assert (
        report.counts[CLIPPED] == 1
        and report.counts[SWIGLU] == 0
        and call in call_of(report, CLIPPED, "clipped_swiglu")
    )


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    st.sampled_from([1.0, 1.702, 0.5]),
    st.sampled_from([0.3, 7.0]),
    st.sampled_from([0, 1, -0.5]),
    st.booleans(),
    st.sampled_from(["gate", "up", "none"]),
    st.sampled_from(["clamp", "clamp_max"]),
    st.booleans(),
)
def test_variants_of_clipped(alpha, limit, offset, up_first, frozen, spelling, extra):
    torch._dynamo.reset()

    def f(gate, up):
        g, u = (gate.clamp(max=limit) if spelling == "clamp" else torch.clamp_max(gate, limit)), up.clamp(-limit, limit)
        g_ = g * torch.sigmoid(g * alpha) if alpha != 1.0 else F.silu(g)
        u_ = u + offset if offset else u
        return (u_ * g_ if up_first else g_ * u_) + (g.sum() if extra else 0)

    report = function_agrees(f, double(3, 8, grad=frozen != "gate"), double(3, 8, grad=frozen != "up"))
    assert report.counts[CLIPPED] == 1


@pytest.mark.parametrize("f, reason", [
    (lambda g, u: F.silu(g.clamp(max=7.0)) * u, "up is not"),
    (lambda g, u: F.silu(g.clamp(max=7.0)) * u.clamp(-6.0, 6.0), "the gate is clamped to 7.0, up to (-6.0, 6.0)"),
    (lambda g, u: F.silu(g.clamp(max=7.0)) * u[:1].clamp(-7.0, 7.0), "different shapes"),
    (lambda g, u: F.silu(g.clamp(max=7.0)) * u.float().clamp(-7.0, 7.0), "the model goes on"),
])  # fmt: skip
def test_clipped_near_misses_say_why(f, reason):
    report = function_agrees(f, double(3, 8), double(3, 8), tolerance=1e-6)
    assert report.counts[CLIPPED] == 0 and reason in report.skipped(CLIPPED)[0].reason


def test_a_gate_clamped_from_below_is_no_clipped_swiglu():
    report = function_agrees(lambda g, u: F.silu(g.clamp(-7.0, 7.0)) * u.clamp(-7.0, 7.0), double(3, 8), double(3, 8))
    assert report.counts[CLIPPED] == 0 and report.counts[SWIGLU] == 1


def weighted(x, w):
    gate, up = x.chunk(2, -1)
    return (F.silu(gate) * up * w).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "f",
    [
        weighted,
        lambda x, w: (w * (F.silu(x[..., :8]) * x[..., 8:])).to(x.dtype),
        lambda x, w: (F.silu(x[..., 8:]) * x[..., :8] * w).to(x.dtype),
    ],
)
def test_weighted(f, dtype):
    x, w = torch.randn(6, 16, dtype=torch.double).to(dtype).requires_grad_(), torch.rand(6, 1, requires_grad=True)
    report = function_agrees(
        f,
        x,
        w.double().detach().requires_grad_() if dtype == torch.float64 else w,
        tolerance=1e-9 if dtype == torch.float64 else 3e-2,
    )
    assert report.counts[WEIGHTED] == 1


WEIGHT_INSIDE = {
    "up": lambda g, u, w: F.silu(g) * (w * u),
    "up, packed": lambda g, u, w: F.silu(torch.cat((g, u), -1)[..., :8]) * (torch.cat((g, u), -1)[..., 8:] * w),
    "gate": lambda g, u, w: (w * F.silu(g)) * u,
    "gate, scaled": lambda g, u, w: (F.silu(g) * (w * 2.0)) * u,
    "between": lambda g, u, w: g * w * u * torch.sigmoid(g),
    "quotient": lambda g, u, w: g / (1 + torch.exp(-g)) * (u * w),
}


def test_a_weight_inside():
    report = function_agrees(
        lambda g, u, w: tuple(f(g, u, w) for f in WEIGHT_INSIDE.values()), double(4, 8), double(4, 8), double(4, 1)
    )
    assert report.counts[WEIGHTED] == len(WEIGHT_INSIDE) and not report.skipped(WEIGHTED) and not report.skipped(SWIGLU)


@pytest.mark.parametrize("frozen", ["x", "w"])
def test_weighted_with_one_of_them_frozen(frozen):
    assert (
        function_agrees(weighted, double(6, 16, grad=frozen != "x"), double(6, 1, grad=frozen != "w")).counts[WEIGHTED]
        == 1
    )


@pytest.mark.parametrize("f, reason", [
    (lambda x, w: F.silu(x[..., :8]) * x[..., 8:] * w.double(), "goes on in torch.float64"),
    (lambda x, w: F.silu(x[..., :8]) * x[..., 8:] * w[:1], None),
    (lambda x, w: F.silu(x[..., :8]) * x[..., 8:] * x[..., 8:].cos(), None),
])  # fmt: skip
def test_what_is_not_weighted(f, reason):
    report = function_agrees(
        f, torch.randn(6, 16, requires_grad=True), torch.rand(6, 1, requires_grad=True), tolerance=1e-5
    )
    assert report.counts[WEIGHTED] == 0 and report.counts[SWIGLU] == 1
    assert [reason in s.reason for s in report.skipped(WEIGHTED)] == ([True] if reason else [])


def test_weighted_saves_no_product():
    x, w = double(64, 16), double(64, 1)

    def saved(options):
        torch._dynamo.reset()
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nelement()) or t, lambda t: t):
            torch.compile(weighted, backend="mindspeed", options={"codegen": "eager", **options})(x, w)
        return sum(sizes)

    assert saved({}) < saved({"disable": [WEIGHTED]})


def test_squared_relu_of_negative_numbers_has_no_gradient_whatever_comes_from_above():
    """The gradient of hypot(0, 0) is 0 / 0; ReLU lets none of it through."""

    def f(x):
        return torch.hypot(torch.relu(x).square(), torch.zeros_like(x))

    report = function_agrees(f, (-torch.rand(3, 8)).double().requires_grad_())
    assert report.counts["fusion.activation"] == 1
