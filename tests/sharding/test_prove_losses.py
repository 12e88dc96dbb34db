"""Embeddings and losses over divided batches and sequences: proved, and what is not added up is seen."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mindspeed_fx.planning.prove_plan import prove_plan
from tests.sharding.test_prove_plan import read_part_of_rank_0, without


class Model(nn.Module):
    """An embedding, a norm, an output layer and a loss that is a mean over tokens."""

    def __init__(self, shifted=False):
        super().__init__()
        self.embed_tokens, self.norm = nn.Embedding(64, 32), nn.RMSNorm(32)
        self.lm_head = nn.Linear(32, 64, bias=False)
        self.shifted = shifted

    def forward(self, ids, labels):
        logits = self.lm_head(self.norm(self.embed_tokens(ids)))
        if self.shifted:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def proof(plan, mesh, edit=None, shifted=False):
    with torch.device("meta"):
        ids = torch.empty(4, 16, dtype=torch.long)
        return prove_plan(Model(shifted), mesh, plan, ids, ids, edit=edit)


@pytest.mark.parametrize("plan, mesh", [("zero2", {"dp": 2}), ("ulysses", {"cp": 2})])
@pytest.mark.parametrize("shifted", [False, True])
def test_loss_and_gradients_are_proved(plan, mesh, shifted):
    result = proof(plan, mesh, shifted=shifted)
    assert result.proved and len(result.results) == 4, str(result)


def test_it_is_proved_under_no_grad():
    with torch.no_grad():
        assert proof("zero2", {"dp": 2}).proved


@pytest.mark.parametrize("number", [0, 1])
def test_a_sum_or_count_of_tokens_that_stays_a_ranks_own_is_found(number):
    """The loss is the quotient of two sums over ranks."""
    result = proof("zero2", {"dp": 2}, without(number))
    assert result.results[0].state == "wrong" and "dp" in result.results[0].reason, str(result)


def test_tokens_of_another_rank_are_found():
    """Rank 1 looks up the tokens of rank 0."""

    result = proof("zero2", {"dp": 2}, read_part_of_rank_0)
    assert not result.proved and any(r.state == "wrong" for r in result.results), str(result)


def test_the_gradient_of_an_embedding_is_added_up():
    def edit(_rank, graph):
        scatters = [n for n in graph.nodes if n.target is torch.ops._c10d_functional.reduce_scatter_tensor.default]
        node = scatters[-1]
        with graph.inserting_before(node):
            own = graph.call_function(torch.ops.aten.slice.Tensor, (node.args[0], 0, 0, node.meta["val"].shape[0]))
        own.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(own)

    result = proof("zero2", {"dp": 2}, edit)
    assert any(r.state == "wrong" and "embed_tokens" in r.name for r in result.results), str(result)


class Filled(nn.Module):
    """A bias of ones and a choice among ones: no rule leaves out one number everywhere."""

    def forward(self, x, w):
        return F.linear(x, w, x.new_ones(w.shape[0])) + x.new_ones(x.shape).topk(2, dim=-1)[0].sum()


def test_one_number_everywhere_is_left_out_of_no_rule():
    with torch.device("meta"):
        result = prove_plan(Filled(), {"dp": 2}, "zero2", torch.empty(4, 8), torch.empty(6, 8))
    assert [r.state for r in result.results if r.name == "result 0"] == ["unknown"], str(result)
