"""Documents and packed sequences in Megatron's models: what a token does not see is skipped, and each sequence has the
loss and the gradients that it has alone."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from mindspeed_fx.megatron import documents, packed_sequences, patches
from mindspeed_fx.megatron.training import document_ends
from tests.kernels.npu import npu_graphs
from tests.megatron.gpt_models import Loss, batch, tiny_gpt, train

LENGTHS = (5, 1, 7, 3)
VARLEN = "mindspeed.varlen_attention"


def alone(model, inputs, lengths):
    """Loss and gradients of every sequence by itself, of the mean over all tokens of one row."""
    model.zero_grad()
    losses = []
    for low, high in zip(cumulative(lengths)[:-1], cumulative(lengths)[1:]):
        part = {n: x[:, low:high] for n, x in inputs.items() if n in ("input_ids", "labels")}
        places = torch.arange(high - low)[None]
        losses.append(model(**part, position_ids=places, attention_mask=None))
    loss = torch.cat(losses, 1).mean()
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


def cumulative(lengths):
    return F.pad(torch.tensor(lengths, dtype=torch.int32).cumsum(0), (1, 0)).int()


def packed(lengths, **settings):
    from megatron.core.packed_seq_params import PackedSeqParams

    limits, longest = cumulative(lengths), max(lengths)
    lengths = dict(max_seqlen_q=longest, max_seqlen_kv=longest)
    return PackedSeqParams(**dict(qkv_format="thd", cu_seqlens_q=limits, cu_seqlens_kv=limits) | lengths | settings)


def mask_of_lengths(rows):
    """Megatron's mask, as its dataset writes it: nothing of a later token, nothing of a document before."""
    seq = sum(rows[0])
    mask = torch.ones(len(rows), 1, seq, seq).tril()
    for row, lengths in zip(mask, rows):
        for end in cumulative(lengths)[1:].tolist():
            row[0, end:, :end] = 0
    return mask < 0.5


def same(actual, expected, rtol=1e-4, atol=1e-6):
    torch.testing.assert_close(actual[0], expected[0], rtol=rtol, atol=1e-5)
    assert actual[1].keys() == expected[1].keys()
    for name, grad in expected[1].items():
        torch.testing.assert_close(actual[1][name], grad, rtol=rtol, atol=atol, msg=lambda m: f"{name}: {m}")  # noqa: B023


def compiled(model, folder):
    options = {"codegen": "eager", "dump": str(folder)}
    return torch.compile(model, backend="mindspeed", fullgraph=True, options=options)


def varlen_calls(folder):
    """Calls of attention that skips, and of attention in all, in the last stage of every graph that was dumped."""
    texts = [p.read_text() for p in sorted(folder.rglob("*.py"))]
    return [text.count(VARLEN) for text in texts if VARLEN in text]


@pytest.mark.parametrize("lengths", [[LENGTHS, (1,) * 16], [(16,), (3, 13)]])
def test_ends_say_what_the_mask_says(lengths):
    mask = mask_of_lengths(lengths)
    ends = documents.document_ends(mask)
    assert ends.shape == (2, 16) and ends[0].unique().tolist() == cumulative(lengths[0])[1:].unique().tolist()
    assert torch.equal(documents.seen(ends, 16), mask) and documents.seen(mask, 16) is mask


def test_other_masks_stay_masks():
    mask = mask_of_lengths([LENGTHS])
    for row, column in ((9, 7), (0, 9), (9, 0)):  # one seen less, or more
        other = mask.clone()
        other[0, 0, row, column] ^= True
        assert documents.document_ends(other) is None
    assert documents.document_ends(mask[:, 0]) is None and documents.document_ends(mask.int()) is None


@pytest.mark.parametrize(
    "given, skips", [({}, True), (dict(reset_attention_mask=False), False), (dict(context_parallel_size=2), True)]
)
def test_a_batch_arrives_with_ends(given, skips, monkeypatch):
    said = []
    monkeypatch.setattr(document_ends, "_say_masked", said.append)
    arguments = SimpleNamespace(**dict(reset_attention_mask=True, context_parallel_size=1) | given)
    arrived = {"tokens": torch.arange(16)[None], "attention_mask": mask_of_lengths([LENGTHS])}
    monkeypatch.setattr(document_ends, "training_arguments", lambda: arguments)
    monkeypatch.setattr(patches, "original", lambda target: lambda iterator: dict(next(iterator)))
    read = document_ends.batch_on_this_rank(iter([arrived]))
    assert list(read) == list(arrived) and read["tokens"] is arrived["tokens"]
    assert torch.equal(documents.seen(read["attention_mask"], 16), arrived["attention_mask"])
    assert (read["attention_mask"].shape == (1, 16)) == skips and not said
    other = {"attention_mask": arrived["attention_mask"].logical_not()}
    assert torch.equal(document_ends.batch_on_this_rank(iter([other]))["attention_mask"], other["attention_mask"])
    assert len(said) == skips  # why they are not skipped
    monkeypatch.setenv("MINDSPEED_FX_COMPILE", "0")
    assert document_ends.batch_on_this_rank(iter([arrived]))["attention_mask"] is arrived["attention_mask"]


