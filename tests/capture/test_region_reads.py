"""What layers read that no guard of theirs tells: marked layers, and those that are read once without a mark."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mindspeed_fx.compat import alike_layers
from tests.capture.regions import needs_reuse

pytestmark = needs_reuse

LAYERS, ONE = 5, 3
SCALE, CALLS = 1.0, []


@pytest.fixture(autouse=True)
def a_few_are_many(monkeypatch):
    monkeypatch.setattr(alike_layers, "FEWEST", LAYERS - 1)


class Settings:
    def __init__(self, factor):
        self.factor = factor


SHARED = Settings(3.0)


class Layer(torch.nn.Module):
    """Scaled by what ``read`` finds."""

    def __init__(self, read, settings):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8, dtype=torch.float64)
        self.read, self.settings, self.scale, self.table = read, settings, 1.0, settings.__dict__
        self.own = {"factor": 1.0}

    def forward(self, x):
        return torch.tanh(self.linear(x)) * self.read(self)


class Marked(Layer):
    forward = torch.compiler.nested_compile_region(Layer.forward)


class Checkpointed(Layer):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class MarkedOutside(Checkpointed):
    forward = torch.compiler.nested_compile_region(Checkpointed.forward)


class MarkedTwice(Layer):
    @torch.compiler.nested_compile_region
    def forward(self, x):
        return self.inside(x)

    inside = torch.compiler.nested_compile_region(Layer.forward)


class Model(torch.nn.Module):
    def __init__(self, kind, run, read):
        super().__init__()
        self.settings, self.run = Settings(2.0), run
        self.layers = torch.nn.ModuleList(kind(read, self.settings) for _ in range(LAYERS))

    def forward(self, x):
        return self.run(self, x * self.settings.factor)


def global_number(model, x):
    global SCALE
    SCALE = 1.0
    for layer in model.layers:
        SCALE += 1
        x = layer(x)
    return x


def global_list(model, x):
    CALLS.clear()
    for layer in model.layers:
        CALLS.append(1)
        x = layer(x)
    return x


def own_attribute(model, x):
    for i, layer in enumerate(model.layers):
        layer.scale = float(i)
        x = layer(x)
    return x


def shared_attribute(model, x):
    for i, layer in enumerate(model.layers):
        model.settings.factor = float(i)
        x = layer(x)
    model.settings.factor = 2.0
    return x


def global_object(model, x):
    for i, layer in enumerate(model.layers):
        SHARED.factor = float(i)
        x = layer(x)
    return x


def global_object_read_first(model, x):
    x = x * SHARED.factor
    x = model.layers[0](x)
    for i, layer in enumerate(model.layers[1:]):
        SHARED.factor = float(i)
        x = layer(x)
    return x


def global_list_read_first(model, x):
    CALLS[:] = [1]
    x = x * len(CALLS)
    for layer in model.layers:
        x = layer(x)
        CALLS.append(1)
    return x


def own_keywords(model, x):
    known = dict(factor=1.0)
    for i, layer in enumerate(model.layers):
        known.update(factor=float(i))
        layer.table = known
        x = layer(x)
    return x


def own_attributes_before(model, x):
    for i, layer in enumerate(model.layers):
        layer.scale = float(i)
    return in_turn(model, x)


def own_tables_before(model, x):
    for i, layer in enumerate(model.layers):
        layer.own["factor"] = float(i)
    return in_turn(model, x)


def shared_table(model, x):
    for i, layer in enumerate(model.layers):
        model.layers[0].table["factor"] = float(i)
        x = layer(x)
    model.layers[0].table["factor"] = 2.0
    return x


def own_tensor(model, x):
    scales = [layer.linear.bias.sum() for layer in model.layers]
    for layer, scale in zip(model.layers, scales):
        layer.extra = scale
        x = layer(x)
    return x


def some_without_gradients(model, x):
    for i, layer in enumerate(model.layers):
        with torch.set_grad_enabled(i >= 3):
            x = layer(x)
    return x


def in_turn(model, x):
    for layer in model.layers:
        x = layer(x)
    return x


WRITES = [
    (global_number, lambda layer: SCALE),
    (global_list, lambda layer: float(len(CALLS))),
    (own_attribute, lambda layer: layer.scale),
    (shared_attribute, lambda layer: layer.settings.factor),
    (global_object, lambda layer: SHARED.factor),
    (global_object_read_first, lambda layer: SHARED.factor),
    (global_list_read_first, lambda layer: float(len(CALLS))),
    (own_keywords, lambda layer: layer.table["factor"]),
    (own_attributes_before, lambda layer: layer.scale),
    (own_tables_before, lambda layer: layer.own["factor"]),
    (shared_table, lambda layer: layer.table["factor"]),
    (own_tensor, lambda layer: layer.extra),
    (some_without_gradients, lambda layer: 1.0),
]
KINDS = [Layer, Checkpointed, Marked, MarkedOutside, MarkedTwice]


def step(model, call, x):
    model.zero_grad()
    result = call(x)
    result.square().mean().backward()
    gradients = [torch.zeros(()) if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [result.detach(), *gradients]


def compiled(model):
    torch._dynamo.reset()
    return torch.compile(model, backend="mindspeed", options={"codegen": "eager"})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("run, read", WRITES, ids=[run.__name__ for run, _ in WRITES])
def test_what_the_frame_writes_between_layers_is_seen(kind, run, read):
    torch.manual_seed(0)
    model, x = Model(kind, run, read), torch.randn(4, 8, dtype=torch.float64)
    SHARED.factor = 3.0
    result = step(model, compiled(model), x)
    SHARED.factor = 3.0
    torch.testing.assert_close(result, step(model, model, x))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("later", [False, True])
def test_an_object_that_the_model_knows_too_may_be_another_one_in_a_layer(kind, later):
    torch.manual_seed(0)
    model, x = Model(kind, in_turn, lambda layer: layer.settings.factor), torch.randn(4, 8, dtype=torch.float64)
    call = compiled(model)
    if later:
        torch.testing.assert_close(step(model, call, x), step(model, model, x))
    model.layers[ONE].settings = Settings(7.0)
    expected = step(model, model, x)
    torch.testing.assert_close(step(model, call, x), expected)
    model.layers[ONE].settings = model.settings
    assert not torch.equal(model(x), expected[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_that_the_model_uses_too_is_not_that_of_every_layer(kind):
    torch.manual_seed(0)
    tied = lambda model, x: in_turn(model, x @ model.layers[0].linear.weight)  # noqa: E731
    model, x = Model(kind, tied, lambda layer: 1.0), torch.randn(4, 8, dtype=torch.float64)
    torch.testing.assert_close(step(model, compiled(model), x), step(model, model, x))


@pytest.mark.parametrize("marked", [False, True])
def test_a_layer_within_autocast_is_not_one_without(marked):
    class Narrow(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, x):
            y = self.linear(x)
            return 2 * y if y.dtype == torch.bfloat16 else 3 * y

    if marked:
        Narrow.forward = torch.compiler.nested_compile_region(Narrow.forward)
    layers, x = torch.nn.ModuleList(Narrow() for _ in range(LAYERS)), torch.randn(4, 8)

    def run(x):
        results = []
        for i, layer in enumerate(layers):
            with torch.autocast("cpu", torch.bfloat16, enabled=i % 2 == 0):
                results.append(layer(x))
        return results

    layers.forward = run
    for result, expected in zip(compiled(layers)(x), run(x), strict=True):
        torch.testing.assert_close(result, expected)


def times_in_place(model, x):
    for layer in model.layers:
        x = layer(x)
        x *= 0.5
        assert not x.is_leaf
    return x


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_layer_returns_may_be_written(kind):
    """With torch's own backends it may not, of a layer that was not read."""
    torch.manual_seed(0)
    model, x = Model(kind, times_in_place, lambda layer: 1.0), torch.randn(4, 8, dtype=torch.float64)
    torch.testing.assert_close(step(model, compiled(model), x), step(model, model, x))


