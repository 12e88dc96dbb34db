"""Layers that are alike are read once without a mark (torch 2.13)."""

from __future__ import annotations

import functools

import pytest
import torch
from torch._dynamo.utils import counters

import mindspeed_fx
from mindspeed_fx.backend import Compilation
from mindspeed_fx.compat import alike_layers
from mindspeed_fx.report import recorder
from tests.capture.regions import needs_reuse, step

pytestmark = needs_reuse


class Layer(torch.nn.Module):
    def __init__(self, size=8):
        super().__init__()
        self.linear, self.act = torch.nn.Linear(size, size, dtype=torch.float64), torch.nn.SiLU()
        self.drop, self.scale, self.times, self.inside = torch.nn.Dropout(0.2), 1.0, 1, None

    def forward(self, x, *, factor=1.0):
        y = x + self.drop(self.act(self.linear(x))) * self.scale * self.times * factor
        return y if self.inside is None else self.inside(self, y)


class Model(torch.nn.Module):
    def __init__(self, layers=10):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, factor=0.5)
        return x.square().mean()


@pytest.fixture
def regions(monkeypatch):
    """Of each graph that Dynamo gives: calls of regions, and bodies. Torch takes a region that is called once for what
    it calls."""
    counts, compile = [], Compilation.compile

    def count(self, gm, inputs):
        calls = gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph)
        counts.append((len(calls), len({n.args[0].target for n in calls})))
        return compile(self, gm, inputs)

    monkeypatch.setattr(Compilation, "compile", count)
    torch._dynamo.reset()
    return counts


def compiled(model, **settings):
    return torch.compile(model, backend="mindspeed", **{"options": {"codegen": "eager"}, **settings})


X = torch.randn(4, 8, dtype=torch.float64)


def test_layers_are_read_once(regions):
    """Two of them: the first one has an input without a gradient."""
    model = Model()
    torch.testing.assert_close(step(model, compiled(model, fullgraph=True), X), step(model, model, X))
    assert regions == [(9, 1)]


def test_a_report_tells():
    torch._dynamo.reset()
    with recorder.collecting() as graphs:
        compiled(Model(), fullgraph=True)(X).backward()
    (graph,) = graphs
    assert graph.effective["regions"] == "9 calls of 1 that Dynamo read"


GLOBAL = Model()


@pytest.mark.parametrize("where", ["outer function", "globals", "sequential"])
def test_where_layers_are(where, regions):
    model = GLOBAL if where == "globals" else Model()
    if where == "sequential":
        model.layers = torch.nn.Sequential(*model.layers)
    calls = {
        "outer function": lambda x: model(x),
        "globals": lambda x: GLOBAL(x),
        "sequential": lambda x: model.layers(x).square().mean(),
    }
    torch.testing.assert_close(step(model, compiled(calls[where]), X), step(model, calls[where], X))
    assert regions == [(9, 1)]


def test_a_list_may_hold_none(regions):
    model = Model()
    model.layers.append(None)
    model.forward = lambda x: functools.reduce(lambda x, layer: layer(x), list(model.layers)[:-1], x).square().mean()
    torch.testing.assert_close(step(model, compiled(model), X), step(model, model, X))
    assert regions == [(9, 1)]