def test_too_many_documents_stay_a_mask(monkeypatch):
    monkeypatch.setattr(documents, "MOST", 8)
    assert documents.document_ends(mask_of_lengths([LENGTHS, LENGTHS])).shape == (2, 3)
    assert documents.document_ends(mask_of_lengths([LENGTHS, (3, 3, 3, 3, 4)])) is None


@pytest.mark.parametrize(
    "settings", [{}, dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)]
)
def test_a_batch_of_documents(settings, tmp_path):
    model, inputs = tiny_gpt(**settings), batch()
    rows = [LENGTHS, (10, 6)]
    mask = mask_of_lengths(rows)
    inputs["attention_mask"] = mask
    expected = train(model, inputs)
    inputs["attention_mask"] = documents.document_ends(mask)
    same(train(model, inputs), expected)
    same(train(model, inputs, compiled(model, tmp_path)), expected)
    assert varlen_calls(tmp_path)


@pytest.mark.parametrize("settings", [{}, pytest.param(dict(latent=True), marks=pytest.mark.slow)])
def test_packed_sequences_are_those_alone(settings, tmp_path):
    model, inputs = tiny_gpt(**settings), batch(1)
    inputs["packed_seq_params"] = packed(LENGTHS)
    expected = alone(model, inputs, LENGTHS)
    same(train(model, inputs), expected)
    same(train(model, inputs, compiled(model, tmp_path)), expected)
    assert varlen_calls(tmp_path)


def test_lengths_and_their_number_may_change():
    """The second set of lengths makes their number, and the longest, symbols."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    model, inputs = tiny_gpt(layers=1), batch(1)
    step = torch.compile(model, backend=counter, fullgraph=True)
    for lengths in (LENGTHS, (9, 7), (16,), (8, 4, 4)):
        inputs["packed_seq_params"] = packed(lengths)
        same(train(model, inputs, step), alone(model, inputs, lengths))
    assert counter.frame_count <= 3  # one row that is one sequence reads its angles as they lie


def test_padding_behind_a_sequence_is_not_seen():
    model, inputs = tiny_gpt(layers=1), batch(1)
    real = torch.tensor([0, 4, 5, 11, 14], dtype=torch.int32)  # of places 5, 1, 7, 3
    limits = cumulative(LENGTHS)
    inputs["packed_seq_params"] = packed(
        LENGTHS, cu_seqlens_q=real, cu_seqlens_kv=real, cu_seqlens_q_padded=limits, cu_seqlens_kv_padded=limits
    )
    loss = model(**inputs).detach()
    inputs["input_ids"] = inputs["input_ids"].index_fill(1, torch.tensor([4, 12]), 0)
    changed = (model(**inputs).detach() != loss)[0]
    assert changed.nonzero().flatten().tolist() == [4, 12]


def test_each_token_ahead_is_of_its_own_sequence():
    tensor = torch.randn(2, 18)  # two places behind the last sequence
    parameters = packed(LENGTHS)
    rolled, total = packed_sequences.roll(tensor, -1, -1, parameters)
    expected, expected_total = patches.original(packed_sequences.ROLL)(tensor, -1, -1, parameters)
    torch.testing.assert_close(rolled, expected, rtol=0, atol=0)
    torch.testing.assert_close(total, expected_total)
    parameters.cu_seqlens_q = parameters.cu_seqlens_q[None]  # as pretrain_gpt.py hands them on
    assert torch.equal(packed_sequences.roll(tensor, -1, -1, parameters)[0], expected)


@pytest.mark.parametrize(
    "settings, config, message",
    [
        (
            dict(qkv_format="sbhd", max_seqlen_q=16),
            {},
            "qkv_format 'sbhd' of packed_seq_params in local",
        ),
        ({}, dict(window_size=(4, 0)), r"window_size \(4, 0\) with packed_seq_params"),
    ],
)
def test_what_packed_sequences_cannot_have(settings, config, message):
    model, inputs = tiny_gpt(layers=1, **config), batch(1)
    inputs["packed_seq_params"] = packed(LENGTHS, **settings)
    with pytest.raises(ValueError, match=message):
        model(**inputs)


class Documents(Loss):
    def forward(self, ids, labels, ends):
        places = torch.arange(ids.shape[1]).expand_as(ids)
        return self.gpt(input_ids=ids, position_ids=places, attention_mask=ends, labels=labels).mean()


def test_on_npu_the_kernel_takes_the_ends_of_all_rows():
    inputs = batch()
    ends = documents.document_ends(mask_of_lengths([LENGTHS, (10, 6)]))
    graphs = npu_graphs.trains_alike(
        Documents(hidden=64, ffn=48, layers=1), inputs["input_ids"], inputs["labels"], ends, dtype=torch.bfloat16
    )
    assert graphs.unlowered() == []
    assert {"npu_fusion_attention_v3 in TND", "npu_fusion_attention_grad_v3 in TND"} <= {
        row["kernel"] for row in graphs.rows()
    }