@pytest.mark.parametrize("marked", [False, True])
def test_layers_with_a_transposed_weight(marked):
    """With torch's own backends marked ones end in an error: Dynamo reads ``weight.T`` outside of the region."""

    class Transposed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(8, 8, bias=False, dtype=torch.float64)

        def forward(self, x):
            return torch.tanh(x @ self.linear.weight.T)

    if marked:
        Transposed.forward = torch.compiler.nested_compile_region(Transposed.forward)
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(*(Transposed() for _ in range(LAYERS))), torch.randn(4, 8, dtype=torch.float64)
    torch.testing.assert_close(step(model, compiled(model), x), step(model, model, x))


class Beside(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x, y, n=1):
        return torch.tanh(self.linear(x)) + 2 * y * n + (3 if n is True else 0)


class MarkedBeside(Beside):
    forward = torch.compiler.nested_compile_region(Beside.forward)


def first_is_itself(layers, x):
    y = x
    for layer in layers:
        x = layer(x, y)
    return x


def others_are_themselves(layers, x):
    x = layers[0](x, x.cos())
    for layer in layers[1:]:
        x = layer(x, x)
    return x


def weight_of_the_first(layers, x):
    for layer in layers:
        x = layer(x, layers[0].linear.bias)
    return x


def weight_of_the_model(layers, x):
    for layer in layers:
        x = layer(x, layers.shared)
    return x


