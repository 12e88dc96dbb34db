import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.models import double, function_agrees

NAME = "fusion.rms_norm"


def mean_square(x):
    return x.pow(2).mean(-1, keepdim=True)


SPELLINGS = {
    "einsum": lambda x, w: x * torch.rsqrt(torch.einsum("bsd,bsd->bs", x, x).unsqueeze(-1) / 8 + 1e-5) * w,
    "row times column": lambda x, w: x * torch.rsqrt((x.unsqueeze(-2) @ x.unsqueeze(-1)).squeeze(-1) / 8 + 1e-5) * w,
    "llama": lambda x, w: w * (x * torch.rsqrt(mean_square(x) + 1e-5)),
    "weight first": lambda x, w: (x * torch.rsqrt(mean_square(x) + 1e-5)) * w,
    "eps first": lambda x, w: x * torch.rsqrt(1e-5 + (x * x).mean(dim=-1, keepdim=True)) * w,
    "divided": lambda x, w: x / torch.sqrt(mean_square(x) + 1e-5) * w,
    "power": lambda x, w: x * (mean_square(x) + 1e-5) ** -0.5 * w,
    "one over": lambda x, w: x * (1 / torch.sqrt(torch.square(x).mean(-1, keepdim=True) + 1e-5)) * w,
    "reciprocal": lambda x, w: x * torch.sqrt(mean_square(x) + 1e-5).reciprocal() * w,
    "summed": lambda x, w: x * torch.rsqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + 1e-5) * w,
    "weight first of all": lambda x, w: w * x * torch.rsqrt(mean_square(x) + 1e-5),
    "weight first of all, divided": lambda x, w: w * x / torch.sqrt(mean_square(x) + 1e-5),
    "mean without keepdim": lambda x, w: x * torch.rsqrt((x * x).mean(-1) + 1e-5).unsqueeze(-1) * w,
    "mean made a column": lambda x, w: x / torch.sqrt((x * x).mean(-1)[..., None] + 1e-5) * w,
    "offset": lambda x, w: x * torch.rsqrt(mean_square(x) + 1e-5) * (1 + w),
    "no weight": lambda x, w: x * torch.rsqrt(mean_square(x) + 1e-5) + w,
    "torch": lambda x, w: torch.nn.functional.rms_norm(x, (8,), w, 1e-5),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling(name):
    report = function_agrees(SPELLINGS[name], double(2, 3, 8), double(8))
    assert report.counts[NAME] == 1 and not report.skipped(NAME)


ROOT = 8**0.5
IN_ONE_GRAPH = {
    "norm": lambda x, w: x / (x.norm(2, -1, keepdim=True) * 8**-0.5) * w,
    "norm, divided": lambda x, w: w * (x / (torch.linalg.norm(x, dim=-1, keepdim=True) / ROOT)),
    "norm with a least value": lambda x, w: x / (x.norm(dim=-1, keepdim=True) * 8**-0.5).clamp(min=1e-8) * w,
    "x scaled": lambda x, w: w * (ROOT * x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)),
    "normalize": lambda x, w: F.normalize(x, dim=-1) * ROOT * w,
    "normalize, scaled last": lambda x, w: F.normalize(x, dim=-1) * (w + 1) * ROOT,
    "normalize, no weight": lambda x, w: F.normalize(x, dim=-1) * ROOT,
    "norm whose factor the weight takes": lambda x, w: x / x.norm(dim=-1, keepdim=True) * w,
    "sum and eps of a sum": lambda x, w: x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 8e-5) * w * ROOT,
    "weight in the middle": lambda x, w: x * w * torch.rsqrt(mean_square(x) + 1e-5),
    "weight times root": lambda x, w: x * (w * torch.rsqrt(mean_square(x) + 1e-5)),
    "reshaped": lambda x, w: x / (x.square().mean(-1) + 1e-5).sqrt().reshape(*x.shape[:-1], 1) * w,
    "another factor in the middle": lambda x, w: x * x.sin() * torch.rsqrt(mean_square(x) + 1e-5) * w,
    "magnitudes": lambda x, w: x * torch.rsqrt(x.abs().square().mean(-1, keepdim=True) + 1e-5) * w,
    "a gated input": lambda x, w: x * x.sin() * torch.rsqrt(mean_square(x * x.sin()) + 1e-5) * w,
}


def test_more_spellings():
    report = function_agrees(lambda x, w: tuple(f(x, w) for f in IN_ONE_GRAPH.values()), double(2, 3, 8), double(8))
    assert report.counts[NAME] == len(IN_ONE_GRAPH) and not report.skipped(NAME)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_in_16_bits_are_as_accurate(dtype):
    x, w, grad = (torch.randn(*s).to(dtype) for s in ((64, 8), (8,), (64, 8)))

    def run(f, dtype):
        leaves = [t.to(dtype).requires_grad_() for t in (x, w)]
        out = f(*leaves)
        return [t.double() for t in (out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype)))]

    f = IN_ONE_GRAPH["normalize"]
    compiled = torch.compile(f, backend="mindspeed", fullgraph=True, options={"codegen": "eager"})
    for have, unfused, want in zip(run(compiled, dtype), run(f, dtype), run(f, torch.float64), strict=True):
        assert (have - want).norm() <= 2 * (unfused - want).norm()


