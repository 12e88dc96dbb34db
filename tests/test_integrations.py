"""accelerate and transformers' Trainer with this backend by its name: registered once, and it is what runs."""

from __future__ import annotations

import copy
import pickle
import sys

import pytest
import torch

import mindspeed_fx
from mindspeed_fx.errors import OptionError
from mindspeed_fx.report import recorder


@pytest.fixture
def accelerate(monkeypatch):
    monkeypatch.setenv("MINDSPEED_FX_OPTIONS", '{"codegen": "eager", "level": 1}')  # quick to compile
    found = pytest.importorskip("accelerate")
    mindspeed_fx.register_with_accelerate()
    yield found
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def tiny():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=64,
            use_cache=False,
        )
    )


def rows(n=4, length=16):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 64, (n, length), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def test_the_enum_has_one_more_member(accelerate):
    from accelerate.utils import DynamoBackend

    before = DynamoBackend.list()
    mindspeed_fx.register_with_accelerate()
    member = DynamoBackend("MINDSPEED")
    assert DynamoBackend.list() == before and before.count("MINDSPEED") == 1 and "MINDSPEED" in DynamoBackend
    assert (
        member
        is DynamoBackend.MINDSPEED
        is DynamoBackend["MINDSPEED"]
        is copy.deepcopy(member)
        is pickle.loads(pickle.dumps(member))
    )
    assert (
        isinstance(member, str)
        and member == "MINDSPEED"
        and str(member) == "MINDSPEED"
        and member != DynamoBackend.NO
        and DynamoBackend("INDUCTOR") is DynamoBackend.INDUCTOR
    )


def test_accelerator_compiles_with_the_backend(accelerate):
    model, batch = tiny(), {k: torch.stack([r[k] for r in rows()]) for k in ("input_ids", "labels")}
    expected = copy.deepcopy(model)
    given = accelerate.Accelerator(dynamo_backend="mindspeed", cpu=True)
    prepared, optimizer = given.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with recorder.collecting() as graphs:
        loss = prepared(**batch).loss
        given.backward(loss)
    assert graphs and any(g.counts.get("fusion.rms_norm") for g in graphs)
    reference = expected(**batch).loss
    reference.backward()
    assert abs(loss - reference) < 1e-5 * reference
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert q.grad.abs().max() > 0 and torch.allclose(p.grad, q.grad, rtol=1e-4, atol=1e-6)


def test_trainer_trains_with_the_backend(accelerate, tmp_path):
    from transformers import Trainer, TrainingArguments

    losses = {}
    for backend in (None, "mindspeed"):
        settings = {"torch_compile_backend": backend} if backend else {}
        given = TrainingArguments(
            tmp_path / str(backend),
            max_steps=2,
            per_device_train_batch_size=2,
            logging_steps=1,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            seed=1,
            **settings,
        )
        trainer = Trainer(tiny(), given, train_dataset=rows())
        with recorder.collecting() as graphs:
            trainer.train()
        losses[backend] = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        assert bool(graphs) == (backend == "mindspeed")
    assert any(g.counts.get("fusion.rms_norm") for g in graphs) and len(losses["mindspeed"]) == 2
    assert losses["mindspeed"] == pytest.approx(losses[None], rel=1e-3) and losses[None][0] != losses[None][1]


def test_without_accelerate_it_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate.utils", None)
    with pytest.raises(OptionError, match="pip install accelerate"):
        mindspeed_fx.register_with_accelerate()
