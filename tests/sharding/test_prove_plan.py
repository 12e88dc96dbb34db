"""Every rank's program is shown to be the model in parts; a collective that is missing, or goes to others, is seen."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mindspeed_fx.planning.prove_plan import prove_plan
from mindspeed_fx.sharding.audit.relations.collectives import own, piece
from mindspeed_fx.sharding.audit.relations.compare import compare_part, divided, whole_inputs
from mindspeed_fx.sharding.audit.relations.indexing import _expand
from mindspeed_fx.sharding.audit.relations.moves import cut
from mindspeed_fx.sharding.audit.relations.numbers import Numeric
from mindspeed_fx.sharding.audit.relations.parts import Digit, Part, Terms, Unproved, profile, regrouped
from mindspeed_fx.sharding.audit.relations.rules import dot, pointwise
from tests.sharding.llama import Layer

ops = torch.ops._c10d_functional


class Stack(nn.Module):
    """Layers alone: hidden states in, hidden states out."""

    def __init__(self, hidden=32, heads=4, kv_heads=4, ffn=64, bias=False, layers=1):
        super().__init__()
        self.layers = nn.ModuleList(Layer(hidden, heads, kv_heads, ffn, bias) for _ in range(layers))
        self.dim = hidden // heads

    def forward(self, x):
        angles = torch.outer(
            torch.arange(x.shape[1], device=x.device).to(x.dtype),
            1.0 / 100.0 ** (torch.arange(0, self.dim, 2, device=x.device) / self.dim),
        )
        cos, sin = (torch.cat((f(angles), f(angles)), -1).to(x.dtype) for f in (torch.cos, torch.sin))
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x


def proof(plan, mesh, edit=None, shape=(4, 16, 32), **sizes):
    with torch.device("meta"):
        return prove_plan(Stack(**sizes), mesh, plan, torch.empty(shape), edit=edit)


def several(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "plan, mesh, sizes",
    [
        ("tp", {"tp": 2}, {"bias": True}),
        ("tp_sp", {"tp": 2}, {"kv_heads": 2}),
        several("zero2", {"dp": 2}, {}),
        ("ulysses", {"cp": 2}, {}),
        several("zero1", {"dp": 2}, {"bias": True}),
        several("zero2+tp_sp", {"dp": 2, "tp": 2}, {"bias": True}),
        several("zero3+tp_sp", {"dp": 2, "tp": 2}, {"layers": 2}),
        several("zero2+ulysses", {"dp": 2, "cp": 2}, {}),
        several("ulysses+tp", {"cp": 2, "tp": 2}, {}),
    ],
)
def test_every_result_and_gradient_is_proved(plan, mesh, sizes):
    result = proof(plan, mesh, **sizes)
    assert result.proved, str(result)
    assert len(result.results) == 2 + (9 + 7 * bool(sizes.get("bias"))) * sizes.get("layers", 1)


def collectives(graph):
    return [n for n in graph.nodes if n.op == "call_function" and n.target in (ops.all_reduce.default,)]


def without(number):
    """Takes one all-reduce out of every rank's program."""

    def edit(_rank, graph):
        node = collectives(graph)[number]
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)

    return edit


@pytest.mark.parametrize("number", [0, several(1), several(2), 3])
def test_a_missing_sum_is_found(number):
    result = proof("tp", {"tp": 2}, without(number))
    assert not result.proved
    assert any(r.state == "wrong" and "partial sum over tp" in r.reason for r in result.results), str(result)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(9))
def test_every_missing_sum_of_gradients_is_found(number):
    assert [r.state for r in proof("ulysses", {"cp": 2}, without(number)).results].count("wrong") >= 1


def test_a_piece_without_the_sum_is_found():
    """A reduce-scatter that scatters alone."""

    def edit(rank, graph):
        node = next(n for n in graph.nodes if n.target is ops.reduce_scatter_tensor.default)
        with graph.inserting_before(node):
            size = node.meta["val"].shape[0]
            own = graph.call_function(torch.ops.aten.slice.Tensor, (node.args[0], 0, rank * size, (rank + 1) * size))
        own.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(own)

    result = proof("tp_sp", {"tp": 2}, edit)
    assert any(r.state == "wrong" for r in result.results), str(result)


def read_part_of_rank_0(rank, graph):
    """An edit: rank 1 reads rank 0's part of what is divided first."""
    split = next(n for n in graph.nodes if n.target is torch.ops.aten.split.Tensor)
    mine = [n for n in split.users if n.users]
    other = next(n for n in split.users if not n.users)
    if rank == 1:
        mine[0].replace_all_uses_with(other)


def test_a_rank_that_takes_anothers_part_is_found():
    """The program of rank 1 reads the first half of the batch, as rank 0's does."""

    result = proof("zero2", {"dp": 2}, read_part_of_rank_0)
    assert [r.state for r in result.results].count("wrong") == len(result.results), str(result)


@pytest.mark.slow
def test_a_sum_over_other_ranks_is_found():
    def edit(_rank, graph):
        sums = collectives(graph)
        gathers = [n for n in graph.nodes if n.target is ops.all_gather_into_tensor.default]
        names = sorted({n.args[-1] for n in gathers} - {sums[0].args[-1]})
        sums[0].args = (*sums[0].args[:-1], names[0])

    result = proof("zero2+tp", {"dp": 2, "tp": 2}, edit)
    assert any(r.state == "wrong" and "over dp" in r.reason for r in result.results), str(result)


@pytest.mark.slow
def test_layers_of_405b_on_64_ranks():
    sizes = {"hidden": 16384, "heads": 128, "kv_heads": 8, "ffn": 53248}
    assert proof("zero2+tp_sp", {"dp": 8, "tp": 8}, shape=(8, 8192, 16384), **sizes).proved


