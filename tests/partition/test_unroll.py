"""Layers that are left out of what is traced, and come back when forward and backward are finished: the same graphs as
those of all layers, number for number; and what is traced whole, with the reason."""

from __future__ import annotations

import gc
import itertools
import re
import weakref

import pytest
import torch
import torch.fx as fx
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import mindspeed_fx.megatron.main_grad  # noqa: F401  the operator
from mindspeed_fx import backend, layers
from mindspeed_fx.partition.shorten import shorten
from mindspeed_fx.partition.stretch import LayersDiffer
from mindspeed_fx.report import recorder

LAYERS = 9


class Block(nn.Module):
    """Causal attention and a gate, with what the model says of it."""

    def __init__(self, width=16, heads=2, scale=1.0, p=0.0, bias=False):
        super().__init__()
        self.heads, self.scale, self.p = heads, scale, p
        self.norm, self.norm2 = nn.LayerNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias), nn.Linear(width, width, bias)
        self.up, self.down = nn.Linear(width, 4 * width, bias), nn.Linear(2 * width, width, bias)

    def forward(self, x, mask=None, table=None):
        b, s, w = x.shape
        q, k, v = (y.view(b, s, self.heads, -1).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        if table is not None:
            q, k = q * table, k * table
        h = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None).transpose(1, 2).reshape(b, s, w)
        x = x + F.dropout(self.out(h), self.p) * self.scale
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    """Blocks between an embedding and a head.

    Args:
        each: of a layer's number, how its block differs.
        read: of the model, hidden states and labels, the loss.
    """

    def __init__(self, each=lambda i: {}, layers=LAYERS, around=None, tied=False, read=None):
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
        self.layers = nn.ModuleList(Block(**each(i)) for i in range(layers))
        self.around, self.read = around or (lambda i, layer, x: layer(x)), read
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids):
        x, states = self.embedding(ids), []
        for i, layer in enumerate(self.layers):
            x = self.around(i, layer, x)
            states.append(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())
        return loss if self.read is None else loss + self.read(states)


def shared_table(i, layer, x):
    return layer(x, table=torch.arange(x.shape[1], dtype=x.dtype)[:, None].cos())


def masks_in_turn(i, layer, x):
    inside = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    return layer(x, mask=inside if i % 2 else inside.triu(-3))


def checkpointed(i, layer, x):
    return checkpoint(layer, x, use_reentrant=False)


ALIKE = {
    "plain": {},
    "dropout, one weight for both ends, a table that all read": {
        "each": lambda i: {"p": 0.3, "bias": True},
        "tied": True,
        "around": shared_table,
    },
    "checkpointed, two kinds in turn": {
        "each": lambda i: {"scale": 1.0 + i % 2},
        "around": checkpointed,
        "layers": 14,
    },
    "two masks in turn": {"around": masks_in_turn, "layers": 16},
    "the first layer is read": {"read": lambda states: states[0].square().mean()},
    "the last layer but one is read": {"read": lambda states: states[-2].square().mean()},
}


@pytest.fixture
def traced(monkeypatch):
    """What is compiled: forwards and backwards as they are given away, and records."""
    graphs, records = [], []
    finished, begin = backend.Compilation._finished, recorder.begin

    def finish(self, gm, inputs, side):
        result = finished(self, gm, inputs, side)
        graphs.append(described(gm, side))
        return result

    def remember(*args):
        records.append(begin(*args))
        return records[-1]

    monkeypatch.setattr(backend.Compilation, "_finished", finish)
    monkeypatch.setattr(recorder, "begin", remember)
    return graphs, records


def described(gm: fx.GraphModule, side: str) -> list:
    """Every call in order with operator, arguments, layout, which of its arguments' memory it lies in, and what torch
    says of it. Torch may order what is saved otherwise: a forward's results are sorted, and inputs stand as they are
    read first."""
    number, rows = {}, []
    read = [a for n in gm.graph.nodes for a in n.all_input_nodes if a.op == "placeholder" and n.op != "output"]
    inputs = dict.fromkeys([*read, *gm.graph.find_nodes(op="placeholder")])
    for n in [*inputs, *(n for n in gm.graph.nodes if n.op != "placeholder")]:
        number[n] = len(number)
        arguments = str(fx.map_arg((n.args, n.kwargs), lambda a: f"%{number[a]}"))
        if n.op == "output" and side == "forward":
            arguments = str(sorted(re.findall("%[0-9]+|None", arguments)))
        layouts = [(t.shape, t.stride(), t.storage_offset(), t.dtype) for t in tensors(n)]
        lies_in = [sorted(number[a] for a in n.all_input_nodes if memory(t) & memory(*tensors(a))) for t in tensors(n)]
        target = n.target if n.op == "call_function" else n.op
        rows.append((str(target), arguments, layouts, lies_in, str(n.meta.get("desc"))))
    return rows


