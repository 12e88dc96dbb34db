import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models import double, function_agrees

NAME, SUM = "fusion.layer_norm", "fusion.add_layer_norm"


def mean(x):
    return x.mean(-1, keepdim=True)


def variance(x):
    return (x - mean(x)).pow(2).mean(-1, keepdim=True)


def by_var_mean(x, w, b):
    var, middle = torch.var_mean(x, -1, correction=0, keepdim=True)
    return (x - middle) * torch.rsqrt(var + 1e-5) * w + b


def multiplied_out(x, w, b):
    """TensorFlow's."""
    r = torch.rsqrt(variance(x) + 1e-5) * w
    return x * r + (b - mean(x) * r)


SPELLINGS = {
    "squares": lambda x, w, b: (x - mean(x)) * torch.rsqrt(variance(x) + 1e-5) * w + b,
    "divided": lambda x, w, b: (x - mean(x)) / torch.sqrt(variance(x) + 1e-5) * w + b,
    "weight first": lambda x, w, b: b + w * ((x - mean(x)) * (variance(x) + 1e-5) ** -0.5),
    "weight first of all": lambda x, w, b: w * (x - mean(x)) / torch.sqrt(variance(x) + 1e-5) + b,
    "mean without keepdim": lambda x, w, b: (
        (x - x.mean(-1).unsqueeze(-1)) * torch.rsqrt(x.var(-1, correction=0) + 1e-5)[..., None] * w + b
    ),
    "var": lambda x, w, b: (x - mean(x)) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5) * w + b,
    "correction": lambda x, w, b: (x - mean(x)) / torch.sqrt(1e-5 + x.var(-1, keepdim=True, correction=0)) * w + b,
    "var_mean": by_var_mean,
    "moments": lambda x, w, b: (x - mean(x)) * torch.rsqrt(mean(x * x) - mean(x) ** 2 + 1e-5) * w + b,
    "deviation": lambda x, w, b: (x - mean(x)) / x.std(-1, keepdim=True, unbiased=False) * w + b,
    "offset": lambda x, w, b: (x - mean(x)) * torch.rsqrt(variance(x) + 1e-5) * (1 + w) + b,
    "sums": lambda x, w, b: (
        (x - x.sum(-1, keepdim=True) / 8)
        * torch.rsqrt(((x - x.sum(-1, keepdim=True) / 8) ** 2).sum(-1, keepdim=True) / 8 + 1e-5)
        * w
        + b
    ),
    "torch": lambda x, w, b: F.layer_norm(x, (8,), w, b, 1e-5),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling(name):
    report = function_agrees(SPELLINGS[name], double(2, 3, 8), double(8), double(8))
    assert report.counts[NAME] == 1 and not report.skipped(NAME) and not report.counts["fusion.rms_norm"]
    run = next(r for r in report.graphs[0].runs if r.report.name == NAME)
    assert "aten.add" not in run.after or name == "offset", "the bias stayed outside"


def by_std_mean(x, w, b):
    std, middle = torch.std_mean(x, -1, correction=0, keepdim=True)
    return w * ((x - middle) / std) + b


def multiplied_out_without_bias(x, w, b):
    r = w / torch.sqrt(x.var(-1, keepdim=True, correction=0) + 1e-5)
    return x * r - mean(x) * r


IN_ONE_GRAPH = {
    "multiplied out": multiplied_out,
    "multiplied out, no bias": multiplied_out_without_bias,
    "one group": lambda x, w, b: F.group_norm(x.reshape(-1, 8), 1, w, b, 1e-5).view(x.shape),
    "rows with themselves": lambda x, w, b: (
        (c := x - mean(x)) * torch.rsqrt(torch.einsum("...d,...d->...", c, c)[..., None] / 8 + 1e-5) * w + b
    ),
    "n - 1": lambda x, w, b: (x - mean(x)) / torch.sqrt(x.var(-1, keepdim=True) + 1e-5) * w + b,
    "n - 1, weight first": lambda x, w, b: w * (x - mean(x)) / torch.sqrt(x.var(-1, keepdim=True) + 1e-5) + b,
    "n - 1, no weight": lambda x, w, b: (x - mean(x)) / torch.sqrt(x.var(-1, keepdim=True) + 1e-5) + b,
    "deviation, n - 1": lambda x, w, b: (x - mean(x)) / x.std(-1, keepdim=True) * w + b,
    "std_mean": by_std_mean,
    "deviation squared": lambda x, w, b: (
        (x - mean(x)) / torch.sqrt(x.std(-1, keepdim=True, correction=0) ** 2 + 1e-5) * w + b
    ),
    "weight times root": lambda x, w, b: (
        (x - mean(x)) * (w * torch.rsqrt(x.var(-1, keepdim=True, correction=0) + 1e-5)) + b
    ),
    "a negative mean": lambda x, w, b: (
        (x + -mean(x)) * torch.rsqrt(x.var(-1, keepdim=True, correction=0) + 1e-5) * w + b
    ),
    "norm": lambda x, w, b: (x - mean(x)) / ((x - mean(x)).norm(dim=-1, keepdim=True) * 8**-0.5) * w + b,
}


