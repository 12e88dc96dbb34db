"""A vocabulary in parts: embedding, loss and their gradients are proved, and every planted fault is seen."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mindspeed_fx.passes.fusion import linear_cross_entropy
from mindspeed_fx.planning.prove_plan import prove_plan
from mindspeed_fx.sharding.audit.relations.compare import whole_inputs
from mindspeed_fx.sharding.audit.relations.lookups import Lookup
from mindspeed_fx.sharding.audit.relations.numbers import Place
from mindspeed_fx.sharding.audit.relations.parts import Terms, Unproved
from mindspeed_fx.sharding.audit.relations.vocabulary import Context, Fetched, Masked, _homes, _masked
from tests.sharding.test_prove_experts import calls, only_on
from tests.sharding.test_prove_plan import Stack

aten = torch.ops.aten


class Feed(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(hidden, 2 * hidden, False), nn.Linear(2 * hidden, hidden, False)

    def forward(self, x):
        return self.down_proj(F.relu(self.up_proj(x)))


class Model(nn.Module):
    """An embedding, a perceptron, an output layer and a loss that is a mean over tokens."""

    def __init__(self, ignored=-100):
        super().__init__()
        self.embed_tokens, self.mlp, self.lm_head = nn.Embedding(64, 32), Feed(32), nn.Linear(32, 64, bias=False)
        self.ignored = ignored

    def forward(self, ids, labels):
        x = self.embed_tokens(ids)
        logits = self.lm_head(x + self.mlp(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=self.ignored)


def proof(plan="tp", mesh=None, edit=None, **settings):
    with torch.device("meta"):
        ids, labels = (torch.empty(4, 16, dtype=torch.long) for _ in range(2))
        return prove_plan(Model(**settings), mesh or {"tp": 2}, plan, ids, labels, edit=edit)


@pytest.mark.parametrize(
    "plan, mesh, settings",
    [
        ("tp_sp", {"tp": 2}, {}),
        ("tp", {"tp": 2}, {"ignored": 0}),
        pytest.param("zero2+tp_sp", {"dp": 2, "tp": 2}, {}, marks=pytest.mark.slow),
        pytest.param("zero3+tp", {"dp": 2, "tp": 4}, {}, marks=pytest.mark.slow),
    ],
)
def test_embedding_and_loss_are_proved(plan, mesh, settings):
    result = proof(plan, mesh, **settings)
    assert result.proved and len(result.results) == 5, str(result)


@pytest.mark.parametrize(
    "plan, mesh", [("tp", {"tp": 2}), pytest.param("zero2+tp_sp", {"dp": 2, "tp": 2}, marks=pytest.mark.slow)]
)
def test_a_loss_from_hidden_states_is_proved(plan, mesh, monkeypatch):
    """Logits that no tensor holds, as large vocabularies have them."""
    monkeypatch.setattr(linear_cross_entropy, "SMALLEST", 0)
    monkeypatch.setattr(linear_cross_entropy, "SMALLEST_CPP", 0)
    result = proof(plan, mesh)
    assert result.proved and len(result.results) == 5, str(result)


def test_targets_of_another_are_found_without_logits_too(monkeypatch):
    monkeypatch.setattr(linear_cross_entropy, "SMALLEST", 0)
    monkeypatch.setattr(linear_cross_entropy, "SMALLEST_CPP", 0)
    result = proof(edit=only_on(0, classes_of_another))
    assert any(r.state == "wrong" and "target" in r.reason for r in result.results), str(result)


class Decoder(nn.Module):
    """A layer between an embedding and a loss."""

    def __init__(self, vocabulary, **sizes):
        super().__init__()
        hidden = sizes["hidden"]
        self.embed_tokens, self.model = nn.Embedding(vocabulary, hidden), Stack(**sizes)
        self.lm_head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, ids, labels):
        logits = self.lm_head(self.model(self.embed_tokens(ids)))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


@pytest.mark.slow
def test_embedding_layer_and_loss_of_405b_on_64_ranks():
    sizes = {"hidden": 16384, "heads": 128, "kv_heads": 8, "ffn": 53248}
    with torch.device("meta"):
        ids, labels = (torch.empty(16, 8192, dtype=torch.long) for _ in range(2))
        result = prove_plan(Decoder(128256, **sizes), {"dp": 8, "tp": 8}, "zero2+tp_sp", ids, labels)
    assert result.proved and result.ranks == 64, str(result)


# --------------------------------------------------------------- faults


def drop(name, number):
    """Takes one call out of every rank's program."""

    def edit(_rank, graph):
        node = calls(graph, name)[number]
        node.replace_all_uses_with(node.args[0])

    return edit


