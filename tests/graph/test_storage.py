"""Which memory a value lies in and how many bytes it takes: one answer, whoever asks."""

import operator

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from mindspeed_fx.cost.read import read
from mindspeed_fx.graph import live_memory, storage
from mindspeed_fx.passes.overlap.model.task_graph import tasks_of

aten = torch.ops.aten


def traced(f, *shapes):
    """The graph of ``f`` on float32 inputs, and its nodes by name."""
    gm = make_fx(f, tracing_mode="fake")(*(torch.empty(s) for s in shapes))
    return gm, {n.name: n for n in gm.graph.nodes}


def overlap_bytes(gm):
    """Name -> bytes of each block of memory that the overlap planner sees the graph fill."""
    made = tasks_of(gm, lambda node: (0.0, ""))
    return {made.nodes[b.made_by].name: b.bytes for b in made.tasks.buffers}


def alive_bytes(gm):
    return {n.name: size for n, size in live_memory.allocated_bytes(gm).items() if size}


# --------------------------------------------------------------------------- bytes


def test_an_expanded_dimension_is_in_memory_once():
    """[8] as [1024, 8] counted 32 bytes for one planner and 32,768 for another."""
    gm, at = traced(lambda x: (aten.expand.default(x.exp(), [1024, 8]) * 2.0,), 8)
    assert storage.storage_bytes(at["expand"].meta["val"]) == 32
    assert storage.dense_bytes(at["expand"].meta["val"]) == 32768
    assert overlap_bytes(gm) == alive_bytes(gm) == {"exp": 32, "mul": 32768}


def test_an_expanded_input_is_in_memory_once():
    x = torch.empty(8).expand(1024, 8)
    gm = make_fx(lambda x: (x * 2.0,), tracing_mode="fake")(x)
    assert live_memory.peak(gm)["inputs"] == 32
    made = tasks_of(gm, lambda node: (0.0, ""), owned=lambda node: True)
    assert sorted(b.bytes for b in made.tasks.buffers) == [32, 32768]


def test_the_pieces_of_a_split_lie_in_one_memory():
    """A piece [4, 4] of [4, 8] float32 has 64 bytes of elements, spans 96, and keeps 128 alive."""

    def f(x):
        left, right = x.exp().split(4, dim=1)
        return (left.sum(), right.sum())

    gm, at = traced(f, (4, 8))
    for piece in ("getitem", "getitem_1"):
        assert storage.storage_bytes(at[piece].meta["val"]) == 128
        assert storage.is_view(at[piece]) and storage.owner(at[piece]) is at["exp"]
    assert storage.total_bytes([at["getitem"].meta["val"], at["getitem_1"].meta["val"]]) == 128
    assert overlap_bytes(gm) == alive_bytes(gm) == {"exp": 128, "sum_1": 4, "sum_2": 4}


def test_saved_pieces_of_one_value_keep_it_once():
    """q, k and v, saved as views of one product, are given to a backward: their memory is held once."""
    x = torch.empty(4, 12)
    gm = make_fx(lambda q, k, v: (q + k + v,), tracing_mode="fake")(*x.split(4, 1))
    assert live_memory.peak(gm)["inputs"] == 192
    made = tasks_of(gm, lambda node: (0.0, ""), owned=lambda node: True)
    assert sorted(b.bytes for b in made.tasks.buffers) == [64, 64, 192]


def test_bytes_of_what_is_no_tensor():
    assert storage.storage_bytes(3) == storage.storage_bytes(None) == storage.dense_bytes([None, 1]) == 0


# --------------------------------------------------------------------------- views

CALLS = [
    (lambda x: aten._unsafe_view.default(x, [32]), True),
    (lambda x: aten.view.default(x, [32]), True),
    (lambda x: aten.detach.default(x), True),
    (lambda x: aten.t.default(x), True),
    (lambda x: aten.clone.default(x), False),
    (lambda x: aten.max.dim(x, 0)[0], False),
    (lambda x: aten.unbind.int(x)[0], True),
]
DEPENDS = [
    (aten.reshape.default, ([32],), (4, 8), (8, 1), True),
    (aten.reshape.default, ([32],), (8, 4), (1, 8), False),
    (aten.contiguous.default, (), (4, 8), (8, 1), True),
    (aten.contiguous.default, (), (8, 4), (1, 8), False),
    (aten.to.dtype, (torch.float32,), (4, 8), (8, 1), True),
    (aten.to.dtype, (torch.bfloat16,), (4, 8), (8, 1), False),
    (aten.dropout.default, (0.1, False), (4, 8), (8, 1), True),
    (aten.dropout.default, (0.1, True), (4, 8), (8, 1), False),
]


@pytest.mark.parametrize("call, says", CALLS)
def test_all_agree_on_what_is_a_view(call, says):
    gm, at = traced(lambda x: (call(x.exp()) + 1.0,), (4, 8))
    node = at["add"].args[0]
    assert storage.is_view(node) is says
    if node.target is not operator.getitem or says:  # what a call of several results makes counts for the call
        assert (node.name not in overlap_bytes(gm)) is says
        assert (node.name not in alive_bytes(gm)) is says
        assert (node.name not in {c.name for c in read(gm).calls}) is says


@pytest.mark.parametrize("target, rest, shape, stride, says", DEPENDS)
def test_operators_that_copy_where_they_must(target, rest, shape, stride, says):
    """Captured graphs have calls that are views for one layout and copies for another."""
    with torch._subclasses.FakeTensorMode():
        x = torch.empty_strided(shape, stride)
        out = target(x, *rest) if says or target is not aten.dropout.default else torch.empty(shape)
    graph = torch.fx.Graph()
    source = graph.placeholder("x")
    node = graph.call_function(target, (source, *rest))
    graph.output((node,))
    source.meta["val"], node.meta["val"] = x, out
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    assert storage.is_view(node) is says
    assert (node.name not in alive_bytes(gm)) is says
    memories = storage.Memories(graph)
    assert (memories.of[node] == memories.of[source]) is says
    if target is not aten.dropout.default:
        assert (node.name not in {c.name for c in read(gm).calls}) is says


def test_writes_in_place_stay_in_memory_and_are_no_views():
    gm, at = traced(lambda x: (aten.add_.Tensor(x.exp(), 1.0) * 2.0,), (4, 8))
    memories = storage.Memories(gm.graph)
    assert memories.of[at["add_"]] == memories.of[at["exp"]] and not storage.is_view(at["add_"])


def test_equal_layers_that_share_fake_memory_have_memory_of_their_own():
    gm, at = traced(lambda x: (x.exp().exp().exp(),), (4, 8))
    for name in ("exp_1", "exp_2"):
        at[name].meta["val"] = at["exp"].meta["val"]
    assert alive_bytes(gm) == overlap_bytes(gm) | {"exp_2": 128} == {"exp": 128, "exp_1": 128, "exp_2": 128}


def test_what_a_write_returns_is_what_it_wrote():
    """Also where equal layers share their fake memory with what is written."""
    gm, at = traced(lambda x, y: (aten.copy_.default(x.exp(), y.exp()) * 2.0,), (4, 8), (4, 8))
    memories = storage.Memories(gm.graph)
    assert memories.of[at["copy_"]] == memories.of[at["exp"]] != memories.of[at["exp_1"]]
    at["exp_1"].meta["val"] = at["exp"].meta["val"]
    memories = storage.Memories(gm.graph)
    assert memories.of[at["copy_"]] == memories.of[at["exp"]] != memories.of[at["exp_1"]]
