"""The parts of examples/train_hf.py by themselves: data, models, arguments, plans, checkpoints, reports."""

from __future__ import annotations

import argparse
import importlib
import itertools
import random
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("transformers", reason="transformers is an optional dependency")
EXAMPLES = str(Path(__file__).parents[1] / "examples")


@pytest.fixture
def part(monkeypatch):
    """``part(name)``: a module of the example."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module


def parse(part, words: str = "") -> argparse.Namespace:
    return part("hf_arguments").parse(None, words.split())


SIZES = "--layers 1 --hidden 32 --seq-length 16 --batch-size 2"
NAMES = {"causal": "qwen3", "masked": "bert", "seq2seq": "t5", "vision": "vit"}


def build(part, words: str):
    """(arguments, losses, vocabulary) of a small model."""
    models, args = part("hf_models"), parse(part, f"{SIZES} {words}")
    vocabulary = part("hf_data").Bytes()
    config = models.make_config(args, vocabulary)
    vocabulary.start = models.first_of_decoder(config, vocabulary)
    return args, models.LOSSES[args.kind](models.build_model(args, config)), vocabulary


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text"
    path.write_text("\n\n\n".join(chr(97 + i % 26) * (3 + i % 9) for i in range(200)))
    return str(path)


def batches(part, text: str, words: str, packed: bool = False):
    args, data = parse(part, f"{SIZES} --data {text} {words}"), part("hf_data")
    args.kind = args.kind or "causal"
    vocabulary = data.Bytes()
    return data.TextBatches(args, data.Documents([text], vocabulary), vocabulary, data.TRAINING, packed)


# ------------------------------------------------------------------ data


def test_packed_documents_have_positions_and_labels_of_their_own(part, text):
    batch = batches(part, text, "", packed=True)[0]
    ids, labels, positions = (batch[n] for n in ("input_ids", "labels", "position_ids"))
    assert ids.shape == labels.shape == positions.shape == (2, 16) and ids.dtype == torch.int64
    for row in range(2):
        for i in range(16):
            begins = i == 0 or ids[row, i - 1] == 2  # behind the end of a document
            assert (positions[row, i] == 0) == begins
            assert begins or positions[row, i] == positions[row, i - 1] + 1
            assert (labels[row, i] == -100) == (ids[row, i] == 2)
            assert i == 15 or labels[row, i] in (-100, ids[row, i + 1])
    assert (ids == 2).any()


def test_rows_of_buckets_are_one_document_each_and_padding_has_no_loss(part, text):
    made = batches(part, text, "--buckets 8 16")
    shapes = set()
    for number in range(len(made)):
        batch = made[number]
        ids, labels = batch["input_ids"], batch["labels"]
        shapes.add(tuple(ids.shape))
        for row, wanted in zip(ids, labels):
            document = row[row >= 4]
            assert len(set(document.tolist())) <= 2 and (wanted != -100).sum() == len(document)  # a letter, a new line
    assert shapes == {(2, 8), (2, 16)}


def test_every_piece_of_text_comes_once_in_an_epoch_in_another_order_in_the_next(part, text):
    made = batches(part, text, "--no-packed")
    rows = [[tuple(r) for n in range(e * len(made), (e + 1) * len(made)) for r in made[n]["input_ids"].tolist()]
            for e in range(2)]  # fmt: skip
    assert len(made) > 10 and len(rows[0]) == len(rows[1]) and rows[0] != rows[1]
    counted = np.bincount(np.array(rows[0]).ravel(), minlength=264)
    assert 189 - counted[2] <= 1 + 16 * 2  # ends of 190 documents, but for a rest that is no batch


@pytest.mark.parametrize("kind", ["masked", "seq2seq"])
def test_hidden_tokens_are_what_is_looked_for(part, text, kind):
    made = batches(part, text, f"--kind {kind} --buckets 16")
    hidden = total = 0
    for number in range(len(made)):
        batch = made[number]
        read, labels, mask = (batch[n] for n in ("input_ids", "labels", "attention_mask"))
        total += int(mask.sum())
        hidden += int((read == 3).sum())
        assert ((read == 0) == (mask == 0)).all()
        if kind == "masked":
            kept = labels == -100
            assert ((read == 3) <= ~kept).all() and (mask[~kept] == 1).all()
        else:
            assert ((labels == -100) == (mask == 0)).all()
            assert (batch["decoder_input_ids"][:, 1:][mask[:, 1:] == 1] == labels[:, :-1][mask[:, 1:] == 1]).all()
    assert 0.08 < hidden / total < 0.16
    assert all(torch.equal(a, b) for a, b in zip(made[3].values(), made[3].values())), "drawn anew"


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_goes_on_where_it_was(part, workers):
    data = part("hf_data")

    class Numbers(torch.utils.data.Dataset):
        def __getitem__(self, i):
            return {"n": torch.tensor(i)}

    generator = torch.get_rng_state()
    loader, other = data.Loader(Numbers(), workers), data.Loader(Numbers(), 0)
    assert [next(loader)["n"].item() for _ in range(3)] == [0, 1, 2]
    other.load_state_dict(loader.state_dict())
    assert [next(other)["n"].item() for _ in range(2)] == [3, 4] and loader.state_dict() == {"batches": 3}
    assert torch.equal(generator, torch.get_rng_state()), "dropout would draw others after a stop"


def test_digits_can_be_told_apart(part):
    images, args = part("hf_images"), parse(part, f"{SIZES} --batch-size 20")
    digits = images.Digits()
    assert len({d.tobytes() for d in digits.dots}) == 10
    made = [images.ImageBatches(args, digits, None, p, False)[0] for p in (0, 0, 1)]
    assert made[0]["pixel_values"].shape == (20, 1, 32, 32) and made[0]["pixel_values"].dtype == torch.float32
    assert torch.equal(made[0]["pixel_values"], made[1]["pixel_values"])
    assert not torch.equal(made[0]["pixel_values"], made[2]["pixel_values"])
    assert set(made[0]["labels"].tolist()) <= set(range(10))


# ------------------------------------------------------------------ models


@pytest.mark.parametrize("kind", [*NAMES, "mixture"])
def test_losses_are_those_of_the_model_itself(part, kind, text):
    """Divided by the number of labels, with the loss of the router where the configuration asks for it."""
    words = "--model qwen3_moe --set output_router_logits=true" if kind == "mixture" else f"--model {NAMES[kind]}"
    args, losses, vocabulary = build(part, words)
    losses.eval()
    if kind == "vision":
        images = part("hf_images")
        batch = images.ImageBatches(args, images.Digits(), None, 0, False)[0]
        own = losses.model(**batch).loss
    else:
        batch = batches(part, text, f"--kind {args.kind} --no-packed")[0]
        given = dict(batch)
        if args.kind == "causal":  # it takes the tokens themselves, and looks one further
            given["labels"] = torch.cat((torch.full((2, 1), -100), batch["labels"][:, :-1]), 1)
            batch["labels"][:, -1] = -100
        own = losses.model(**given).loss
    count = (batch["labels"] != -100).sum()
    torch.testing.assert_close(losses(**batch) / count, own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "model, told",
    [("qwen3", None), ("gpt2", None), ("mamba", "it looks back"), ("bloom", "it ")],
)
def test_whether_documents_see_each_other_is_tried(part, model, told):
    _, losses, _ = build(part, f"--model {model}")
    found = part("hf_models").sees_other_documents(losses, 264)
    assert found is None if told is None else (found or "").startswith(told)
    assert losses.training


def test_what_is_said_stands_in_the_configuration(part, tmp_path):
    args, losses, _ = build(part, "--heads 2 --ffn 40 --dropout 0.3 --set rms_norm_eps=0.5 tie_word_embeddings=true")
    config = losses.model.config
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (1, 32, 2)
    assert (config.intermediate_size, config.attention_dropout, config.rms_norm_eps) == (40, 0.3, 0.5)
    assert config.tie_word_embeddings and len(config.layer_types) == 1
    config.save_pretrained(tmp_path)
    again = build(part, f"--config {tmp_path / 'config.json'} --ffn 48")[1].model.config
    assert (again.num_attention_heads, again.intermediate_size, again.rms_norm_eps) == (2, 48, 0.5)


def test_flops_are_those_that_torch_counts(part):
    _, losses, _ = build(part, "")
    ids = torch.zeros(2, 16, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        losses(input_ids=ids, labels=ids).backward()
    report = part("hf_report")
    assert report.flops_of(losses, {"input_ids": ids, "labels": ids}) == (
        counter.get_total_flops(),
        "matrix products counted",
    )

    class Reads(torch.nn.Linear):
        def forward(self, labels):
            return self.weight.sum() * labels.sum().item()

    assert report.flops_of(Reads(3, 5), {"labels": ids}) == (6 * 15 * 32, "6 for each parameter and token")


# ------------------------------------------------------------------ arguments and plans


@pytest.mark.parametrize(
    "words, ranks, error",
    [
        ("--layers 0", 1, "--layers 0 is less than 1"),
        ("--batch-size 6 --accumulate 4", 1, "--accumulate 4 does not divide --batch-size 6"),
        (
            "--devices 4",
            2,
            "--devices 4: there are 2 processes; give auto, or start them by torchrun --nproc-per-node 4",
        ),
        ("--devices all", 2, "--devices all: there are 2 processes; give auto"),
        ("--plan none", 2, "--plan none: 2 processes would do the same"),
        ("--plan zero2 --backend eager", 2, "--plan zero2 is what --backend mindspeed does, not --backend eager"),
        ("--dropout 1", 1, "--dropout 1.0: 0 to 1, without 1, is expected"),
        ("--min-lr 1", 1, "--min-lr 1.0 is above --lr 0.001"),
        ("--warmup 200", 1, "--warmup 200 leaves nothing of --steps 200"),
        ("--buckets 2 8", 1, "--buckets 2 8: lengths from 4 on are expected"),
        ("--buckets 8 --packed", 1, "--buckets 8: rows of one document each are not --packed"),
        ("--image-size 30", 1, "--image-size 30: a multiple of 4 from 16 on is expected"),
        ("--level 7", 1, 'option "level" is 7; valid: 0, 1, 2'),
    ],
)
def test_what_does_not_go_together_is_one_line(part, monkeypatch, words, ranks, error):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    with pytest.raises(SystemExit) as raised:
        parse(part, words)
    assert str(raised.value).startswith("error: ") and error in str(raised.value) and "\n" not in str(raised.value)
    if "level" not in words:
        monkeypatch.setenv("RANK", "1")
        with pytest.raises(SystemExit) as raised:
            parse(part, words)
        assert raised.value.code == 1, "another rank than the first says it again"


def test_defaults_that_depend_on_others(part, monkeypatch):
    alone = parse(part)
    monkeypatch.setenv("WORLD_SIZE", "4")
    four = parse(part, "--devices 4 --model bert --buckets 32 16 32")
    assert (alone.plan, four.plan, alone.save, four.save) == ("none", "search", "runs/hf-qwen3", "runs/hf-bert")
    assert (four.buckets, four.seq_length, alone.warmup) == ([16, 32], 32, 20)


@pytest.mark.parametrize(
    "ranks, dims, mesh, sizes",
    [
        (4, ("dp",), None, {"dp": 4}),
        (4, ("dp", "tp"), None, {"dp": 2, "tp": 2}),
        (8, ("dp", "tp"), None, {"dp": 4, "tp": 2}),
        (8, ("dp", "cp", "tp"), None, {"dp": 2, "cp": 2, "tp": 2}),
        (3, ("dp", "tp"), None, {"dp": 3, "tp": 1}),
        (8, ("dp", "tp"), "tp=4,dp=2", {"dp": 2, "tp": 4}),
    ],
)
def test_sizes_of_a_mesh(part, ranks, dims, mesh, sizes):
    args = types.SimpleNamespace(mesh=mesh, world_size=ranks, plan="zero2+tp")
    found = part("hf_plan").mesh_sizes(args, dims)
    assert found == sizes and list(found) == list(sizes)


@pytest.mark.parametrize(
    "mesh, error", [("dp=2,tp", "'tp' is no size"), ("dp=0", "'dp=0' is no size"), ("pp=2", "has the")]
)
def test_a_wrong_mesh_is_named(part, mesh, error):
    args = types.SimpleNamespace(mesh=mesh, world_size=2, plan="zero2")
    with pytest.raises(SystemExit, match=error):
        part("hf_plan").mesh_sizes(args, ("dp",))


def test_processes_that_are_started_again_do_not_hear_the_dead(part):
    """One store over several starts, of which the first left greetings and answers."""
    agree, store, heard = part("hf_plan").agree_on_word, torch.distributed.HashStore(), []
    for start in range(3):
        words = [None] * 3

        def run(rank, words=words):
            words[rank] = agree(store, rank, 3)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
        if start == 1:  # killed before the first rank answered
            store.set("greeting/1", "dead")
            continue
        for thread in random.Random(start).sample(threads, 3):
            thread.start()
            time.sleep(0.02)
        for thread in threads:
            thread.join(20)
        assert len(set(words)) == 1 and words[0] not in (None, *heard)
        heard.append(words[0])


# ------------------------------------------------------------------ checkpoints and reports


class Stub:
    """As much of a trainer as a checkpoint takes."""

    def __init__(self, part, folder, words=""):
        self.args = parse(part, f"--save {folder} {words}")
        self.losses = torch.nn.Module()
        self.losses.model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64))
        self.saved, self.pipeline = set(self.losses.model.state_dict()), None
        self.optimizer = torch.optim.AdamW(self.losses.parameters(), lr=0.1)
        self.device, self.documents, self.step = torch.device("cpu"), types.SimpleNamespace(fingerprint="f"), 0
        self.checkpoints = part("hf_checkpoint").Checkpoints(self.args)

    def read_state(self):
        return {"step": self.step}

    def write_state(self, state):
        self.step = state["step"]

    def train(self):
        self.optimizer.zero_grad()
        self.losses.model(torch.randn(4, 64)).square().sum().backward()
        self.optimizer.step()
        self.step += 1


@pytest.mark.parametrize("words", ["", "--no-async-save"])
def test_a_checkpoint_is_what_was_when_it_was_begun(part, tmp_path, words):
    """Whatever is trained while it is written: weights, statistics, the optimizer's state, the generator."""
    stub = Stub(part, tmp_path, words)
    stub.train()
    expected, generator = [t.clone() for t in stub.losses.model.state_dict().values()], torch.get_rng_state()
    moments = [t.clone() for s in stub.optimizer.state.values() for t in s.values()]
    stub.checkpoints.save(stub)
    for _ in range(3):
        stub.train()
    stub.checkpoints.finish()
    other = Stub(part, tmp_path, words)
    assert other.checkpoints.load(other) and other.step == 1
    assert all(map(torch.equal, other.losses.model.state_dict().values(), expected))
    assert all(map(torch.equal, itertools.chain(*(s.values() for s in other.optimizer.state.values())), moments))
    assert torch.equal(torch.get_rng_state(), generator)