def test_rows_of_zeros_stay_zeros():
    x = torch.randn(3, 8, dtype=torch.double)
    x[1] = 0
    report = function_agrees(IN_ONE_GRAPH["normalize"], x.requires_grad_(), double(8))
    assert report.counts[NAME] == 1


@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    st.sampled_from(["llama", "torch"]),
    st.floats(0, 1e-2),
    st.sampled_from([(8,), (1, 8), (3, 8), (2, 1, 3, 8)]),
    st.sampled_from(["contiguous", "transposed", "frozen weight", "frozen input", "reused"]),
)
def test_variants(name, eps, shape, variant):
    torch._dynamo.reset()
    x, w = double(*shape), double(8)
    w.requires_grad_(variant != "frozen weight")
    x.requires_grad_(variant != "frozen input")

    def f(x, w):
        y = x.transpose(0, -2) if variant == "transposed" and x.dim() > 2 else x
        r = torch.rsqrt(mean_square(y) + eps)
        out = y * r * w if name != "torch" else torch.nn.functional.rms_norm(y, (8,), w, eps)
        return (out, r) if variant == "reused" and name != "torch" else out

    assert function_agrees(f, x, w).counts[NAME] == 1


@pytest.mark.parametrize("eps", [None, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_module_defaults(eps, dtype):
    norm = nn.RMSNorm(8, eps=eps, dtype=dtype)
    x = (torch.randn(4, 8) * 1e-3).to(dtype).requires_grad_()  # small enough for eps to matter
    report = function_agrees(lambda x: norm(x), x, tolerance=1e-6 if dtype == torch.float32 else 2e-2)
    assert report.counts[NAME] == 1


def test_half_precision_casts_are_absorbed():
    def f(x, w):
        wide = x.float()
        return w * (wide * torch.rsqrt(mean_square(wide) + 1e-6)).to(x.dtype)

    x, w = (
        torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True),
        torch.randn(8, dtype=torch.bfloat16, requires_grad=True),
    )
    report = function_agrees(f, x, w, tolerance=3e-2)
    assert report.counts[NAME] == 1
    assert "to.dtype" not in report.graphs[0].runs[[r.report.name for r in report.graphs[0].runs].index(NAME)].after


@pytest.mark.parametrize(
    "f, reason",
    [
        (lambda x, w: x * torch.rsqrt(x.pow(2).mean((-1, -2), keepdim=True) + 1e-5) * w, "not over the last one alone"),
        (lambda x, w: torch.nn.functional.rms_norm(x, (3, 8), None, 1e-5) * w, "2 dimensions"),
        (lambda x, w: _partly_without_grad(x) * w, "gradients off"),
        (lambda x, w: w * (x / (x.norm(2, dim=-1, keepdim=True) * 8**-0.5 + 1e-8)), "eps is added to the root mean "
                                                                                    "square"),
        (lambda x, w: x / (x.norm(dim=-1, keepdim=True) * 8**-0.5).clamp(min=1e-5) * w, "at least 1e-05"),
        (lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) - 1e-3) * w, "eps is negative (-0.001)"),
    ],
)  # fmt: skip
def test_near_misses_say_why(f, reason):
    report = function_agrees(f, double(2, 3, 8), double(8))
    assert report.counts[NAME] == 0 and any(reason in s.reason for s in report.skipped(NAME)), report.skipped(NAME)


def _partly_without_grad(x):
    with torch.no_grad():
        r = torch.rsqrt(mean_square(x) + 1e-5)
    return x * r


def test_a_division_by_the_norm_alone_is_left():
    report = function_agrees(lambda x, w: F.normalize(x, dim=-1) + w, double(3, 8), double(8))
    assert report.counts[NAME] == 0 and not report.skipped(NAME)


def test_something_else_is_left_alone():
    report = function_agrees(lambda x, y: x * torch.rsqrt(mean_square(y) + 1e-5), double(3, 8), double(3, 8))
    assert report.counts[NAME] == 0 and not report.skipped(NAME)


def test_values_after_a_norm_of_another_layout_keep_the_dtype_of_autocast():
    """The operator's result is laid out anew, and what follows is inferred again: an ``einsum`` under autocast too."""

    def f(q, y, w):
        with torch.autocast("cpu", torch.bfloat16):
            k = y.unflatten(-1, (1, 4)).transpose(1, 2)
            k = k * torch.rsqrt(k.pow(2).mean(-1, keepdim=True) + 1e-5) * w
            return torch.einsum("bhid,bhjd->bhij", q, k.repeat_interleave(4, dim=1)) * 1.0

    inputs = torch.randn(3, 4, 11, 4), torch.randn(3, 11, 4), torch.rand(4) + 0.5
    report = function_agrees(f, *(t.requires_grad_() for t in inputs), tolerance=3e-2)
    assert report.counts[NAME] == 1
