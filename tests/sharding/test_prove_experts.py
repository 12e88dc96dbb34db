"""Rows that go to experts of other ranks and come back: proved, and every planted fault is seen."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from mindspeed_fx.planning.prove_plan import prove_plan
from mindspeed_fx.sharding.audit.relations import routed
from mindspeed_fx.sharding.audit.relations.numbers import Place, root_index, whole_index
from mindspeed_fx.sharding.audit.relations.parts import Digit, Part, Terms, Unproved
from mindspeed_fx.sharding.audit.relations.rows import ANYTHING, ZERO, Context, Rows, added, covered
from tests.sharding.deepseek_layer import SMALL, DeepseekLayer
from tests.sharding.mixtral import Mixture

aten = torch.ops.aten


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(32), Mixture(32, 64, experts=8, chosen=2, shared=False)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def proof(plan="ep_alltoall", mesh=None, edit=None):
    with torch.device("meta"):
        return prove_plan(Layer(), mesh or {"ep": 2}, plan, torch.empty(4, 16, 32), edit=edit)


def test_experts_on_two_ranks_are_proved():
    result = proof()
    assert result.proved and len(result.results) == 7, str(result)


def test_experts_whose_tokens_are_gathered_are_proved():
    result = proof("ep")
    assert result.proved and len(result.results) == 7, str(result)


@pytest.mark.slow
def test_gathered_tokens_of_several_data_parallel_groups_are_proved():
    result = proof("zero2+ep", {"dp": 2, "ep": 2})
    assert result.proved, str(result)


@pytest.mark.slow
def test_experts_of_several_data_parallel_groups_are_proved():
    result = proof("zero2+ep_alltoall", {"dp": 2, "ep": 2})
    assert result.proved, str(result)


@pytest.mark.slow
def test_a_layer_of_deepseek_is_proved():
    pytest.importorskip("transformers")
    with torch.device("meta"):
        result = prove_plan(DeepseekLayer(**SMALL), {"ep": 2}, "ep_alltoall", torch.empty(4, 16, 64))
    assert result.proved and len(result.results) == 19, str(result)


@pytest.mark.slow
def test_a_layer_of_deepseek_whose_tokens_are_gathered_is_proved():
    pytest.importorskip("transformers")
    with torch.device("meta"):
        result = prove_plan(DeepseekLayer(**SMALL), {"ep": 2}, "ep", torch.empty(4, 16, 64))
    assert result.proved and len(result.results) == 19, str(result)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["ep_alltoall", "ep"])
def test_a_layer_of_deepseek_of_true_sizes_on_64_ranks(plan):
    pytest.importorskip("transformers")
    with torch.device("meta"):
        result = prove_plan(DeepseekLayer(), {"ep": 64}, plan, torch.empty(128, 8, 7168))
    assert result.proved and result.ranks == 64, str(result)


# --------------------------------------------------------------- faults


def calls(graph, name):
    return [n for n in graph.nodes if n.op == "call_function" and getattr(n.target, "_opname", "") == name]


def only_on(rank, change):
    return lambda r, graph: change(graph) if r == rank else None


def drop_sum(_rank, graph):
    """The gradient of a router is not added up over ranks."""
    node = calls(graph, "all_reduce")[0]
    node.replace_all_uses_with(node.args[0])


def sum_twice(_rank, graph):
    node = calls(graph, "all_reduce")[0]
    wait = next(iter(node.users))
    with graph.inserting_after(wait):
        again = graph.call_function(node.target, (wait, *node.args[1:]))
    again.meta["val"] = wait.meta["val"]
    for user in [u for u in wait.users if u is not again]:
        user.replace_input_with(wait, again)


def unsorted(graph):
    """What arrived stays in the order in which it came: rows of one expert meet another's weight."""
    node = calls(graph, "expert_exchange")[0]
    select = next(u for u in node.users if u.target is aten.index_select.default)
    with graph.inserting_before(select):
        index = graph.call_function(aten.arange.default, (node.args[3],))
    index.meta["val"] = select.args[2].meta["val"]
    select.args = (node, 0, index)


def own_counts(graph):
    """The rank takes what it sends for what it gets."""
    node = calls(graph, "expert_exchange")[0]
    node.args = (node.args[0], node.args[1], node.args[1], *node.args[3:])


def other_rows(graph):
    """Results come back one row too far."""
    node = calls(graph, "expert_exchange")[1]
    select = next(u for u in node.users if u.target is aten.index_select.default)
    with graph.inserting_before(select):
        index = graph.call_function(aten.roll.default, (select.args[2], [1], [0]))
    index.meta["val"] = select.args[2].meta["val"]
    select.args = (node, 0, index)


def no_exchange_of_counts(_rank, graph):
    node = calls(graph, "all_to_all_single")[0]
    next(iter(node.users)).replace_all_uses_with(node.args[0])


def rows_of_others(graph):
    """Behind its own experts' rows a rank leaves those of others."""
    product = calls(graph, "grouped_matmul")[0]
    mask = next(n for n in reversed(graph.nodes) if n < product and n.target is aten.where.self)
    mask.replace_all_uses_with(mask.args[1])