def test_what_is_not_whole_is_never_taken_and_two_stay(part, tmp_path, monkeypatch):
    stub = Stub(part, tmp_path, "--no-async-save")
    for _ in range(4):
        stub.train()
        stub.checkpoints.save(stub)
    torn = tmp_path / "step_0000009.partial"
    torn.mkdir()
    (torn / "state.json").write_text("{")
    assert [p.name for p in stub.checkpoints.whole()] == ["step_0000003", "step_0000004"]
    other = Stub(part, tmp_path)
    assert not torn.exists() and other.checkpoints.load(other) and other.step == 4
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    again = Stub(part, tmp_path, "--resume never")  # started again by torchrun
    assert again.checkpoints.load(again) and again.step == 4
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    anew = Stub(part, tmp_path, "--resume never")
    assert not anew.checkpoints.load(anew) and not list(tmp_path.glob("step_*"))


def test_what_writing_raised_is_told(part, tmp_path):
    stub = Stub(part, tmp_path)
    stub.checkpoints.save(stub)
    stub.checkpoints.future.result()
    broken = types.SimpleNamespace(done=lambda: True, result=lambda: (_ for _ in ()).throw(OSError("no space left")))
    stub.checkpoints.future = broken
    with pytest.raises(OSError, match="no space left"):
        stub.checkpoints.poll()


def test_utilization_is_of_the_median_step(part):
    report = part("hf_report")
    through = report.Throughput(2, 0.001, torch.float32, torch.device("cpu"), "token")
    for seconds in (9.0, 1.0, 2.0, 4.0):
        through.add(seconds, 100, 1e9)
    assert through.describe() == "50 tokens/s, MFU 25%"
    assert through.describe_all().startswith("first step (with compilation) 9.0 s, median step 2000 ms, 50 tokens/s")
