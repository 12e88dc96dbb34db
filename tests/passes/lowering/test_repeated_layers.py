"""Layers that are one graph are compiled once: which are found, what stays as it is, and the values."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import mindspeed_fx
from mindspeed_fx import passes
from mindspeed_fx.compat import fx_graph
from mindspeed_fx.options import Options
from mindspeed_fx.partition.repeats import is_alone, repeats
from mindspeed_fx.passes.base import Context
from mindspeed_fx.passes.lowering import repeated_layers
from tests import models
from tests.models import gradients

aten = torch.ops.aten
CALL = torch.ops.higher_order.invoke_subgraph


class Layer(nn.Module):
    """A layer whose values pass views, a residual sum and a table that all layers share."""

    def __init__(self, width=8, odd=False, slopes=()):
        super().__init__()
        self.slopes = slopes
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 16), nn.Linear(16, width)
        self.odd = odd

    def forward(self, x, shift):
        h = self.up(self.norm(x) + shift)
        h = h.sigmoid() * h.tanh() if self.odd else h.sigmoid() * h.cos()
        heads = h.view(*h.shape[:-1], 4, 4).transpose(-1, -2) * 2
        if self.slopes:
            heads = heads * torch.tensor(self.slopes).to(x)  # a constant of the graph
        return x + self.down(heads.flatten(-2).exp().neg().exp())


class Stack(nn.Module):
    """Layers of one graph, ``odd`` of them of another, all of which read one table."""

    def __init__(self, layers=5, odd=(), p=0.0, slopes=()):
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(Layer(odd=i in odd, slopes=slopes) for i in range(layers))
        self.head, self.p = nn.Linear(8, 10), p

    def forward(self, ids):
        x = self.embedding(ids)
        shift = torch.arange(8, dtype=x.dtype, device=x.device).cos()
        for layer in self.layers:
            x = nn.functional.dropout(layer(x, shift), self.p, self.training)
        return self.head(x).logsumexp(-1).mean()


def shared(gm, **options):
    options = Options.parse({"codegen": "inductor", **options}).resolve("cpu")
    return repeated_layers.repeated_layers(gm, Context(options, "forward"))


@pytest.fixture
def graphs(monkeypatch):
    """Collects what the last stage sees of a model that runs without generated code: (side, graph, its inputs)."""
    seen = []

    def look(gm, context):
        """Looks."""
        inputs = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
        seen.append((context.side, fx_graph.copy_graph(gm), inputs))
        return passes.PassReport("test.look")

    passes.register("test.look", stage="lowered", level=0)(look)
    yield seen
    passes.unregister("test.look")


def step(model, *args, level=1):
    torch.compile(model, backend="mindspeed", options={"codegen": "eager", "level": level})(*args).backward()


def layers_of(gm):
    calls = [n for n in gm.graph.nodes if n.target is CALL]
    return [sum(c.args[0].target == name for c in calls) for name in dict.fromkeys(c.args[0].target for c in calls)]


def values(inputs, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def value(x):
        if not isinstance(x, torch.Tensor):
            return x
        if not x.dtype.is_floating_point:
            return torch.ones(x.shape, dtype=x.dtype)
        result = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
        return result.copy_(torch.rand(x.shape, generator=generator, dtype=x.dtype))

    return [value(x) for x in inputs]


def assert_same_bits(gm, inputs, **options):
    """Shares the layers of ``gm`` and compares what it computes, and which memories its results lie in."""
    before = gm(*values(inputs))
    report = shared(gm, **options)
    after = gm(*values(inputs))
    for one, other in zip(before, after, strict=True):
        assert (one is None and other is None) or (torch.equal(one, other) and one.stride() == other.stride())
    return report


@pytest.mark.parametrize("odd, want", [((), [4]), ((0, 1), [3]), ((3,), [3]), ((4,), [3]), ((1, 3), [])])
def test_neighbours_of_one_graph(graphs, odd, want):
    torch.manual_seed(0)
    step(Stack(layers=5 if not odd else 6, odd=odd).double(), torch.ones(2, 3, dtype=torch.int64), level=0)
    assert [side for side, _, _ in graphs] == ["forward", "backward"]
    for _, gm, inputs in graphs:
        report = assert_same_bits(gm, inputs)
        found = layers_of(gm)
        assert len(found) == len(report.rewrites) == bool(want)
        assert not want or found[0] >= want[0]
        assert want or "no 3 neighbouring stretches of 16 calls or more are alike" in report.notes[0]


def test_exact_counts_on_llama(graphs):
    """The backward of the last layer begins with that of the loss, and is like none."""
    torch.manual_seed(0)
    step(models.Llama(layers=6).double(), *models.tokens())
    for side, gm, inputs in graphs:
        report = assert_same_bits(gm, inputs)
        assert layers_of(gm) == [6 if side == "forward" else 5], side
        assert [s.operator for s in report.rewrites] == [f"{layers_of(gm)[0]} layers"]


def blocks(x, weights, end, before=lambda x: x):
    for w in weights:
        x = before(x)
        for _ in range(3):
            x = end(x).exp().sin().tanh().cos().sigmoid()
        x = x @ w
    return x


def made(f, *args):
    return make_fx(f, tracing_mode="fake")(*args)


WEIGHTS = [torch.eye(6) for _ in range(5)]


def test_a_layer_begins_where_nothing_fused_is_cut():
    gm = made(lambda x, *w: blocks(x.cos(), w, torch.neg).exp(), torch.ones(4, 6), *WEIGHTS)
    found = repeats(gm.graph)
    assert [len(r.layers) for r in found] == [5] and len(found[0].outputs) == 1
    assert found[0].layers[0][-1].target is aten.mm.default or found[0].layers[0][0].target is aten.mm.default


def test_views_of_results_stay_outside_and_memories_apart():
    def f(x, *weights):
        results = []
        for w in weights:
            for _ in range(4):
                x = x.exp().sin().tanh().cos()
            x = x @ w
            results += [x.t(), x[1:], x.clone(), x]
        return results

    gm, x = made(f, torch.ones(6, 6), *WEIGHTS), torch.rand(6, 6)
    want = gm(x, *WEIGHTS)
    shared(gm)
    assert layers_of(gm) == [5]
    have = gm(x, *WEIGHTS)
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(have, want))
    for results in (have, want):
        assert len({r.untyped_storage().data_ptr() for r in results}) == 10


@pytest.mark.parametrize(
    "before, name",
    [
        (torch.nn.functional.dropout, "bernoulli_"),
        (lambda x: x + torch.rand_like(x), "rand_like"),
        (lambda x: x.clone().add_(1), "add_"),
        (lambda x: torch.ops._c10d_functional.wait_tensor(x), "wait_tensor"),
    ],
)
def test_what_is_like_none_stays_between_layers(before, name):
    gm = make_fx(lambda x, *w: blocks(x, w, torch.neg, before), tracing_mode="fake")(torch.ones(4, 6), *WEIGHTS)
    shared(gm)
    assert layers_of(gm) == [5]
    assert sum(name in str(n.target) for n in gm.graph.nodes) == 5


def wait(x):
    return torch.ops._c10d_functional.wait_tensor(x)


def test_calls_between_waits_are_too_few():
    gm = made(lambda x, *w: blocks(x, w, wait, wait), torch.ones(4, 6), *WEIGHTS)
    report = shared(gm)
    assert not report.rewrites and layers_of(gm) == []
    assert report.notes == ["no 3 neighbouring stretches of 16 calls or more are alike; like none are wait_tensor"]


def test_between_waits_what_begins_alike_is_shared():
    """What a schedule puts between two collectives besides a layer's own calls differs from layer to layer."""

    def f(x, *weights):
        outputs = []
        for i, w in enumerate(weights):
            x = blocks(wait(x), [w], torch.neg)
            if i % 2:
                outputs += [(x.cos() @ weights[i - 1]).exp()]
        return x, *outputs

    gm, inputs = made(f, torch.ones(6, 6), *WEIGHTS), [torch.rand(6, 6) for _ in range(6)]
    want = gm(*inputs)
    report = shared(gm)
    assert layers_of(gm) == [5] and [s.operator for s in report.rewrites] == ["5 layers"]
    assert all(torch.equal(a, b) for a, b in zip(gm(*inputs), want, strict=True))


