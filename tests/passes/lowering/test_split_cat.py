"""Pieces that are split along one dimension and joined along another are one copy, and no other pieces are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from mindspeed_fx.options import Options
from mindspeed_fx.passes.base import Context
from mindspeed_fx.passes.lowering.split_cat import NAME, split_cat
from tests.models import explain

aten = torch.ops.aten
CONTEXT = Context(Options.parse({"codegen": "eager"}).resolve("cpu"), "joint")


def rewritten(f, *inputs, tracing_mode="fake"):
    gm = make_fx(f, tracing_mode=tracing_mode)(*inputs)
    want = f(*inputs)
    report = split_cat(gm, CONTEXT)
    results = gm(*inputs)
    assert torch.equal(results, want) and results.is_contiguous() == want.is_contiguous()
    gm.graph.lint()
    return gm, report


def count(gm, *targets):
    return sum(n.target in targets for n in gm.graph.nodes)


@given(st.data())
def test_every_pair_of_dimensions(data):
    shape = data.draw(st.lists(st.integers(1, 3), min_size=2, max_size=4))
    along, across = data.draw(st.permutations(range(len(shape))))[:2]
    pieces = data.draw(st.integers(2, 4))
    shape[along] *= pieces
    x = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    gm, report = rewritten(lambda x: torch.cat(torch.chunk(x + 1, pieces, along), across) * 2, x)
    assert len(report.rewrites) == 1 and not report.skipped
    assert count(gm, aten.split.Tensor, aten.cat.default) == 0


def test_pieces_of_what_lies_in_another_order():
    x = torch.randn(6, 8).t()
    gm, report = rewritten(lambda x: torch.cat(torch.split(x, 2), 1).cos(), x)
    assert len(report.rewrites) == 1 and count(gm, aten.clone.default) == 1


def test_what_lies_in_another_order_stays():
    x = torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last)
    _, report = rewritten(lambda x: torch.cat(torch.chunk(x, 2, 2), 3).cos(), x)
    assert [s.reason for s in report.skipped] == ["the joined lies in memory in another order than its dimensions'"]


def test_a_batch_of_one_row_is_a_view():
    gm, report = rewritten(lambda x: torch.cat(torch.chunk(x.sin(), 4, 1), 0).cos(), torch.randn(1, 8, 6))
    assert len(report.rewrites) == 1 and count(gm, aten.clone.default) == 0


def test_an_output_has_memory_of_its_own():
    x = torch.randn(1, 8, 6)
    gm, report = rewritten(lambda x: torch.cat(torch.chunk(x, 4, 1), 0), x)
    assert len(report.rewrites) == 1 and gm(x).data_ptr() != x.data_ptr()


@pytest.mark.parametrize("symbols", [1, 2])
def test_one_size_may_be_a_symbol(symbols):
    torch._dynamo.reset()
    x = torch.randn(8, 5, 3, requires_grad=True)
    for dim in (1, 2)[:symbols]:
        torch._dynamo.mark_dynamic(x, dim)
    report = explain(lambda x: torch.cat(torch.split(x.sin(), 4), 1).cos(), x)
    reasons = {s.reason for s in report.skipped(NAME)}
    # the slices of the gradient begin at symbols: those stay
    assert (report.counts[NAME], reasons) == ((1, set()) if symbols == 1 else (0, {"several of its sizes are symbols"}))


@pytest.mark.parametrize(
    "f",
    [
        lambda x: torch.cat(torch.chunk(x, 4), 0),
        lambda x: torch.cat(torch.chunk(x, 4)[:3], 1),
        lambda x: torch.cat(torch.chunk(x, 4)[::-1], 1),
        lambda x: torch.cat([*torch.chunk(x, 4)[:3], x[:2]], 1),
        lambda x: torch.cat([*torch.chunk(x, 4), *torch.chunk(x, 4)], 1),
        lambda x: torch.cat([p.sin() for p in torch.chunk(x, 4)], 1),
        lambda x: torch.cat([x[:4], x[2:6]], 1),
        lambda x: torch.cat([x[:2], x[2:4], x[4:6]], 1),
        lambda x: torch.cat([x[::2], x[1::2]], 1),
        lambda x: torch.cat([x[:4], (x + 1)[4:]], 1),
    ],
)
def test_other_pieces_stay(f):
    gm, report = rewritten(f, torch.randn(8, 6))
    assert not report.rewrites and not report.skipped and count(gm, aten.cat.default) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_are_the_same_bits_and_are_rewritten_too(dtype):
    weight = torch.randn(8, 6, dtype=dtype, requires_grad=True)

    def f(w):
        return torch.cat(torch.chunk(w.sin(), 4, 0), 1).cos().sum()

    f(weight).backward()
    want, weight.grad = weight.grad, None
    assert explain(f, weight).counts[NAME] == 2
    torch.compile(f, backend="mindspeed", options={"codegen": "eager"})(weight).backward()
    assert torch.equal(weight.grad, want)
