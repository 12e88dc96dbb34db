"""TRL's trainers on a tiny model, with a tokenizer of whole words made on the spot."""

from __future__ import annotations

import tempfile
from typing import Any

import torch

import mindspeed_fx
from tests.scenarios import configs
from tests.scenarios.table import scenario
from tests.scenarios.trainer import model

WORDS = [f"w{i}" for i in range(100)]


def preload() -> None:
    import dill
    import trl  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401
    from trl import DPOTrainer, GRPOTrainer, RewardTrainer, SFTTrainer  # noqa: F401

    dill._dill._is_builtin_module = lambda module: True  # it takes modules outside the environment apart


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {w: i for i, w in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


def text(seed: int, words: int) -> str:
    picks = torch.randint(0, 100, (words,), generator=torch.Generator().manual_seed(seed)).tolist()
    return " ".join(WORDS[i] for i in picks)


def fit(run: Any, trainer: str, config: str, dataset: dict[str, list[Any]], one: Any = None, **settings: Any) -> Any:
    import trl
    from datasets import Dataset

    if run.name:
        mindspeed_fx.register_with_accelerate()
        settings |= dict(torch_compile_backend=run.name)
    with tempfile.TemporaryDirectory() as folder:
        settings = (
            dict(
                output_dir=folder,
                max_steps=2,
                per_device_train_batch_size=2,
                logging_steps=1,
                use_cpu=True,
                bf16=False,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
                optim="sgd",
                learning_rate=0.05,
                seed=1,
                gradient_checkpointing=False,
            )
            | settings
        )
        extra = {k: settings.pop(k) for k in ("reward_funcs", "peft_config", "ref_model") if k in settings}
        one = one or model()
        given = getattr(trl, trainer)(
            model=one,
            args=getattr(trl, config)(**settings),
            train_dataset=Dataset.from_dict(dataset),
            processing_class=tokenizer(),
            **extra,
        )
        given.train()
        history = [{"loss": r["loss"], "norm": r["grad_norm"]} for r in given.state.log_history if "grad_norm" in r]
    return {"history": history, "weights": {k: v for k, v in one.state_dict().items() if v.is_floating_point()}}


@scenario("trl/sft/{}", ("plain", "packing", "completion_only", "lora", "checkpointing", "dft"))
def run_sft(run: Any, kind: str) -> Any:
    texts = [text(i, 8 + i) for i in range(8)]
    data: dict[str, list[Any]] = {"text": texts}
    how: dict[str, Any] = dict(max_length=24)
    if kind == "packing":
        how |= dict(packing=True, packing_strategy="wrapped")
    if kind == "completion_only":
        data = {"prompt": texts, "completion": [" " + text(50 + i, 6) for i in range(8)]}
        how |= dict(completion_only_loss=True)
    if kind == "lora":
        import peft

        how |= dict(peft_config=peft.LoraConfig(task_type="CAUSAL_LM", r=4))
    if kind == "checkpointing":
        how |= dict(gradient_checkpointing=True)
    if kind == "dft":
        how |= dict(loss_type="dft")
    return fit(run, "SFTTrainer", "SFTConfig", data, **how)


PREFERENCES = ("sigmoid", "ipo", "hinge", "robust", "sigmoid_norm", "apo_zero", "lora")


def pairs() -> dict[str, list[str]]:
    return {
        "prompt": [text(i, 5) for i in range(8)],
        "chosen": [" " + text(20 + i, 6) for i in range(8)],
        "rejected": [" " + text(40 + i, 4) for i in range(8)],
    }


@scenario("trl/dpo/{}", PREFERENCES)
def run_dpo(run: Any, kind: str) -> Any:
    how: dict[str, Any] = dict(loss_type="sigmoid" if kind == "lora" else kind, max_length=24)
    if kind == "robust":
        how |= dict(label_smoothing=0.1)
    if kind == "lora":
        import peft

        how |= dict(peft_config=peft.LoraConfig(task_type="CAUSAL_LM", r=4))
    else:
        how |= dict(ref_model=model())
    return fit(run, "DPOTrainer", "DPOConfig", pairs(), **how)


@scenario("trl/kto")
def run_kto(run: Any) -> Any:
    data = {
        "prompt": [text(i, 5) for i in range(8)],
        "completion": [" " + text(20 + i, 6) for i in range(8)],
        "label": [i % 2 == 0 for i in range(8)],
    }
    return fit(run, "KTOTrainer", "KTOConfig", data, max_length=24, ref_model=model())


@scenario("trl/reward")
def run_reward(run: Any) -> Any:
    from transformers import AutoModelForSequenceClassification

    one = AutoModelForSequenceClassification.from_config(configs.small("llama", num_labels=1, use_cache=False))
    data = {k: [p + v for p, v in zip(pairs()["prompt"], pairs()[k])] for k in ("chosen", "rejected")}
    return fit(run, "RewardTrainer", "RewardConfig", data, one, max_length=24)


@scenario("trl/{}", ("grpo/grpo", "grpo/dr_grpo", "grpo/bnpo", "rloo"))
def run_grpo(run: Any, kind: str) -> Any:
    data = {"prompt": [text(i, 5) for i in range(8)]}
    how: dict[str, Any] = dict(num_generations=2, max_completion_length=6, beta=0.0)  # without a reference model
    how |= dict(reward_funcs=lambda completions, **_: [float(sum(map(ord, c)) % 7) for c in completions])
    if kind == "rloo":
        return fit(run, "RLOOTrainer", "RLOOConfig", data, **how)
    return fit(run, "GRPOTrainer", "GRPOConfig", data, loss_type=kind.split("/")[1], **how)
