"""Equal 16-bit sums are computed once where generated C++ would declare them twice."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from mindspeed_fx.options import Options
from mindspeed_fx.passes.base import Context
from mindspeed_fx.passes.lowering import shared_sums
from tests.models import explain

aten = torch.ops.aten
NARROW = [torch.bfloat16, torch.float16]


def rewritten(f, x, codegen="inductor"):
    gm = make_fx(f, tracing_mode="fake")(x)
    return gm, shared_sums.shared_sums(gm, Context(Options.parse({"codegen": codegen}).resolve("cpu"), "backward"))


def sums(gm):
    return sum(n.target in (aten.sum.dim_IntList, aten.sum.default) for n in gm.graph.nodes)


@pytest.mark.parametrize("dtype", NARROW)
def test_one_sum_and_copies_with_memory_of_their_own(dtype):
    x = torch.randn(6, 4).to(dtype)
    gm, report = rewritten(lambda x: (x.sum(0, True), x.sum(0, True), x.sum(0, True), x.sum(), x.sum()), x)
    assert [s.operator for s in report.rewrites] == ["sum"] * 3 and sums(gm) == 2
    results = gm(x)
    assert all(torch.equal(r, x.sum(0, True)) for r in results[:3]) and torch.equal(results[4], x.sum())
    assert len({r.data_ptr() for r in results}) == 5
    gm.graph.lint()


@pytest.mark.parametrize(
    "f",
    [
        lambda x: (x.sum(0), x.sum(1)),
        lambda x: (x.sum(0), x.sum(0, True)),
        lambda x: (x.sum(0), x.sin().sum(0)),
        lambda x: (x.float().sum(0), x.float().sum(0)),
    ],
)
def test_other_sums_stay(f):
    x = torch.randn(6, 4).bfloat16()
    gm, report = rewritten(f, x)
    assert not report.rewrites and sums(gm) == 2


def test_without_generated_code_nothing_is_wrong():
    gm, report = rewritten(lambda x: (x.sum(0), x.sum(0)), torch.randn(6, 4).bfloat16(), codegen="eager")
    assert sums(gm) == 2 and report.notes == ["only generated C++ declares a sum twice"]


class Parallel(torch.nn.Module):
    """Two layers whose results are added, as attention and MLP of GPT-NeoX are."""

    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

    def forward(self, x):
        return (self.a(x) + self.b(x.sin())).float().square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", NARROW)
def test_biases_with_one_gradient_train(dtype):
    """torch 2.13's Inductor alone: "conflicting declaration"."""
    model, x = Parallel().to(dtype), torch.randn(2, 64, 64).to(dtype)
    exact = Parallel().double()
    exact.load_state_dict(model.state_dict())
    exact(x.double()).backward()
    report = explain(model, x, codegen="inductor")
    assert len(report.sites(shared_sums.NAME)) == 1
    torch.compile(model, backend="mindspeed")(x).backward()
    assert model.a.bias.grad.data_ptr() != model.b.bias.grad.data_ptr()
    for p, q in zip(model.parameters(), exact.parameters()):
        assert (p.grad - q.grad).norm() <= 0.01 * q.grad.norm()