def own_weight(layers, x):
    for i, layer in enumerate(layers):
        x = layer(x, layers[i - i % 2].linear.bias)
    return x


def numbers(layers, x):
    for i, layer in enumerate(layers):
        x = layer(x, x, (1, True, 1.0, 2.0)[i % 4])
    return x


def under_a_transformation(layers, x):
    return layers[0](x, x) + torch.func.vmap(lambda row: first_is_itself(layers, row))(x)


RUNS = [
    first_is_itself,
    others_are_themselves,
    weight_of_the_first,
    weight_of_the_model,
    own_weight,
    numbers,
    under_a_transformation,
]


@pytest.mark.parametrize("kind", [Beside, MarkedBeside])
@pytest.mark.parametrize("run", RUNS)
def test_which_arguments_are_the_same(kind, run):
    """With torch's own backends most of it is wrong for marked layers, or an error."""
    if kind is MarkedBeside and run is under_a_transformation:
        pytest.skip("marked layers under torch.func.vmap are an error of torch's own")
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(kind() for _ in range(LAYERS))
    layers.__dict__["shared"] = layers[0].linear.bias
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    layers.forward = lambda x: run(layers, x)
    torch.testing.assert_close(step(layers, compiled(layers), x), step(layers, layers, x))


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("tied", [0, ONE])
def test_weights_that_are_one_in_one_layer_are_two_in_others(tied, marked):
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (torch.nn.Linear(8, 8, dtype=torch.float64) for _ in range(2))

        def forward(self, x):
            return torch.tanh(self.a(x)) + 3 * self.b(x)

    if marked:
        Two.forward = torch.compiler.nested_compile_region(Two.forward)
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(*(Two() for _ in range(LAYERS))), torch.randn(4, 8, dtype=torch.float64)
    model[tied].b.weight = model[tied].a.weight
    torch.testing.assert_close(step(model, compiled(model), x), step(model, model, x))


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("number", [0, ONE])
def test_a_tensor_that_is_only_looked_at_is_guarded(number, marked):
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(8, 8, dtype=torch.float64)
            self.table = torch.zeros(3)

        def forward(self, x):
            return torch.tanh(self.linear(x)) * self.table.shape[0]

    if marked:
        Scaled.forward = torch.compiler.nested_compile_region(Scaled.forward)
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(*(Scaled() for _ in range(LAYERS))), torch.randn(4, 8, dtype=torch.float64)
    call = compiled(model)
    torch.testing.assert_close(step(model, call, x), step(model, model, x))
    model[number].table = torch.zeros(5)
    torch.testing.assert_close(step(model, call, x), step(model, model, x))