def differing(graphs: list) -> list:
    """What the first graphs of two runs have otherwise than the second."""
    assert len(graphs) == 4
    pairs = [pair for one, other in zip(graphs[:2], graphs[2:]) for pair in itertools.zip_longest(one, other)]
    return [pair for pair in pairs if pair[0] != pair[1]][:3]


def tensors(node: fx.Node) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(node.meta.get("val")) if isinstance(t, torch.Tensor)]


def memory(*values: torch.Tensor) -> set[int]:
    return {t.untyped_storage()._cdata for t in values}


def step(model, ids, whole=False, **options):
    """Loss and gradients of one step."""
    torch._dynamo.reset()
    options = {"codegen": "eager", **options, **({"disable": ["lowering.repeated_layers"]} if whole else {})}
    compiled = torch.compile(model, backend="mindspeed", options=options, fullgraph=True, dynamic=False)
    model.zero_grad()
    torch.manual_seed(1)
    loss = compiled(ids)
    loss.backward()
    return [loss.detach(), *(None if p.grad is None else p.grad.clone() for p in model.parameters())]


def build(**settings):
    torch.manual_seed(0)
    return Model(**settings).double(), torch.randint(32, (2, 12))


@pytest.mark.parametrize("kind", ALIKE)
def test_unrolled_graph_is_that_of_all_layers(kind, traced):
    graphs, records = traced
    model, ids = build(**ALIKE[kind])
    whole = step(model, ids, whole=True)
    few = step(model, ids)
    assert records[-1].effective["layers"].endswith("are copies of others")
    assert not differing(graphs)
    assert all(torch.equal(a, b) for a, b in zip(whole, few, strict=True))


def test_most_layers_are_left_out(traced):
    _, records = traced
    step(*build())
    assert records[-1].effective["layers"] == f"{LAYERS - 5} are copies of others"


def test_frozen_layers_have_no_gradient(traced):
    model, ids = build()
    for name, parameter in model.layers.named_parameters():
        parameter.requires_grad_("norm" in name)
    few, whole = step(model, ids), step(model, ids, whole=True)
    assert traced[1][0].effective["layers"].endswith("are copies of others")
    assert [g is None for g in few] == [g is None for g in whole]
    assert all(a is None or torch.equal(a, b) for a, b in zip(few, whole, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_values_of_the_model_as_it_is(dtype):
    model, ids = build(each=lambda i: {"bias": True}, layers=7)
    model = model.to(dtype)
    loss = model(ids)
    loss.backward()
    expected = [loss.detach(), *(p.grad.clone() for p in model.parameters())]
    found = step(model, ids)
    with torch.no_grad():
        precise = model.double()
    precise.zero_grad()
    loss = precise(ids)
    loss.backward()
    exact = [loss.detach(), *(p.grad for p in precise.parameters())]
    for a, b, c in zip(found, expected, exact, strict=True):
        error, unfused = ((x.double() - c).abs().max() for x in (a, b))
        assert error <= 2 * unfused + 16 * torch.finfo(torch.float64).eps * c.abs().max()


def test_later_calls_and_other_weights():
    model, ids = build(layers=8)
    compiled = torch.compile(model, backend="mindspeed", options={"codegen": "eager"}, dynamic=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    reference, _ = build(layers=8)
    other = torch.optim.SGD(reference.parameters(), 0.1)
    for _ in range(3):
        for o, run in ((optimizer, compiled), (other, reference)):
            o.zero_grad()
            run(ids).backward()
            o.step()
    for a, b in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


def test_without_gradients(traced):
    model, ids = build()
    with torch.no_grad():
        found = torch.compile(model, backend="mindspeed", options={"codegen": "eager"})(ids)
        expected = model(ids)
    assert traced[1][-1].effective["layers"] == f"{LAYERS - 5} are copies of others"
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_weights_that_lie_in_one_buffer(traced):
    model, ids = build()
    whole = step(model, ids, whole=True)
    buffer, start = torch.cat([p.detach().flatten() for p in model.parameters()]), 0
    for p in model.parameters():
        p.data = buffer[start : start + p.numel()].view(p.shape)
        start += p.numel()
    few = step(model, ids)
    assert traced[1][-1].effective["layers"].endswith("are copies of others")
    assert all(torch.equal(a, b) for a, b in zip(whole, few, strict=True))


def why(model, *inputs):
    """Why layers are not left out of the graph that Dynamo makes."""
    reasons = []

    def backend(gm, example_inputs):
        with pytest.raises(LayersDiffer) as error:
            shorten(gm, example_inputs)
        reasons.append(str(error.value))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(*inputs)
    return reasons[0]


def one_more(i, layer, x):
    layer.calls.add_(1)
    return layer(x)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"layers": 6}, "fewer than 7 neighbouring layers are alike"),
        ({"each": lambda i: {"scale": 1.0 / (i + 1)}}, "fewer than 7 neighbouring layers are alike"),
        ({"each": lambda i: {"bias": i == 4}}, "fewer than 7 neighbouring layers are alike"),
        ({"around": lambda i, layer, x: x + layer.out(x)}, "a layer is 2 calls, fewer than 8"),
        ({"read": lambda states: torch.stack(states).square().mean()}, "of a layer is read outside of the next"),
        ({"read": lambda states: states[4].square().mean()}, "of a layer is read outside of the next"),
    ],
)
def test_why_layers_are_not_left_out(settings, reason):
    assert reason in why(*build(**settings))


