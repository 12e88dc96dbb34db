"""The experts' products of 8-bit operands against the operator of one linear, expert by expert."""

from __future__ import annotations

import pytest
import torch

from mindspeed_fx.compat import cpp
from mindspeed_fx.cost.operators import spec
from mindspeed_fx.kernels import linear_fp8
from mindspeed_fx.kernels.base import find
from mindspeed_fx.megatron import experts_fp8

ops = torch.ops.mindspeed
COUNTS = {"all": [40, 0, 33], "fewer": [3, 40, 20], "none": [0, 0, 0]}


def operands(counts, dtype=torch.float32, sizes=(40, 48)):
    torch.manual_seed(0)
    # experts of different magnitudes, so that a scale of another's rows or weight is told
    x = torch.randn(73, sizes[0], dtype=dtype) * torch.logspace(-2, 2, 73).unsqueeze(1).to(dtype)
    weights = [torch.randn(sizes[1], sizes[0], dtype=dtype) * 10**i for i in range(len(counts))]
    return x.requires_grad_(), [w.requires_grad_() for w in weights], torch.tensor(counts)


def one_by_one(x, weights, counts, recipe):
    parts = x[: sum(counts)].split(counts)
    outs = [ops.linear_fp8(rows, weight, recipe) for rows, weight in zip(parts, weights)]
    return torch.cat([*outs, x.new_zeros(len(x) - sum(counts), weights[0].shape[0])])


@pytest.mark.parametrize("recipe", linear_fp8.RECIPES)
@pytest.mark.parametrize("case", COUNTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
def test_each_expert_scales_its_own_rows_and_weight(recipe, case, dtype):
    x, weights, counts = operands(COUNTS[case], dtype)
    grad = torch.randn(73, 48, dtype=dtype)
    out, want = ops.grouped_linear_fp8(x, weights, counts, recipe), one_by_one(x, weights, COUNTS[case], recipe)
    assert torch.equal(out, want)
    grads = (torch.autograd.grad(result, [x, *weights], grad) for result in (out, want))
    for ours, theirs in zip(*grads, strict=True):
        assert ours.dtype == dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("recipe", ["tensor", "block"])
def test_operator_is_what_torch_asks_of_one(recipe):
    x, weights, counts = operands(COUNTS["fewer"])
    torch.library.opcheck(experts_fp8.grouped_linear_fp8, (x, weights, counts, recipe))
    bare = [t.detach() for t in weights]
    for needed in ([True, True], [False, True], [True, False]):
        arguments = torch.randn(73, 48), x.detach(), bare, counts, recipe, needed
        torch.library.opcheck(experts_fp8.grouped_linear_fp8_backward, arguments)


@pytest.mark.parametrize("frozen", ["x", "weights", "one weight"])
def test_gradients_of_what_is_frozen_are_not_made(frozen):
    x, weights, counts = operands(COUNTS["all"])
    for tensor in {"x": [x], "weights": weights, "one weight": weights[:1]}[frozen]:
        tensor.requires_grad_(False)
    out, want = ops.grouped_linear_fp8(x, weights, counts, "row"), one_by_one(x, weights, COUNTS["all"], "row")
    trained = [t for t in (x, *weights) if t.requires_grad]
    for ours, theirs in zip(torch.autograd.grad(out.sum(), trained), torch.autograd.grad(want.sum(), trained)):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("recipe", ["tensor", "mx"])
def test_large_products_are_those_of_the_processor(recipe, monkeypatch):
    """They are taken where one linear would take them."""
    if reason := cpp.problem():
        pytest.skip(reason)
    if not cpp.multiplies_pairs():
        pytest.skip("this processor does not multiply pairs of bfloat16")
    monkeypatch.setattr(linear_fp8, "WORK", 1)
    x, weights, counts = operands(COUNTS["all"], torch.bfloat16, (64, 64))
    with torch.profiler.profile() as profile:
        out = ops.grouped_linear_fp8(x, weights, counts, recipe)
        out.sum().backward()
    calls = [e.count for e in profile.key_averages() if e.key == "mindspeed::narrow_product"]
    assert calls == [6]  # three products of each of two experts that have rows
    torch.testing.assert_close(out, one_by_one(x, weights, COUNTS["all"], recipe), rtol=1e-2, atol=1e-2)


def test_costs_are_those_of_the_linears():
    x, weights, _ = operands(COUNTS["all"], torch.bfloat16)
    counts, grad = torch.tensor([73, 0, 0]), torch.randn(73, 48).bfloat16()
    forward, backward = find(ops.grouped_linear_fp8.default), find(ops.grouped_linear_fp8_backward.default)
    whole = forward.cost(spec(grad), spec(x), [spec(w) for w in weights], spec(counts), "mx")
    one = linear_fp8.linear_fp8.cost(spec(grad), spec(x), spec(weights[0]), "mx")
    assert whole.flops == one.flops and whole.bytes > one.bytes  # the weights of all experts are read
    for needed in ([True, True], [True, False], [False, True]):
        out = [spec(x), *map(spec, weights)]
        whole = backward.cost(out, spec(grad), spec(x), [spec(w) for w in weights], spec(counts), "mx", needed)
        parts = (spec(x), spec(weights[0]))
        one = linear_fp8.linear_fp8_backward.cost(parts, spec(grad), spec(x), spec(weights[0]), "mx", needed)
        assert whole.flops == one.flops