def test_what_remains_of_a_run_is_the_first_of_its_like():
    """It is read after whole runs that begin as it does, and stands before them."""

    def f(x, *weights):
        x = blocks(blocks(wait(x), weights[:1], torch.neg), weights[1:2], torch.sin)
        for end in (torch.neg, torch.neg, torch.sin, torch.sin):
            x = blocks(wait(x), weights[2:3], end)
        return x

    gm, inputs = made(f, torch.ones(6, 6), *WEIGHTS), [torch.rand(6, 6) for _ in range(6)]
    want = gm(*inputs)
    shared(gm)
    assert layers_of(gm) == [3, 3] and torch.equal(gm(*inputs), want)


def test_two_repetitions_after_one_another():
    def f(x, *weights):
        x = blocks(x, weights, torch.neg)
        return blocks(x.t().contiguous() @ x, weights, torch.sin)

    gm, x = made(f, torch.ones(6, 6), *WEIGHTS), torch.rand(6, 6)
    want = gm(x, *WEIGHTS)
    shared(gm)
    assert layers_of(gm) == [5, 5] and torch.equal(gm(x, *WEIGHTS), want)


def test_layers_of_two_kinds_in_turn():
    def f(x, *weights):
        for _ in range(4):
            x = blocks(blocks(x, weights[:1], torch.neg), weights[:1], torch.sin)
        return x

    gm = made(f, torch.ones(4, 6), *WEIGHTS)
    shared(gm)
    assert layers_of(gm) == [4]


