"""Attention whose values have other heads than its keys (the timestamps of Nemotron 3.5 Transcribe): left to torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mindspeed_fx.planning.explain import Report
from mindspeed_fx.report import recorder


@pytest.mark.parametrize(
    ("keys", "values", "is_grouped"), [(2, 4, True), (4, 2, True), (1, 4, False), (4, 1, False)], ids=str
)
@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_values_and_gradients_are_those_of_the_call(keys, values, is_grouped, codegen):
    def f(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=is_grouped)

    torch.manual_seed(0)
    shapes = [(2, heads, 32, 16) for heads in (4, keys, values)]
    results = []
    with recorder.collecting() as graphs:
        torch._dynamo.reset()
        compiled = torch.compile(f, backend="mindspeed", fullgraph=True, options={"codegen": codegen})
        inputs = [torch.randn(*shape, dtype=torch.float64) for shape in shapes]
        for function in (compiled, f):
            leaves = [x.clone().requires_grad_() for x in inputs]
            out = function(*leaves)
            grads = torch.autograd.grad(out.pow(2).sum(), leaves)
            results.append([out.detach(), *grads])
        (graph,) = graphs
    for ours, eager in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager)
    reasons = [s.reason for s in Report([graph], []).skipped("fusion.attention")]
    assert graph.counts["fusion.attention"] == 0
    assert reasons == [f"keys have {keys} heads and values {values}"]


@pytest.mark.parametrize(
    "leads", [((2, 4), (1, 4), (1, 4)), ((1, 4), (2, 4), (2, 4)), ((2, 1), (2, 4), (2, 4)), ((2, 4), (2, 4), (1, 4))]
)
def test_broadcast_batches_and_heads_are_left(leads):
    torch.manual_seed(0)
    inputs = [torch.randn(*lead, 32, 16, dtype=torch.float64) for lead in leads]
    torch._dynamo.reset()
    with recorder.collecting() as graphs:
        f = torch.compile(F.scaled_dot_product_attention, backend="mindspeed", options={"codegen": "eager"})
        torch.testing.assert_close(f(*inputs), F.scaled_dot_product_attention(*inputs))
        assert [s.reason for s in Report(list(graphs), []).skipped("fusion.attention")] == ["q, k and v are broadcast"]