def own_piece(rank, graph):
    """Rows of results are scattered and not added up."""
    node = calls(graph, "reduce_scatter_tensor")[2]
    size = node.meta["val"].shape[0]
    with graph.inserting_before(node):
        own = graph.call_function(aten.slice.Tensor, (node.args[0], 0, rank * size, (rank + 1) * size))
    own.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(own)


def order_of_another(graph):
    """The rank brings back the tokens of its neighbour."""
    piece = calls(graph, "moe_unpermute")[0].args[1].args[0]
    piece.args = (piece.args[0], 1 - piece.args[1])


GATHERED = {
    "rows of others stay": (lambda _rank, graph: rows_of_others(graph), "in no expert's part"),
    "rows not added up": (own_piece, "missing, or counted twice"),
    "tokens of another": (only_on(0, order_of_another), "divided otherwise|not its own|already"),
}

FAULTS = {
    "sum dropped": (drop_sum, "partial sum over ep"),
    "sum made twice": (sum_twice, "all_reduce over ep of what is no partial sum over it"),
    "rows not sorted": (lambda _rank, graph: unsorted(graph), "another expert than it chose|no expert's part"),
    "counts of the sender": (only_on(0, own_counts), "another number of rows than is received"),
    "results one row too far": (lambda _rank, graph: other_rows(graph), "a row that is not its own"),
    "counts not exchanged": (no_exchange_of_counts, "another number of rows than is received"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault):
    edit, reason = FAULTS[fault]
    result = proof(edit=edit)
    wrong = [r for r in result.results if r.state == "wrong"]
    assert wrong, str(result)
    assert any(re.search(reason, r.reason) for r in wrong), str(result)


@pytest.mark.parametrize(
    "fault", ["rows not added up", *(pytest.param(f, marks=pytest.mark.slow) for f in GATHERED if "not" not in f)]
)
def test_a_fault_of_gathered_tokens_is_named(fault):
    edit, reason = GATHERED[fault]
    wrong = [r for r in proof("ep", edit=edit).results if r.state == "wrong"]
    assert wrong and any(re.search(reason, r.reason) for r in wrong), [r.reason for r in wrong]


def test_a_rank_with_another_program_is_unknown():
    result = proof(edit=only_on(1, other_rows))
    assert {r.reason for r in result.results} == {"ranks have programs of different lengths"}, str(result)


# --------------------------------------------------------------- rows


def context(ranks=2):
    terms = Terms({"ep": ranks})
    places = [Place(r, {"ep": r}) for r in range(ranks)]
    return Context(terms, places, (), lambda i: [], lambda rank: list(range(ranks)))


def rows(*pairs):
    x = Part(0, ((Digit(1, 1, 4),), (Digit(2, 1, 8),)))
    return Rows(x, tuple(torch.tensor(p) for p in pairs), torch.zeros(4, dtype=torch.int64))


def test_a_sum_of_rows_takes_each_place_from_one_rank():
    c = context()
    assert [p.tolist() for p in added(c, rows([0, ZERO], [ZERO, 1]), False).pairs] == [[0, 1]] * 2
    assert [p.tolist() for p in added(c, rows([0, ZERO], [ZERO, 1]), True).pairs] == [[0], [1]]
    for other in ([0, ZERO], [ANYTHING, ZERO]):
        with pytest.raises(Unproved, match="adds two rows"):
            added(c, rows([0, ZERO], other), False)


def test_pairs_are_counted_once_over_some_mesh_dimension():
    c = context()
    every, half, rest = torch.ones(2, dtype=torch.int64), torch.tensor([1, 0]), torch.tensor([0, 1])
    assert covered(c, [every, every], [every, every]) == frozenset()
    assert covered(c, [every, every], [half, rest]) == {"ep"}
    for present in ([half, half], [every, half]):
        with pytest.raises(Unproved, match="missing, or counted twice"):
            covered(c, [every, every], present)


def test_elements_of_parts_are_numbered_as_in_the_whole():
    dim = (Digit(5, 3, 2, "ep"), Digit(5, 1, 3))
    assert whole_index(dim, {"ep": 1}).tolist() == [3, 4, 5]
    index = root_index(((Digit(6, 1, 2),), dim), {"ep": 1})
    assert index[5].tolist() == [[3, 4, 5]] and index[6].tolist() == [[0], [1]]


@pytest.mark.parametrize("cut, is_moved", [((0, 0, 4), True), ((1, 0, 6), True), ((2, 0, 2), True), ((2, 0, 1), False)])
def test_a_slice_that_is_all_of_the_rows_leaves_them_as_they_are(cut, is_moved):
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(aten.slice.Tensor, (x, *cut))
    node.meta["val"] = torch.empty(4, 6, 2)[tuple(slice(*cut[1:]) if d == cut[0] else slice(None) for d in range(3))]
    part = Part(0, tuple((Digit(i, 1, n),) for i, n in enumerate((4, 6, 2))))
    x = Rows(part, (torch.arange(4),), torch.zeros(4, dtype=torch.int64))
    result = routed._moved(None, [node], "slice", [x, *cut])
    assert result is x if is_moved else result is None