@pytest.mark.parametrize(
    "options, why",
    [
        (dict(codegen="eager"), "no code is generated"),
        (dict(memory_budget=0.5), "under a memory budget each layer is ordered for itself"),
        (dict(inductor={"cpp_wrapper": True}), "Inductor's cpp_wrapper calls no graphs"),
    ],
)
def test_where_layers_stay_as_they_are(options, why):
    gm = made(lambda x, *w: blocks(x, w, torch.neg), torch.ones(4, 6), *WEIGHTS)
    report = shared(gm, **options)
    assert report.notes == [why] and layers_of(gm) == []


def test_other_sizes_are_another_layer():
    weights = [torch.ones(a, b) for a, b in [(6, 6)] * 3 + [(6, 8)] + [(8, 8)] * 4]
    gm = made(lambda x, *w: blocks(x, w, torch.neg), torch.ones(4, 6), *weights)
    shared(gm)
    assert sorted(layers_of(gm)) == [
        3,
        3,
    ]  # the product of 6 by 8 is the first of its kind, and what stands before it is not cut off


def test_generated_code_of_one_layer_trains(graphs):
    torch.manual_seed(0)
    model, ids = Stack(layers=4, slopes=(1.0, 0.5, 0.25, 2.0)).double(), torch.randint(0, 10, (2, 3))
    loss, want = gradients(model, ids)
    model.zero_grad()
    torch.compile(model, backend="mindspeed", fullgraph=True)(ids).backward()
    assert [layers_of(gm) for _, gm, _ in graphs] != [[], []]
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, want[name], rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_of_each_layer_is_its_own(dtype):
    """Masks by seeds: the same numbers with and without shared layers, others in every layer."""
    model, ids = Stack(layers=6, p=0.5).to(dtype), torch.randint(0, 10, (4, 16))
    results = []
    for disable in ((), (repeated_layers.NAME,)):
        torch._dynamo.reset()
        if not disable:
            report = mindspeed_fx.explain(model, ids)
            assert [s.operator for s in report.sites(repeated_layers.NAME)] == (
                ["5 layers", "4 layers"] if dtype == torch.float32 else ["5 layers"] * 2
            )
        torch._dynamo.reset()
        model.zero_grad()
        torch.manual_seed(3)
        loss = torch.compile(model, backend="mindspeed", options={"disable": disable}, fullgraph=True)(ids)
        loss.backward()
        results.append((loss.detach(), [p.grad for p in model.parameters()]))
    (loss, ours), (want, theirs) = results
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(loss, want, rtol=tolerance, atol=tolerance)
    for one, other in zip(ours, theirs):
        assert (one - other).norm() <= tolerance * other.norm()


def test_what_the_forward_lays_out_anew_is_another_layer(graphs):
    """Convolutions save channels last what lies outside of a layer, and as it was traced what layers return."""
    torch.manual_seed(0)
    blocks = [m for _ in range(4) for m in (nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU6())]
    stem = (nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU6())
    model = nn.Sequential(*stem, *blocks, nn.Conv2d(4, 6, 3, bias=False)).double()
    x = torch.randn(2, 3, 6, 6).double()
    model(x).cos().sum().backward()
    want = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    with torch._inductor.config.patch(force_disable_caches=True):
        torch.compile(model, backend="mindspeed", fullgraph=True)(x).cos().sum().backward()
    assert layers_of(next(gm for side, gm, _ in graphs if side == "backward"))
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, want[name], rtol=1e-10, atol=1e-12)


def test_calls_that_stay_where_they_are():
    c10d = torch.ops._c10d_functional
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    stays = [
        graph.call_function(c10d.all_reduce.default, (x, "sum", "0")),
        graph.call_function(c10d.wait_tensor.default, (x,)),
        graph.call_function(aten.bernoulli.default, (x,)),
        graph.call_function(aten.add_.Tensor, (x, 1)),
    ]
    moves = [graph.call_function(aten.add.Tensor, (x, 1)), graph.call_function(aten.view.default, (x, [-1]))]
    assert [is_alone(n) for n in stays + moves] == [True] * 4 + [False] * 2


@pytest.mark.parametrize("distance, want", [(37, [3]), (40, [5])])
def test_layers_whose_weights_are_not_aligned_alike(distance, want):
    """Code for a GPU takes all to be aligned as the first is; of weights in one buffer here the outer two are."""
    flat = torch.rand(5 * distance)
    weights = [flat[i * distance :][:36].view(6, 6) for i in range(5)]
    gm = made(lambda x, *w: blocks(x, w, torch.neg), torch.ones(4, 6), *weights)
    shared(gm)
    assert layers_of(gm) == want


def test_what_the_first_layer_reads_twice_others_may_read_apart():
    """Every layer reads the first's input beside its own."""

    def f(x, *weights):
        y = x
        for w in weights:
            y = (blocks(y, [torch.eye(6)], torch.neg) * x) @ w
        return y

    gm, inputs = made(f, torch.ones(6, 6), *WEIGHTS), [torch.rand(6, 6) for _ in range(6)]
    want = gm(*inputs)
    shared(gm)
    assert layers_of(gm) == [5]
    assert torch.equal(gm(*inputs), want)
