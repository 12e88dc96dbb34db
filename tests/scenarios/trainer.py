"""transformers' Trainer and accelerate with the backend by its name."""

from __future__ import annotations

import tempfile
from typing import Any

import torch

import mindspeed_fx
from tests.scenarios import configs, table
from tests.scenarios.table import scenario

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": dict(gradient_accumulation_steps=2),
    "bfloat16": dict(bf16=True),
    "checkpointing": dict(gradient_checkpointing=True),
    "checkpointing_reentrant": dict(
        gradient_checkpointing=True, gradient_checkpointing_kwargs=dict(use_reentrant=True)
    ),
    "evaluation": dict(eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=2),
    "label_smoothing": dict(label_smoothing_factor=0.1),
    "schedule_and_warmup": dict(lr_scheduler_type="cosine", warmup_steps=1),
    "neftune": dict(neftune_noise_alpha=0.0),
    "torch_empty_cache_and_clip": dict(max_grad_norm=0.1),
    "adafactor": dict(optim="adafactor"),
    "group_by_length": dict(train_sampling_strategy="group_by_length"),
}


def preload() -> None:
    import accelerate  # noqa: F401
    from transformers import Trainer  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401


def model(kind: str = "llama") -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(configs.small(kind, use_cache=False))


def rows(count: int = 8, length: int = 12) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(3, 100, (count, length), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in ids]


def trainer(run: Any, folder: str, one: Any, kind: Any = None, **settings: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    if run.name:
        mindspeed_fx.register_with_accelerate()
        settings |= dict(torch_compile_backend=run.name)
    settings = (
        dict(
            max_steps=2,
            per_device_train_batch_size=2,
            logging_steps=1,
            use_cpu=True,
            report_to=[],
            seed=1,
            save_strategy="no",
            disable_tqdm=True,
            optim="sgd",
            learning_rate=0.05,
        )
        | settings
    )
    arguments = TrainingArguments(folder, **settings)
    return (kind or Trainer)(one, arguments, train_dataset=rows(), eval_dataset=rows(4))


@scenario("transformers/Trainer/{}", SETTINGS)
def run_trainer(run: Any, name: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        one = trainer(run, folder, model(), **SETTINGS[name])
        one.train()
        history = [{k: r[k] for k in ("loss", "grad_norm", "eval_loss") if k in r} for r in one.state.log_history]
    values = {
        "history": history,
        "weights": {k.replace("_orig_mod.", ""): v for k, v in one.model.state_dict().items()},
    }
    if name == "bfloat16":
        values = torch.utils._pytree.tree_map(lambda v: torch.as_tensor(v).bfloat16(), values)
    return values


@scenario("transformers/Trainer/save_and_resume")
def run_resume(run: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        how = dict(save_strategy="steps", save_steps=1)
        trainer(run, folder, model(), **how).train()
        torch._dynamo.reset()
        one = trainer(run, folder, model(), **how | dict(max_steps=3))
        one.train(resume_from_checkpoint=True)
        return {k.replace("_orig_mod.", ""): v for k, v in one.model.state_dict().items()}


@scenario("transformers/Trainer/label_smoothing_compiled_in_place")
def run_compiled_in_place(run: Any) -> Any:
    """The Trainer shifts the labels of what it knows for a causal model by the name of its class."""
    one = model()
    if run.name:
        one.compile(backend=run.name)
    with tempfile.TemporaryDirectory() as folder:
        own = trainer(table.Run("eager"), folder, one, **SETTINGS["label_smoothing"])
        own.train()
        return [{"loss": r["loss"], "norm": r["grad_norm"]} for r in own.state.log_history if "loss" in r]


@scenario("transformers/Trainer/own_loss")
def run_own_loss(run: Any) -> Any:
    from transformers import Trainer

    class Own(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            labels = inputs.pop("labels")
            out = model(**inputs)
            loss = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            return (loss + 1e-4 * out.logits.square().mean(), out) if return_outputs else loss

    with tempfile.TemporaryDirectory() as folder:
        one = trainer(run, folder, model(), Own)
        one.train()
        return [{"loss": r["loss"]} for r in one.state.log_history if "loss" in r]


@scenario("transformers/Trainer/ddp_two_ranks")
def run_trainer_ddp(run: Any) -> Any:
    return run.ranks(_train_rank, run=run)


def _train_rank(rank: int, run: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        one = trainer(run, folder, model(), ddp_backend="gloo")
        one.train()
        history = [{"loss": r["loss"], "norm": r["grad_norm"]} for r in one.state.log_history if "loss" in r]
        return {"history": history, "weights": one.accelerator.unwrap_model(one.model).state_dict()}


@scenario("accelerate/{}", ("plain", "accumulation", "bfloat16", "ddp_two_ranks"))
def run_accelerate(run: Any, kind: str) -> Any:
    if kind == "ddp_two_ranks":
        return run.ranks(_accelerate, run=run, kind=kind)
    values = _accelerate(0, run, kind)
    return torch.utils._pytree.tree_map(lambda v: v.bfloat16(), values) if kind == "bfloat16" else values


def _accelerate(rank: int, run: Any, kind: str) -> Any:
    from accelerate import Accelerator

    if run.name:
        mindspeed_fx.register_with_accelerate()
    how: dict[str, Any] = dict(dynamo_backend=run.name) if run.name else {}
    how |= {"accumulation": dict(gradient_accumulation_steps=2), "bfloat16": dict(mixed_precision="bf16")}.get(kind, {})
    accelerator, one = Accelerator(cpu=True, **how), model()
    loader = torch.utils.data.DataLoader(rows(), batch_size=2)
    prepared, optimizer, loader = accelerator.prepare(one, torch.optim.SGD(one.parameters(), 0.05), loader)
    losses = []
    for batch in loader:
        with accelerator.accumulate(prepared):
            loss = prepared(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
        if len(losses) == 2:
            break
    return {"losses": losses, "weights": dict(one.named_parameters())}
