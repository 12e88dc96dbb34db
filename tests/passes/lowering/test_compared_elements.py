"""Values that are compared with elements of themselves are written before, and saved for the backward."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from mindspeed_fx.options import Options
from mindspeed_fx.passes.base import Context
from mindspeed_fx.passes.lowering import compared_elements
from tests.models import explain

NARROW = [torch.bfloat16, torch.float16]


def rewritten(f, *args, codegen="inductor"):
    gm = make_fx(f, tracing_mode="fake")(*args)
    context = Context(Options.parse({"codegen": codegen}).resolve("cpu"), "forward")
    return gm, compared_elements.compared_elements(gm, context)


PICKED = {
    "greatest": lambda x: x == x.amax(-1, keepdim=True),
    "smallest of all": lambda x: x.flatten() <= x.min(),
    "the best four": lambda x: x >= x.topk(4).values[..., -1:],
    "the median": lambda x: x.median(-1, keepdim=True).values.expand(-1, 8) < x,
    "one by its number": lambda x: x.ne(x.gather(1, torch.zeros(4, 1, dtype=torch.int64))),
}


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("picked", PICKED.values(), ids=list(PICKED))
def test_written_once(picked, dtype):
    x = torch.randn(4, 8).to(dtype)
    gm, report = rewritten(lambda x: picked(x.sigmoid() * x), x)
    assert [s.operator for s in report.rewrites] == ["written"]
    assert torch.equal(gm(x), picked(x.sigmoid() * x))
    assert not compared_elements.compared_elements(gm, Context(Options.parse({}).resolve("cpu"), "forward")).rewrites


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x == x.amax(-1, keepdim=True),  # an input is in memory
        lambda x: x.sin() == x.cos(),
        lambda x: x.sin() >= 0.5,
        lambda x: x.float().sin() >= x.float().sin().amax(),
        lambda x: x.sin() == x.amax(-1, keepdim=True),
    ],
)
def test_left(f):
    assert not rewritten(f, torch.randn(4, 8).bfloat16())[1].rewrites


def test_without_generated_code_the_reason():
    f = lambda x: x.sin() == x.sin().amax()  # noqa: E731
    report = rewritten(f, torch.randn(4, 8).bfloat16(), codegen="eager")[1]
    assert not report.rewrites and report.notes == ["without generated code every value is written"]


def pooled(a, b):
    return (a * b + a.sigmoid()).amax(-1)


def of_all(a, b):
    x = torch.relu(a * b) * a.sigmoid()
    return x.max() * x.min(), x.amin(0)


def infinity_norm(a, b):
    return torch.linalg.vector_norm(a * b, float("inf"), -1)


def recomputed(a, b):
    return checkpoint(pooled, a, b, use_reentrant=False)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("f", [pooled, of_all, infinity_norm, recomputed])
def test_gradients_of_the_greatest(f, dtype):
    """NaN before: no element computed again was equal to the greatest, by whose number autograd divides."""
    torch.manual_seed(0)
    a, b = (torch.randn(64, 256).to(dtype).requires_grad_() for _ in range(2))
    results = f(a, b), torch.compile(f, backend="mindspeed")(a, b)
    expected, got = (
        torch.autograd.grad(sum(t.float().sum() for t in (r if isinstance(r, tuple) else [r])), (a, b)) for r in results
    )
    for e, g in zip(expected, got, strict=True):
        # Elements whose values differ by less than a rounding may change places as the greatest.
        assert g.isfinite().all() and (e != 0).sum() * 0.9 <= (g != 0).sum() <= (e != 0).sum() * 1.1


@pytest.mark.parametrize("dtype", NARROW)
def test_a_filter_keeps_the_last_of_the_best(dtype):
    def kept(a, b):
        x = a * b + a.sigmoid()
        return (x >= x.topk(4).values[..., -1:]).sum(-1)

    torch.manual_seed(0)
    a, b = (torch.randn(512, 256).to(dtype) for _ in range(2))
    assert torch.compile(kept, backend="mindspeed")(a, b).min() == 4


def test_in_the_report():
    def f(a, b):
        x = a * b
        return x == x.amax(-1, keepdim=True)

    report = explain(f, *(torch.randn(4, 8).bfloat16() for _ in range(2)), codegen="inductor")
    assert report.counts[compared_elements.NAME] == 1