class TwoStates(Model):
    """Layers that read what the two before them made; both are the embedding at first."""

    def forward(self, ids):
        x = before = self.embedding(ids)
        for layer in self.layers:
            x, before = layer(x) + before, x
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def test_layers_that_read_the_two_before_are_not_left_out():
    assert why(TwoStates().double(), torch.randint(32, (2, 12))).endswith("is not of the layer before")


def test_layers_of_a_batch_that_data_decide_are_not_left_out(traced):
    model = Model().double()
    ids, keep = torch.randint(0, 32, (4, 12)), torch.tensor([True, False, True, True])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(
            lambda ids, keep: model(ids[keep]), backend="mindspeed", options={"codegen": "eager"}, fullgraph=True
        )
        loss = compiled(ids, keep)
        loss.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    expected = model(ids[keep])
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients, [p.grad for p in model.parameters()])
    assert traced[1][-1].effective["layers"] == "each: sizes are told by data"


def test_layers_with_one_weight_are_not_left_out():
    model, ids = build()
    for layer in model.layers[1:]:
        layer.out = model.layers[0].out
    whole, few = step(model, ids, whole=True), step(model, ids)
    assert all(torch.equal(a, b) for a, b in zip(whole, few, strict=True))
    model.layers[3].out = model.layers[2].out = nn.Linear(16, 16, bias=False).double()
    assert "are read at the same place" in why(model, ids) or "not alike" in why(model, ids)


@pytest.mark.parametrize("number", [0, 1, 4])
def test_layers_of_which_one_has_a_weight_twice_are_not_left_out(number):
    model, ids = build()
    model.layers[number].norm2.weight = model.layers[number].norm.weight
    assert "reads at two places what" in why(model, ids)


def test_one_layer_that_runs_often_is_not_left_out():
    """As ALBERT's: known before anything is traced, so that nothing is traced twice."""
    model, ids = build()
    model.layers = nn.ModuleList([model.layers[0]] * LAYERS)
    assert why(model, ids) == "layers have no inputs of their own"


def test_weights_go_with_their_model(traced):
    model, ids = build()
    compiled = torch.compile(model, backend="mindspeed", options={"codegen": "eager"})
    compiled(ids).backward()
    assert traced[1][-1].effective["layers"].endswith("are copies of others")
    weight = weakref.ref(model.layers[4].out.weight)
    traced[1].clear()
    del model, compiled
    gc.collect()
    assert weight() is None


def test_layers_of_which_one_is_frozen_are_not_left_out():
    model, ids = build()
    model.layers[4].requires_grad_(False)
    assert "of two layers are not alike" in why(model, ids)