def test_more_spellings():
    report = function_agrees(
        lambda x, w, b: tuple(f(x, w, b) for f in IN_ONE_GRAPH.values()), double(2, 3, 8), double(8), double(8)
    )
    assert report.counts[NAME] == len(IN_ONE_GRAPH) and not report.skipped(NAME)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    st.sampled_from(sorted(SPELLINGS)),
    st.sampled_from(["weight", "bias", "x", "none"]),
    st.sampled_from(["", "weight", "bias", "both"]),
    st.sampled_from([(8,), (1, 8), (2, 3, 8)]),
    st.sampled_from(["contiguous", "transposed", "reused"]),
)
def test_variants(name, frozen, without, shape, variant):
    torch._dynamo.reset()
    x, w, b = double(*shape, grad=frozen != "x"), double(8, grad=frozen != "weight"), double(8, grad=frozen != "bias")

    def f(x, w, b):
        y = x.transpose(0, 1) if variant == "transposed" and x.dim() == 3 else x
        if name == "torch":
            return F.layer_norm(
                y, (8,), None if without in ("weight", "both") else w, None if without in ("bias", "both") else b
            )
        out = SPELLINGS[name](
            y,
            torch.ones_like(w) if without in ("weight", "both") else w,
            torch.zeros_like(b) if without in ("bias", "both") else b,
        )
        return (out, mean(y), y - mean(y)) if variant == "reused" else out

    assert function_agrees(f, x, w, b, tolerance=1e-8).counts[NAME] == 1


def wide_all(x, w, b):
    wide = x.float()
    return ((wide - mean(wide)) * torch.rsqrt(variance(wide) + 1e-5) * w.float() + b.float()).to(x.dtype)


def wide_rounded_first(x, w, b):
    wide = x.float()
    return ((wide - mean(wide)) * torch.rsqrt(variance(wide) + 1e-5)).to(x.dtype) * w + b


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
@pytest.mark.parametrize(
    "f",
    [
        wide_all,
        wide_rounded_first,
        SPELLINGS["torch"],
        lambda x, w, b: F.layer_norm(x.float(), (8,), w.float(), b.float()).to(x.dtype),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_as_close_to_float64_as_the_unfused_model_is(f, dtype, codegen):
    given = [torch.randn(*s).to(dtype) for s in ((64, 8), (8,), (8,))]
    grad = torch.randn(64, 8).to(dtype)

    def run(g, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in given]
        out = g(*leaves)
        return [t.double() for t in (out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype)))]

    compiled = torch.compile(f, backend="mindspeed", fullgraph=True, options={"codegen": codegen})
    exact = run(SPELLINGS["torch"], torch.float64)
    for have, unfused, want in zip(run(compiled, dtype), run(f, dtype), exact, strict=True):
        assert (have - want).norm() <= 2 * (unfused - want).norm()


def test_a_result_that_stays_wide():
    x, w, b = (
        torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True),
        torch.randn(8, requires_grad=True),
        torch.randn(8, requires_grad=True),
    )
    report = function_agrees(lambda x, w, b: SPELLINGS["squares"](x.float(), w, b), x, w, b, tolerance=1e-2)
    assert report.counts[NAME] == 1


def partly_without_grad(x, w, b):
    with torch.no_grad():
        r = torch.rsqrt(variance(x) + 1e-5)
    return (x - mean(x)) * r * w + b


