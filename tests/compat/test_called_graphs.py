"""Graphs that a graph calls: what they may overwrite, and regions that the caller marked."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from mindspeed_fx.report import recorder


def layer(x, table):
    return x + (x.softmax(-1) * table).sin() * (x.tanh() + table)


@torch.compiler.nested_compile_region
def marked_layer(x, table):
    return layer(x, table)


@pytest.mark.parametrize("each", [layer, marked_layer])
def test_a_called_graph_leaves_its_inputs_as_they_are(each):
    """The table is saved for the backward, which may overwrite it once its last layer has read it, not its first."""

    def loss(x, weight, each):
        y = (x @ weight).sin()
        table = (y @ weight).cos()
        for _ in range(6):
            y = each(y, table)
        return y.square().sum()

    torch.manual_seed(0)
    x, weight = torch.randn(64, 64, dtype=torch.float64), torch.randn(64, 64, dtype=torch.float64) / 8
    weight.requires_grad_()
    (expected,) = torch.autograd.grad(loss(x, weight, layer), weight)
    (got,) = torch.autograd.grad(torch.compile(loss, backend="mindspeed")(x, weight, each), weight)
    torch.testing.assert_close(got, expected)


def test_calls_of_a_graph_that_passes_leave_alone_are_not_evaluated_again(monkeypatch):
    from torch._inductor import fx_utils

    if not hasattr(fx_utils, "_is_fake_tensor_same"):
        pytest.skip("this torch asks nothing of called graphs")
    updated = []
    update = fx_utils.FakeTensorUpdater.incremental_update

    def count(self):
        updated.append((len(self.gm.graph.nodes), update(self)))
        return updated[-1][1]

    monkeypatch.setattr(fx_utils.FakeTensorUpdater, "incremental_update", count)
    torch._dynamo.reset()
    x = torch.randn(8, 8)
    options = {"inductor": {"fx_graph_cache": False}}
    torch.compile(lambda x: stack(x), backend="mindspeed", options=options)(x)
    assert updated and not any(nodes for _, nodes in updated)


def stack(x):
    for _ in range(6):
        x = layer(x, x.cos()) @ x
    return x


class Marked(torch.nn.Module):
    """Layers of which each calls one region: a norm, a checkpointed gate, a branch of the data, and random numbers."""

    def __init__(self, layers):
        super().__init__()
        parts = lambda: dict(norm=torch.nn.RMSNorm(16), gate=torch.nn.Linear(16, 32), down=torch.nn.Linear(16, 16))  # noqa: E731
        self.layers = torch.nn.ModuleList(torch.nn.ModuleDict(parts()) for _ in range(layers))

    def forward(self, x, region):
        for layer in self.layers:
            x, beside = region(layer, x)
        return (x + beside).square().mean()


def gated(layer, x):
    def gate(h):
        a, b = layer["gate"](h).chunk(2, -1)
        return layer["down"](F.silu(a) * b)

    h = layer["norm"](x)
    h = F.dropout(h, 0.2) + checkpoint(gate, h, use_reentrant=False)
    return x + torch.cond(h.sum() > 0, torch.sin, torch.cos, (h,)), h


@torch.compiler.nested_compile_region
def inner_region(layer, x):
    return gated(layer, x)


@torch.compiler.nested_compile_region
def outer_region(layer, x):
    h, beside = inner_region(layer, x * 0.5)
    return x + h, beside


def within_none(layer, x):
    h, beside = gated(layer, x * 0.5)
    return x + h, beside


@pytest.mark.parametrize("layers", [3, 8])
def test_regions_are_fused_as_code_that_is_not_marked(layers):
    """Regions inside of regions, with a checkpoint and a branch: the same rewrites, graphs and bits."""
    torch.manual_seed(0)
    model, x = Marked(layers).double(), torch.randn(4, 16, dtype=torch.float64)
    results = []
    for region in (within_none, outer_region):
        torch._dynamo.reset()
        model.zero_grad()
        torch.manual_seed(1)
        with recorder.collecting() as graphs:
            compiled = torch.compile(model, backend="mindspeed", fullgraph=True, options={"codegen": "eager"})
            loss = compiled(x, region)
            loss.backward()
            (graph,) = graphs
        counts = {name: n for name, n in graph.counts.items() if n}
        results.append((counts, [loss.detach(), *(p.grad.clone() for p in model.parameters())]))
    (counts, expected), (marked, found) = results
    assert counts == marked and counts["fusion.rms_norm"] == counts["fusion.swiglu"] == layers
    assert all(map(torch.equal, expected, found))


def test_marked_layers_are_left_out_of_what_is_traced(monkeypatch):
    records, begin = [], recorder.begin
    monkeypatch.setattr(recorder, "begin", lambda *args: records.append(begin(*args)) or records[-1])
    torch._dynamo.reset()
    x = torch.randn(4, 16, requires_grad=True)
    weights = [torch.randn(16, 16, requires_grad=True) for _ in range(9)]

    @torch.compiler.nested_compile_region
    def region(x, w):
        return x + F.silu((x @ w).cos() * (x.sin() @ w)).tanh() * (x.exp() + w.sum()).rsqrt()

    def run(x, weights):
        for w in weights:
            x = region(x, w)
        return x.sum()

    torch.compile(run, backend="mindspeed", options={"codegen": "eager"}, dynamic=False)(x, weights).backward()
    assert records[-1].effective["layers"] == "4 are copies of others"