def test_lists_within_layers_are_left_to_them(regions):
    """Experts, as a rule: which of them are called, and for how many tokens, data may decide."""

    class Mixture(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = Model(12)

        def forward(self, x):
            return x + self.experts(x)

    class Mixtures(Model):
        def __init__(self):
            torch.nn.Module.__init__(self)
            self.layers = torch.nn.ModuleList(Mixture() for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

    compiled(Mixtures())(X)
    assert regions == [(0, 0)]


def test_few_layers_are_read_each(regions):
    compiled(Model(alike_layers.FEWEST - 1))(X)
    assert regions == [(0, 0)]


def test_nothing_is_shared_where_the_pass_is_off(regions):
    compiled(Model(), options={"codegen": "eager", "disable": ["lowering.repeated_layers"]})(X)
    assert regions == [(0, 0)]


def test_other_backends_are_left_alone():
    torch._dynamo.reset()
    graphs = []
    torch.compile(Model(), backend=lambda gm, inputs: graphs.append(gm) or gm)(X)
    assert not list(graphs[0].children())


def test_a_bad_option_is_told_as_ever(regions):
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="option \"codegen\" is 'nothing'"):
        compiled(Model(), options={"codegen": "nothing"})(X)


def broken(layer, y):
    torch._dynamo.graph_break()
    return y + 1


def aliased(layer, y):
    layer.seen = y
    return y


def remembering(layer, y):
    """What is kept is a view of the layer's input or weights: an error, with regions, where the frame ends."""
    layer.seen = layer.linear.weight[0]
    return y + layer.seen


@pytest.mark.parametrize("inside", [broken, aliased, remembering])
def test_a_frame_whose_layers_cannot_be_regions_is_read_without(inside, regions):
    model, few = Model(), Model(alike_layers.FEWEST - 1)
    for layer in [*model.layers, *few.layers]:
        layer.inside = inside
    results = {}
    for each in (few, model):
        torch._dynamo.reset()
        counters.clear()
        regions.clear()
        torch.testing.assert_close(step(each, compiled(each), X), step(each, each, X))
        results[each] = sorted(counters["graph_break"].values()), len(regions)
    assert results[few] == results[model]


def test_a_static_cache(monkeypatch):
    """Its layers keep what is made of a layer's input: an error, with regions, where the frame ends."""
    transformers = pytest.importorskip("transformers", reason="needs Hugging Face transformers")
    monkeypatch.setattr(alike_layers, "FEWEST", 2)
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, vocab_size=32)
    config = transformers.LlamaConfig(num_hidden_layers=2, **sizes)
    model, ids = transformers.LlamaForCausalLM(config).eval(), torch.randint(0, 32, (1, 5))
    cache = transformers.StaticCache(config=config, max_cache_len=8)
    with torch.no_grad():
        result = compiled(model)(input_ids=ids, past_key_values=cache).logits
        torch.testing.assert_close(result, model(input_ids=ids).logits)


def test_an_error_of_a_layer_is_the_callers(regions):
    def wrong(layer, y):
        raise ValueError("not today")

    model = Model()
    model.layers[5].inside = wrong
    with pytest.raises(ValueError, match="not today"):
        compiled(model)(X)


def test_an_error_that_the_model_expects_is_caught(regions):
    def wrong(layer, y):
        raise ValueError("not today")

    class Careful(Model):
        def forward(self, x):
            for layer in self.layers:
                try:
                    x = layer(x)
                except ValueError:
                    x = x + 1
            return x.square().mean()

    model = Careful().eval()
    model.layers[5].inside = wrong
    with torch.no_grad():
        torch.testing.assert_close(compiled(model, fullgraph=True)(X), model(X))


def test_layers_of_many_kinds_are_given_up(regions, monkeypatch):
    begun, region = [], alike_layers._region
    monkeypatch.setattr(alike_layers, "_region", lambda: begun.append(1) or region())
    model = Model(12)
    for i, layer in enumerate(model.layers):
        layer.times = i
    torch.testing.assert_close(step(model, compiled(model), X), step(model, model, X))
    assert len(begun) == alike_layers.MOST_READ and regions == [(0, 0)]


def test_hooks_of_a_layer_are_called(regions):
    model = Model()
    model.layers[5].register_forward_hook(lambda module, inputs, result: 2 * result)
    torch.testing.assert_close(step(model, compiled(model), X), step(model, model, X))
    assert regions == [(8, 1)]


def other_activation(layer):
    layer.act = torch.nn.ReLU()


def other_forward(layer):
    layer.forward = lambda x, factor: 3 * x


def hooked(layer):
    layer.register_forward_hook(lambda module, inputs, result: 2 * result)


def hooked_inside(layer):
    layer.linear.register_forward_hook(lambda module, inputs, result: 2 * result)


def other_mode(layer):
    layer.eval()