@pytest.mark.parametrize(
    "f, reason",
    [
        (lambda x, w, b: w * (x - mean(x)) / (x.std(-1, keepdim=True) + 1e-6) + b, "standard deviation"),
        (
            lambda x, w, b: (
                (x - x.mean(1, keepdim=True)) * torch.rsqrt(x.var(1, keepdim=True, correction=0) + 1e-5) * w + b
            ),
            "normalizes over dimensions [1]",
        ),
        (lambda x, w, b: (x - mean(x)) / (x.std(-1, keepdim=True) + 1e-6) * w + b, "standard deviation"),
        (lambda x, w, b: F.layer_norm(x, (3, 8), None, None) * w + b, "2 dimensions"),
        (partly_without_grad, "gradients off"),
        (lambda x, w, b: (x - mean(x)) * torch.rsqrt(variance(x) - 1e-3) * w + b, "eps is negative (-0.001)"),
    ],
)
def test_near_misses_say_why(f, reason):
    report = function_agrees(f, double(2, 3, 8), double(8), double(8))
    assert report.counts[NAME] == 0
    assert any(reason in s.reason for s in report.skipped(NAME)), report.skipped(NAME)


def test_something_else_is_left_alone():
    for f in (
        lambda x, y: (x - mean(x)) * torch.rsqrt(variance(y) + 1e-5),
        lambda x, y: (x - mean(y)) * torch.rsqrt(variance(x) + 1e-5),
    ):
        torch._dynamo.reset()
        report = function_agrees(f, double(3, 8), double(3, 8))
        assert report.counts[NAME] == 0 and not report.skipped(NAME)


def test_numbers_beside_a_moment_are_left_alone():
    """A sum of all over the root of a mean of all: both without dimensions, as where gradients are clipped."""
    for f in (
        lambda x, y: x.sum() * torch.rsqrt(x.square().mean(0) + 1e-5),
        lambda x, y: y * (x.sum() / torch.sqrt((x - x.mean(0)).square().mean(0) + 1e-5)),
    ):
        torch._dynamo.reset()
        report = function_agrees(f, double(8), double(3, 8))
        assert report.counts[NAME] == 0 and not report.counts["fusion.rms_norm"]


@pytest.mark.parametrize("returned", ["both", "norm", "norm detached"])
@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_sum_and_norm(returned, codegen):
    def f(x, r, w, b):
        s = x + r
        y = F.layer_norm(s, (8,), w, b)
        return {"both": (y, s), "norm": y, "norm detached": (y.detach(), s)}[returned]

    report = function_agrees(f, double(2, 3, 8), double(2, 3, 8), double(8), double(8), codegen=codegen)
    assert report.counts[NAME] == 1 and report.counts[SUM] == 1


def late_weight(x, r, w):
    s = x + r
    return F.layer_norm(s, (8,), w + s.sin().sum())


@pytest.mark.parametrize("f, reason", [
    (lambda x, r, w: F.layer_norm(torch.add(x, r, alpha=2), (8,), w), "scaled by 2"),
    (lambda x, r, w: F.layer_norm(x + r[:1], (8,), w), "differ in shape or type"),
    (late_weight, "before the weight"),
])  # fmt: skip
def test_sums_that_are_not_fused_say_why(f, reason):
    report = function_agrees(f, double(3, 8), double(3, 8), double(8))
    assert report.counts[SUM] == 0 and reason in report.skipped(SUM)[0].reason


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    st.sampled_from([torch.float64, torch.bfloat16, torch.float16]),
    st.sampled_from(["x", "residual", "weight", "bias", "none"]),
    st.booleans(),
    st.booleans(),
)
def test_variants_of_the_sum(dtype, frozen, chained, codegen):
    torch._dynamo.reset()
    shapes = {"x": (2, 3, 8), "residual": (2, 3, 8), "weight": (8,), "bias": (8,)}
    tensors = [torch.randn(*s).to(dtype).requires_grad_(n != frozen) for n, s in shapes.items()]

    def f(x, r, w, b):
        s = r + x
        y = F.layer_norm(s, (8,), w, b)
        return F.layer_norm(s + y.tanh(), (8,), w, b) if chained else (y, s)

    tolerance = 1e-9 if dtype == torch.float64 else 16 * torch.finfo(dtype).eps
    assert function_agrees(f, *tensors, tolerance=tolerance, codegen="inductor" if codegen else "eager").counts[
        SUM
    ] == (2 if chained else 1)


def test_dynamic_sizes():
    compiled = torch.compile(lambda x, r, w, b: F.layer_norm(x + r, (8,), w, b), backend="mindspeed", dynamic=True)
    w, b = double(8), double(8)
    for n in (3, 5):
        x, r = double(n, 8), double(n, 8)
        torch.testing.assert_close(compiled(x, r, w, b), F.layer_norm(x + r, (8,), w, b))