def count_a_view(i, layer, x):
    layer.calls.view(1).add_(1)
    return layer(x)


def test_counters_that_layers_write():
    model, ids = build(around=one_more)
    for layer in model.layers:
        layer.register_buffer("calls", torch.zeros((), dtype=torch.long))
    assert "a layer writes" in why(model, ids)


def add_to_main_grad(i, layer, x):
    return layer(x) + torch.ops.mindspeed.linear_main_grad(x, layer.out.weight, layer.main_grad, False, -1)


def test_layers_whose_backward_adds_to_main_grad():
    """Known before anything is traced, so that nothing is traced twice."""
    model, ids = build(around=add_to_main_grad)
    for layer in model.layers:
        layer.main_grad = torch.zeros_like(layer.out.weight)
    assert "a layer writes" in why(model, ids)


def test_counters_that_layers_write_as_views(traced):
    """What is found only when the graph is traced: all layers are compiled then."""
    model, ids = build(around=count_a_view)
    for layer in model.layers:
        layer.register_buffer("calls", torch.zeros((), dtype=torch.long))
    whole = step(model, ids, whole=True)
    few = step(model, ids)
    assert traced[1][-1].effective["layers"] == "each: inputs are written"
    assert [int(layer.calls) for layer in model.layers] == [2] * LAYERS
    assert all(torch.equal(a, b) for a, b in zip(whole, few, strict=True))


def test_layers_whose_backward_differs(traced):
    """A gradient that comes to the second layer from elsewhere leaves too few backward layers that are alike."""
    model, ids = build(read=lambda states: states[1].square().mean())
    whole, few = step(model, ids, whole=True), step(model, ids)
    assert "no layers are alike once they are traced" in traced[1][-1].effective["layers"]
    assert all(torch.equal(a, b) for a, b in zip(whole, few, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"memory_budget": 0.5}, marks=pytest.mark.slow),
        pytest.param({"check": "each"}, marks=pytest.mark.slow),
        {"count_flops": True},
        {"recompute": "block:3"},
        {"recompute": {"layers.4.*": "recompute"}},
    ],
)
def test_options_that_look_at_each_layer(options, traced):
    graphs, records = traced
    step(*build(), **options)
    assert records[-1].effective["layers"].startswith("each: ")
    step(*build(), whole=True, **options)
    assert not differing(graphs)


@pytest.mark.parametrize(
    "recompute",
    [
        "full",
        "selective",
        pytest.param("norm", marks=pytest.mark.slow),
        pytest.param("activation_function", marks=pytest.mark.slow),
    ],
)
def test_policies_recompute_the_same_of_every_layer(recompute, traced):
    graphs, records = traced
    few = step(*build(), recompute=recompute)
    assert records[-1].effective["layers"].endswith("are copies of others")
    whole = step(*build(), whole=True, recompute=recompute)
    assert not differing(graphs)
    assert all(torch.equal(a, b) for a, b in zip(whole, few, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in ALIKE if "read" not in ALIKE[kind]])
def test_generated_code_is_that_of_all_layers(kind, traced, tmp_path, monkeypatch):
    """Dropout too: its seeds are counted in the order of the layers."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    graphs, records = traced
    model, ids = build(**ALIKE[kind])
    few = step(model, ids, codegen="inductor")
    assert records[-1].effective["layers"].endswith("are copies of others")
    monkeypatch.setattr(layers, "why_each", lambda compilation: "a test")
    whole = step(model, ids, codegen="inductor")
    assert not differing(graphs)
    assert all(torch.equal(a, b) for a, b in zip(whole, few, strict=True))


@pytest.mark.slow
def test_generated_code_without_gradients():
    model, ids = build()
    with torch.no_grad():
        found = torch.compile(model, backend="mindspeed")(ids)
        torch.testing.assert_close(found, model(ids), rtol=1e-12, atol=0)


@pytest.mark.slow
def test_models_of_two_depths_in_generated_code(tmp_path, monkeypatch):
    """Their shortened graphs are one: caches must not take one's code for the other."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for depth in (8, 9, 8):
        model, ids = build(layers=depth)
        loss = model(ids)
        loss.backward()
        expected = [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        found = step(model, ids, codegen="inductor")
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