def unmasked(_rank, graph):
    """What the embedding read of rows that are others' stays."""
    rows = calls(graph, "embedding")[0]
    next(iter(rows.users)).replace_all_uses_with(rows)


def gradient_unmasked(_rank, graph):
    grad = calls(graph, "embedding_dense_backward")[0]
    grad.replace_input_with(grad.args[0], grad.args[0].args[0])


def one_too_far(number):
    """The offset of a rank's rows is that of the next row."""

    def edit(graph):
        offset = calls(graph, "sub")[number].args[1]
        offset.args = (offset.args[0], 0, 1)

    return edit


def first_row_left_out(graph):
    """The rank takes its first row for another's."""
    least = calls(graph, "ge")[0]
    least.target = aten.gt.Tensor


def classes_of_another(graph):
    """The rank finds its targets among the classes of its neighbour."""
    for n in list(calls(graph, "split")[1].users):
        if n.users:
            n.args = (n.args[0], 1 - n.args[1])


FAULTS = {
    "rows not masked": (unmasked, "not masked"),
    "rows not added up": (drop("all_reduce", 0), "partial sum over tp"),
    "offset off by one": (only_on(1, one_too_far(0)), "none of a rank's|another id"),
    "offset of the other rank": (only_on(0, classes_of_another), "none of a rank's|another id|no rank"),
    "first row on no rank": (only_on(1, first_row_left_out), "no rank, or by two"),
    "gradient not masked": (gradient_unmasked, None),
    "maximum of a rank": (drop("all_reduce", 2), "the largest of a rank's own classes"),
    "sum of a rank": (drop("all_reduce", 3), "partial sum over tp"),
}


@pytest.mark.parametrize(
    "fault",
    [
        "rows not masked",
        "rows not added up",
        "offset off by one",
        *(
            pytest.param(f, marks=pytest.mark.slow)
            for f in FAULTS
            if f not in ("rows not masked", "rows not added up", "offset off by one")
        ),
    ],
)
def test_a_fault_is_named(fault):
    edit, reason = FAULTS[fault]
    result = proof(edit=edit)
    assert not result.proved, str(result)
    if reason is None:
        assert next(r for r in result.results if "embed_tokens" in r.name).state != "proved", str(result)
    else:
        wrong = [r for r in result.results if r.state == "wrong"]
        assert any(re.search(reason, r.reason) for r in wrong), str(result)


# --------------------------------------------------------------- tables


def context(ids):
    terms = Terms({"tp": 2})
    terms.note_ids(ids.term, 4, [-100])
    return Context(terms, [Place(r, {"tp": r}) for r in range(2)], None, None)


(IDS,) = whole_inputs(Terms({}), ["ids"], [(3,)])
"""Choose from four rows; -100, which is the last entry of tables, is ignored."""


def tables(*values):
    return tuple(torch.tensor(v) for v in values)


def test_rows_are_read_once_and_by_those_who_have_them():
    c, rows = context(IDS), tables([0, 1, 0, 0, 0], [2, 2, 2, 3, 2])
    fetched = Fetched(IDS, IDS, rows, 4)
    mine = tables([True, True, False, False, False], [False, False, True, True, False])
    assert _masked(c, fetched, Lookup(IDS, mine)).partial == {"tp"}
    for wrong, reason in (
        (tables([True] * 5, [True] * 5), "another id"),
        ((mine[0], torch.tensor([False, False, True, False, False])), "no rank, or by two"),
    ):
        with pytest.raises(Unproved, match=reason):
            _masked(c, fetched, Lookup(IDS, wrong))


def test_gradients_go_to_the_row_of_their_id():
    c, look = context(IDS), Lookup(IDS, tables([0, 1, 0, 0, 0], [0, 0, 0, 1, 0]))
    mine = tables([True, True, False, False, False], [False, False, True, True, False])
    assert [m for m, _ in _homes(c, Masked(IDS, IDS, mine), look, 2, 4)] == ["tp"]
    every = tables([True] * 5, [True] * 5)
    other = Lookup(IDS, tables([1, 0, 0, 0, 0], [0, 0, 0, 1, 0]))
    for masks, table in ((every, look), (mine, other), (tables([True] + [False] * 4, mine[1].tolist()), look)):
        with pytest.raises(Unproved, match="row of another id"):
            _homes(c, Masked(IDS, IDS, masks), table, 2, 4)
