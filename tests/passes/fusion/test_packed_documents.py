"""Documents packed into one row: attention with a block-diagonal mask, however the model makes it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mindspeed_fx.passes.fusion.emit.attention import _belongs
from tests.kernels.npu import npu_graphs
from tests.models import function_agrees

NAME, EOD, SEQ = "fusion.attention", 0, 12
IDS = torch.tensor([[5, 3, EOD, 7, 7, 1, EOD, 2, 4, 4, 4, 1], [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, EOD]])


def documents(ids):
    """The number of each token's document; an end-of-document token belongs to the document that it ends."""
    return F.pad((ids == EOD).cumsum(-1), (1, 0))[:, :-1]


def same_document(ids):
    d = documents(ids)
    return d[:, None, :, None] == d[:, None, None, :]


def causal(seq):
    return torch.ones(seq, seq, dtype=torch.bool).tril()


def composed(allowed):
    def attend(q, k, v):
        return (q @ k.mT * 0.5).masked_fill(~allowed(IDS), float("-inf")).softmax(-1) @ v

    return attend


def starts(ids):
    """The mask by the place where each token's document starts, as from cumulative lengths."""
    place = torch.arange(ids.shape[1])
    first = torch.where(F.pad(ids == EOD, (1, 0))[:, :-1], place, 0).cummax(-1).values
    return (place[None, :] >= first[..., None])[:, None] & causal(ids.shape[1])


SPELLINGS = {
    "numbers and triangle": composed(lambda ids: same_document(ids) & causal(SEQ)),
    "two fills": lambda q, k, v: (
        (q @ k.mT * 0.5)
        .masked_fill(~causal(SEQ), float("-inf"))
        .masked_fill(~same_document(IDS), float("-inf"))
        .softmax(-1)
        @ v
    ),
    "starts": composed(starts),
    "added": lambda q, k, v: (
        (
            q @ k.mT * 0.5
            + torch.zeros(2, 1, SEQ, SEQ, dtype=q.dtype).masked_fill(~(same_document(IDS) & causal(SEQ)), float("-inf"))
        ).softmax(-1)
        @ v
    ),
    "sdpa": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, same_document(IDS) & causal(SEQ), scale=0.5),
}


@pytest.mark.parametrize(
    "name",
    [
        "two fills",
        "sdpa",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("numbers and triangle", "starts", "added")),
    ],
)
def test_every_spelling_is_one_attention(name):
    q, k, v = (torch.randn(2, 4, SEQ, 8, dtype=torch.double, requires_grad=True) for _ in range(3))
    report = function_agrees(SPELLINGS[name], q, k, v)
    assert report.counts[NAME] == 1 and not report.skipped(NAME)
    with torch.no_grad():  # nothing crosses from one document to another
        alone = F.scaled_dot_product_attention(q[:1, :, 3:7], k[:1, :, 3:7], v[:1, :, 3:7], is_causal=True, scale=0.5)
        torch.testing.assert_close(SPELLINGS[name](q, k, v)[:1, :, 3:7], alone)


def test_the_report_says_why_documents_are_masked():
    def capped(q, k, v):
        scores = torch.tanh(q @ k.mT / 5.0) * 5.0
        return scores.masked_fill(~(same_document(IDS) & causal(SEQ)), float("-inf")).softmax(-1) @ v

    report = function_agrees(
        capped, *(torch.randn(2, 4, SEQ, 8, dtype=torch.double, requires_grad=True) for _ in range(3))
    )
    (run,) = (r for r in report.graphs[0].runs if r.report.name == NAME)
    assert report.counts[NAME] == 1 and run.report.notes == [
        "packed documents are masked, scores between them computed: the kernel takes no soft-cap"
    ]


def picked(ids):
    """The numbers of one row, each read at its place."""
    d, place = documents(ids)[0], torch.arange(SEQ)
    return d[place[:, None]] == d[place[None, :]]


def test_whose_rows_the_numbers_are():
    """A mask of keys alone, [1, 1, 1, seq], says nothing of the batch."""
    graph = torch.fx.Graph()

    def node(*shape):
        n = graph.placeholder("x")
        n.meta["val"] = torch.empty(shape, device="meta")
        return n

    assert _belongs(node(2, 8), [node(1, 1, 1, 8), node(1, 1, 8, 8), node(2, 1, 8, 8)], 2)
    assert not _belongs(node(2, 8), [node(2, 4, 8, 8)], 2) and not _belongs(node(3, 8), [], 2)


@pytest.mark.parametrize("same", [same_document, picked])
def test_what_keeps_documents_apart_is_no_mask_of_values(same, tmp_path):
    def attend(q, k, v):
        return (q @ k.mT * 0.5).masked_fill(~(same(IDS[:1]) & causal(SEQ)), float("-inf")).softmax(-1) @ v

    args = [torch.randn(1, 2, SEQ, 8, dtype=torch.double, requires_grad=True) for _ in "qkv"]
    report = function_agrees(attend, *args, dump=str(tmp_path))
    assert report.counts[NAME] == 1
    assert any("mindspeed.varlen_attention" in text for text in report.graphs[0].stages.values())


def test_numbers_of_heads_are_not_numbers_of_the_batch():
    def attend(q, k, v):
        d = documents(IDS)  # as many rows as there are heads, and as the batch has
        same = d[:, :, None] == d[:, None, :]  # [heads, seq, seq]
        return (q @ k.mT * 0.5).masked_fill(~(same & causal(SEQ)), float("-inf")).softmax(-1) @ v

    report = function_agrees(
        attend, *(torch.randn(2, 2, SEQ, 8, dtype=torch.double, requires_grad=True) for _ in "qkv")
    )
    (run,) = (r for r in report.graphs[0].runs if r.report.name == NAME)
    assert "are not one row, or one for each of the batch (2)" in run.report.notes[0]


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.qkv = nn.Embedding(10, 16), nn.Linear(16, 48)

    def forward(self, ids):
        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in self.qkv(self.embed(ids)).chunk(3, -1))
        mask = same_document(ids) & causal(SEQ)
        once = F.scaled_dot_product_attention(q, k, v, mask)
        return F.scaled_dot_product_attention(once, k, v, mask).sum(1)


def test_on_npu():
    graphs = npu_graphs.trains_alike(Packed(), IDS, dtype=torch.bfloat16)
    assert (
        graphs.npu() == {"npu_fusion_attention_v3": 2, "npu_fusion_attention_grad_v3": 2} and graphs.unlowered() == []
    )


@pytest.mark.slow
def test_hugging_face_by_positions_that_start_anew():
    pytest.importorskip("transformers")
    from mindspeed_fx import explain
    from tests.zoo import architectures

    model, inputs = architectures.build("llama", "sdpa")
    ids = inputs["input_ids"][:1]
    places = torch.arange(ids.shape[1])[None] % (ids.shape[1] // 2)
    report = explain(
        lambda i, p: model(input_ids=i, position_ids=p, use_cache=False).logits,
        ids,
        places,
        options={"codegen": "eager"},
    )
    assert report.graph_count == 1 and report.counts[NAME] == 2 and not report.skipped(NAME)
