"""Regions that the caller marked by torch.compiler.nested_compile_region."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from mindspeed_fx.backend import Compilation
from mindspeed_fx.capture.regions import inline_regions
from mindspeed_fx.compat import unread_regions
from mindspeed_fx.compat.graph_inputs import copy_dynamo_graph
from mindspeed_fx.planning.simulate import simulate
from mindspeed_fx.report import recorder
from mindspeed_fx.sharding.plan import Plan
from tests.capture.regions import needs_reuse, step


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
        sites = [(s.operator, s.module, s.source) for run in graph.runs for s in run.report.rewrites]
        results.append((sites, [loss.detach(), *(p.grad.clone() for p in model.parameters())]))
    (sites, expected), (marked, found) = results
    assert marked == sites and [m for _, m, _ in sites if "norm" in m] == [f"layers.{i}.norm" for i in range(layers)]
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


def test_a_region_with_options_of_its_own_stays():
    @torch.compiler.nested_compile_region
    def region(x):
        return x.sin()

    graphs = []
    torch._dynamo.reset()
    torch.compile(lambda x: region(region(x)), backend=lambda gm, inputs: graphs.append(gm) or gm)(torch.ones(2))
    (graph,) = graphs
    for options, count in (("theirs", 2), (None, 0)):
        for body in graph.children():
            body.meta["nested_region_config"] = options
        copy = copy_dynamo_graph(graph)
        inline_regions(copy)
        calls = copy.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph)
        assert len(calls) == count and len(list(copy.children())) == bool(count)
        copy.graph.lint()
    assert any(n.target is torch.ops.higher_order.invoke_subgraph for n in graph.graph.nodes)  # Dynamo's own is left


class Layers(torch.nn.Module):
    """Ten layers, each a region of the options ``kept``."""

    def __init__(self, kept):
        super().__init__()

        class Layer(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.linear, self.act = torch.nn.Linear(8, 8, dtype=torch.float64), torch.nn.SiLU()
                self.drop, self.scale, self.times = torch.nn.Dropout(0.2), 1.0, 1

            def forward(self, x):
                return x + self.drop(self.act(self.linear(x))) * self.scale * self.times

        Layer.forward = torch.compiler.nested_compile_region(Layer.forward, **kept)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(10))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def other_activation(layer):
    layer.act = torch.nn.ReLU()


def other_mode(layer):
    layer.eval()


def other_number(layer):
    layer.scale = 2.0


def other_count(layer):
    layer.times = 3


def no_bias(layer):
    layer.linear.bias = None


def hooked(layer):
    layer.linear.register_forward_hook(lambda module, inputs, result: 2 * result)


CHANGES = [other_activation, other_mode, other_number, other_count, no_bias]


def compiled_for(model):
    torch._dynamo.reset()
    return torch.compile(model, backend="mindspeed", fullgraph=True, options={"codegen": "eager"})


@needs_reuse
@pytest.mark.parametrize("number", [0, 5])
@pytest.mark.parametrize("change", CHANGES)
def test_layers_that_were_not_read_are_guarded(change, number):
    """Torch's own backends go on with the model as it was, or end in an error."""
    model, x = Layers({}), torch.randn(4, 8, dtype=torch.float64)
    compiled = compiled_for(model)
    before = step(model, compiled, x)
    torch.testing.assert_close(before, step(model, model, x))
    change(model.layers[number])
    expected = step(model, model, x)
    torch.testing.assert_close(step(model, compiled, x), expected)
    assert not torch.equal(before[0], expected[0])
    with torch._dynamo.config.patch(error_on_recompile=True):
        torch.testing.assert_close(step(model, compiled, x), expected)


@needs_reuse
@pytest.mark.parametrize("change", [*CHANGES, hooked])
def test_a_layer_that_differs_is_read(change):
    """Torch's own backends compute a ReLU as the SiLU of another layer, and leave out hooks of modules inside."""
    model, x = Layers({}), torch.randn(4, 8, dtype=torch.float64)
    change(model.layers[5])
    torch.testing.assert_close(step(model, compiled_for(model), x), step(model, model, x))


@needs_reuse
def test_what_the_package_traces_is_the_whole_model():
    """As planners do, by backends of their own."""

    def backend(gm, inputs):
        return gm

    backend.__module__ = recorder.__name__
    model, x = Layers({}).eval(), torch.randn(4, 8, dtype=torch.float64)
    other_activation(model.layers[5])
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, backend=backend, fullgraph=True)(x), model(x))


@needs_reuse
def test_layers_that_are_alike_are_read_once(monkeypatch):
    """Twice here: the first has an input without a gradient."""
    bodies = []
    monkeypatch.setattr(
        Compilation, "compile", lambda self, gm, inputs: bodies.append(len(list(gm.children()))) or gm.forward
    )
    model = Layers({})
    compiled_for(model)(torch.randn(4, 8, dtype=torch.float64))
    other_activation(model.layers[5])
    compiled_for(model)(torch.randn(4, 8, dtype=torch.float64))
    assert bodies == [2, 3]


@needs_reuse
def test_torch_guards_no_layer_that_it_did_not_read():
    torch._dynamo.reset()
    model, x = Layers({}), torch.randn(4, 8, dtype=torch.float64)
    model.eval()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    before = compiled(x)
    other_activation(model.layers[5])
    assert torch.equal(compiled(x), before) and not torch.allclose(model(x), before)


@needs_reuse
def test_more_kinds_of_layers_than_are_kept():
    model, x = Layers({"max_reuse_entries": 3}), torch.randn(4, 8, dtype=torch.float64)
    for i, layer in enumerate(model.layers):
        layer.times = i
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    unread_regions.logger.addHandler(handler)
    try:
        torch.testing.assert_close(step(model, compiled_for(model), x), step(model, model, x))
    finally:
        unread_regions.logger.removeHandler(handler)
    (line,) = lines
    assert "Layer.forward" in line and "max_reuse_entries" in line


@needs_reuse
def test_layers_of_a_parallelized_model_are_read_each():
    rows, x = Plan("rows", ("dp",), inputs={"*": {"dp": "S(0)"}}), torch.randn(4, 8, dtype=torch.float64)
    model = Layers({}).eval()
    model(x).backward()
    gradients = simulate(model, {"dp": 2}, rows, x).gradients
    for name, p in model.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad)