# --------------------------------------------------------------- digits


def test_views_split_and_join_digits():
    terms = Terms({"tp": 2})
    x = divided(whole_inputs(terms, ["x"], [(4, 32)])[0], [("tp", 1)], terms.ranks)
    assert (x.local, x.whole) == ((4, 16), (4, 32))
    heads = regrouped(x, (4, 2, 8), set())
    assert heads.whole == (4, 4, 8) and [bool(profile(d)) for d in heads.dims] == [False, True, False]
    assert regrouped(heads, (4, 16), set()) == x
    flat = regrouped(x, (64,), set())
    assert flat.whole == (128,) and flat.local == (64,)


def test_a_sum_over_parts_is_partial_and_may_not_be_squared():
    terms = Terms({"tp": 2})
    x, w = whole_inputs(terms, ["x", "w"], [(4, 32), (8, 32)])
    x, w = divided(x, [("tp", 1)], terms.ranks), divided(w, [("tp", 1)], terms.ranks)
    y = dot(terms, x, [1], w, [1])
    assert y.partial == {"tp"} and y.whole == (4, 8)
    assert dot(terms, w, [1], x, [1]).term == y.term
    with pytest.raises(Unproved, match="partial sum over tp"):
        pointwise(terms, "exp", (), [y])
    with pytest.raises(Unproved, match="divided over tp, another over nothing"):
        dot(terms, x, [1], whole_inputs(terms, ["v"], [(8, 32)])[0], [1])


def test_sums_of_three_are_equal_in_any_order():
    terms = Terms({"tp": 2})
    a, b, c = (terms.fresh(name, [4, 3], [(), ()], ()) for name in "abc")

    def add(x, y):
        return pointwise(terms, "add", (), [x, y], True)

    assert add(add(a, b), c) == add(a, add(c, b)) == add(add(c, a), b)
    assert add(add(a, b), c) != add(add(a, a), c) and add(add(a, b), b) != add(a, b)
    row = terms.fresh("row", [1, 3], [(), ()], ())
    assert add(add(row, row), a) != add(row, a)


def test_a_view_that_cuts_between_parts_is_unknown():
    x = Part(0, ((Digit(1, 3, 2), Digit(1, 1, 3)),))
    with pytest.raises(Unproved, match="cuts between parts"):
        regrouped(x, (4, 2), set())


def test_pieces_of_a_dimension_are_cut_where_ranks_have_it_whole():
    terms = Terms({"tp": 2})
    x = divided(whole_inputs(terms, ["x"], [(4, 6)])[0], [("tp", 0)], terms.ranks)
    first, again = cut(terms, x, 1, 0, 4), cut(terms, x, 1, 0, 4)
    assert (first.local, first.whole) == ((2, 4), (4, 4)) and first == again != cut(terms, x, 1, 1, 5)
    with pytest.raises(Unproved, match="of which ranks hold parts"):
        cut(terms, x, 0, 0, 1)
    places = {"tp": (0, 1)}
    assert own(terms, piece(x, 1, 2, [1, 1]), places, terms.ranks) == cut(terms, x, 1, 3, 6)
    whole = whole_inputs(terms, ["y"], [(4, 6)])[0]
    mine = own(terms, piece(whole, 0, 2, [0, 1]), places, terms.ranks)
    assert mine == divided(whole, [("tp", 0)], terms.ranks)


def test_what_follows_from_integers_is_said_to():
    (x,) = whole_inputs(Terms({}), ["x"], [(4,)])
    for pair in ((Numeric(), x), (x, Numeric())):
        assert compare_part("y", *pair, None).reason.startswith("follows from integers")


def test_what_is_expanded_to_its_own_sizes_stays_itself():
    terms, graph = Terms({}), torch.fx.Graph()
    (x,) = whole_inputs(terms, ["x"], [(1, 4)])
    node = graph.placeholder("x")
    node.meta["val"] = torch.empty(1, 4)
    assert _expand(terms, [x], node) == x
    node.meta["val"] = torch.empty(3, 4)
    assert _expand(terms, [x], node).term != x.term


class Halves(nn.Module):
    """Each second element times the one behind it."""

    def forward(self, x):
        return torch.relu(x[..., ::2]) * x[..., 1::2]


@pytest.mark.parametrize("start, step, state", [(0, 2, "proved"), (1, 2, "unknown"), (0, 1, "unknown")])
def test_each_second_element_is_a_tensor_of_its_own(start, step, state):
    def edit(_rank, graph):
        first = next(n for n in graph.nodes if n.target is torch.ops.aten.slice.Tensor and n.args[-1] == 2)
        first.args = (first.args[0], 1, start, start + 8 * step, step)

    with torch.device("meta"):
        result = prove_plan(Halves(), {"dp": 2}, "zero2", torch.empty(4, 16), edit=edit)
    assert result.results[0].state == state, str(result)


class Reading(nn.Module):
    """A number that is read from a tensor is checked and, ``used``, added."""

    def __init__(self, used):
        super().__init__()
        self.linear, self.used = nn.Linear(8, 8), used

    def forward(self, x):
        torch._check(x.isfinite().sum().item() >= 0)
        result = self.linear(x).relu()
        return result + x.detach().argmax().item() if self.used else result


@pytest.mark.parametrize("used", [False, True])
def test_numbers_that_are_read_from_tensors(used):
    results = prove_plan(Reading(used), {"dp": 2}, "zero3", torch.empty(4, 8)).results
    unproved = [(r.state, r.name) for r in results if r.state != "proved"]
    assert len(results) == 4 and unproved == ([("unknown", "result 0")] if used else [])
