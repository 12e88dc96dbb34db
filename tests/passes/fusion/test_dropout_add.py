"""The fused model draws what the unfused one draws: results and gradients are bitwise the same for a seed."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models import double, explain

NAME = "fusion.dropout_add"


def drop(x, p=0.25):
    return F.dropout(x, p, training=True)


def run(f, inputs):
    leaves = [i.detach().clone().requires_grad_(i.requires_grad) for i in inputs]
    torch.manual_seed(3)
    outs = f(*leaves)
    outs = outs if isinstance(outs, tuple) else (outs,)
    wanted = [x for x in leaves if x.requires_grad]
    return [o.detach() for o in outs], torch.autograd.grad(
        [o for o in outs if o.requires_grad],
        wanted,
        [torch.linspace(0.5, 1.5, o.numel(), dtype=o.dtype).view_as(o) for o in outs if o.requires_grad],
    )


def same_bits(f, *inputs, **options):
    torch._dynamo.reset()
    have = run(torch.compile(f, backend="mindspeed", fullgraph=True, options={"codegen": "eager", **options}), inputs)
    for h, w in zip((*have[0], *have[1]), (x for part in run(f, inputs) for x in part), strict=True):
        assert h.dtype == w.dtype and torch.equal(h, w)
    torch._dynamo.reset()
    return explain(f, *inputs, **options)


SPELLINGS = {
    "residual first": lambda x, r, b: r + drop(x),
    "residual last": lambda x, r, b: drop(x) + r,
    "module": lambda x, r, b: torch.nn.Dropout(0.5)(x) + r,
    "bias": lambda x, r, b: r + drop(x + b),
    "bias, expanded": lambda x, r, b: r + drop(x + b.expand_as(r)),
    "linear": lambda x, r, b: r + drop(F.linear(x, torch.ones(8, 8, dtype=x.dtype), b)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling(name, dtype):
    x, r, b = (torch.randn(*s, dtype=torch.double).to(dtype).requires_grad_() for s in ((4, 5, 8), (4, 5, 8), (8,)))
    report = same_bits(lambda x, r, b: (SPELLINGS[name](x, r, b), b.sum()), x, r, b)
    assert report.counts[NAME] == 1 and not report.skipped(NAME)


@settings(max_examples=5, deadline=None, derandomize=True)
@given(
    st.sampled_from(["x", "residual", "bias", "none"]),
    st.sampled_from([0.1, 0.5, 0.9]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_variants(frozen, p, biased, transposed, chained):
    x, r, b = (
        double(6, 6, grad=frozen != "x"),
        double(6, 6, grad=frozen != "residual"),
        double(6, grad=frozen != "bias"),
    )

    def f(x, r, b):
        x = x.t() if transposed else x
        y = r + drop(x + b if biased else x, p)
        y = y + drop(y.sin(), p) if chained else y
        return y + 0 * (x.sum() + r.sum() + b.sum())

    assert same_bits(f, x, r, b).counts[NAME] == (2 if chained else 1)


def test_the_order_in_which_numbers_are_drawn_is_kept():
    def crossed(x, r):
        a, b = drop(x), drop(x.sin())
        return (r + b) * (r.cos() + a)  # the residual of a is made after b drew its numbers

    report = same_bits(crossed, double(5, 8), double(5, 8))
    assert report.counts[NAME] == 2 or "random numbers" in report.skipped(NAME)[0].reason

    def late(x, r):
        a = drop(x)
        residual = drop(r).sin()
        return a + residual

    report = same_bits(late, double(5, 8), double(5, 8))
    assert report.counts[NAME] == 0 and "random numbers are drawn between" in report.skipped(NAME)[0].reason


@pytest.mark.parametrize("f, reason", [
    (lambda x, r, b: r[:1] + drop(x), "differ in shape"),
    (lambda x, r, b: r.float() + drop(x), "another type"),
    (lambda x, r, b: _used_twice(drop(x), r), "used elsewhere"),
    (lambda x, r, b: F.layer_norm(r + drop(x), (8,)), "fused with the norm"),
    (lambda x, r, b: F.rms_norm(drop(x) + r, (8,)), "fused with the norm"),
])  # fmt: skip
def test_skips_say_why(f, reason):
    x, r, b = double(4, 8), double(4, 8), double(8)
    torch._dynamo.reset()
    report = explain(f, x, r, b)
    assert report.counts[NAME] == 0 and reason in report.skipped(NAME)[0].reason


def _used_twice(dropped, r):
    return (r + dropped) * dropped


def test_generated_code_keeps_the_dropout_unless_the_pass_is_named():
    f = lambda x, r: r + drop(x)  # noqa: E731
    report = explain(f, double(4, 8), double(4, 8), codegen="inductor")
    assert report.counts[NAME] == 0 and "in one loop" in report.skipped(NAME)[0].reason
    assert same_bits(f, double(4, 8), double(4, 8), codegen="inductor", enable=[NAME]).counts[NAME] == 1


def test_without_training_there_is_nothing_to_fuse():
    report = explain(lambda x, r: r + F.dropout(x, 0.5, training=False), double(4, 8), double(4, 8))
    assert report.counts[NAME] == 0 and not report.skipped(NAME)


def test_masks_are_truth_values_on_fake_tensors_too():
    x = torch.empty(4, 8, device="meta")
    y, mask = torch.ops.mindspeed.dropout_add(x, None, x, 0.1)
    assert (y.dtype, mask.dtype, mask.shape) == (torch.float32, torch.bool, x.shape)