def other_number(layer):
    layer.scale = 2.0


def replaced_weight(layer):
    layer.linear.weight = torch.nn.Parameter(2 * layer.linear.weight.detach())


def other_class(layer):
    layer.__class__ = type("Other", (Layer,), {"forward": lambda self, x, factor: -x})


@pytest.mark.parametrize("number", [0, 5])
@pytest.mark.parametrize(
    "change", [other_activation, other_forward, other_mode, other_number, replaced_weight, other_class]
)
def test_a_change_of_one_layer_is_seen(change, number, regions):
    model = Model()
    call = compiled(model)
    before = step(model, call, X)
    change(model.layers[number])
    if change in (other_forward, other_class):
        with torch.no_grad():
            torch.manual_seed(1)
            result = call(X)
            torch.manual_seed(1)
            torch.testing.assert_close(result, model(X))
        return
    expected = step(model, model, X)
    torch.testing.assert_close(step(model, call, X), expected)
    assert not torch.equal(before[0], expected[0])


@pytest.mark.parametrize("change", [other_activation, hooked, hooked_inside, other_mode, other_number])
def test_a_layer_that_differs_is_read(change, regions):
    model = Model()
    change(model.layers[5])
    torch.testing.assert_close(step(model, compiled(model), X), step(model, model, X))


def test_rows_that_change_are_symbols(regions):
    model = Model()
    call = compiled(model)
    for rows in (4, 6, 3):
        x = torch.randn(rows, 8, dtype=torch.float64)
        torch.testing.assert_close(step(model, call, x), step(model, model, x))
    assert [calls for calls, _ in regions] == [9, 9]


@pytest.mark.parametrize("marked", [False, True])
def test_sizes_that_turn_out_to_be_numbers(marked, regions):
    """With ``dynamic=True`` the size of the layers is a symbol, until the first weight tells it."""

    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(8, 8, dtype=torch.float64)

        def forward(self, x):
            return x + self.linear(x).tanh()

    if marked:
        Plain.forward = torch.compiler.nested_compile_region(Plain.forward)
    model = Model()
    model.layers = torch.nn.Sequential(*(Plain() for _ in range(10)))
    model.forward = lambda x: model.layers(x).square().mean()
    call = compiled(model, dynamic=True)
    for rows in (4, 6, 3):
        x = torch.randn(rows, 8, dtype=torch.float64)
        torch.testing.assert_close(step(model, call, x), step(model, model, x))
    assert regions == [(9, 1)]


def test_one_layer_many_times(regions):
    model = Model(2)
    model.layers = torch.nn.ModuleList([model.layers[0]] * 9)
    torch.testing.assert_close(step(model, compiled(model), X), step(model, model, X))


def test_frozen_layers(regions):
    model = Model()
    for layer in model.layers[:4]:
        layer.requires_grad_(False)
    for call in (compiled(model), model):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        call(X).backward()
        gradients = [p.grad for p in model.parameters()]
        if call is not model:
            found = gradients
    torch.testing.assert_close(found, gradients)


def test_buffers_that_layers_write(regions):
    class Norm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(8, dtype=torch.float64)

        def forward(self, x):
            return x + self.norm(x)

    class Norms(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(Norm() for _ in range(9))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

    models = Norms(), Norms()
    models[1].load_state_dict(models[0].state_dict())
    call = compiled(models[0])
    for _ in range(2):
        torch.testing.assert_close(step(models[0], call, X), step(models[1], models[1], X))
    torch.testing.assert_close(dict(models[0].named_buffers()), dict(models[1].named_buffers()))


def test_layers_of_a_saved_step(tmp_path, regions):
    model = Model().eval()
    mindspeed_fx.save_compiled(model, tmp_path / "step", (X,))
    loaded = mindspeed_fx.load_compiled(model, tmp_path / "step")
    torch.testing.assert_close(step(model, loaded, X), step(model, model, X))
    assert len(regions) == 1
    other_activation(model.layers[5])
    torch.testing.assert_close(step(model, loaded, X), step(model, model, X))
