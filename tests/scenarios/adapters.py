"""PEFT: adapters in a compiled model, merged and taken off again."""

from __future__ import annotations

from typing import Any

import torch

from tests.scenarios.steps import train
from tests.scenarios.table import scenario
from tests.scenarios.trainer import model

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraConfig", dict(r=4, lora_dropout=0.0, init_lora_weights=False)),
    "rslora": ("LoraConfig", dict(r=4, use_rslora=True, init_lora_weights=False)),
    "dora": ("LoraConfig", dict(r=4, use_dora=True)),
    "lora_bias": ("LoraConfig", dict(r=4, lora_bias=True, init_lora_weights=False)),
    "lora_all_linear": ("LoraConfig", dict(r=4, target_modules="all-linear", modules_to_save=["lm_head"])),
    "lora_embedding": ("LoraConfig", dict(r=4, target_modules=["embed_tokens", "q_proj"], init_lora_weights=False)),
    "ia3": ("IA3Config", dict(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])),
    "prefix": ("PrefixTuningConfig", dict(num_virtual_tokens=4)),
    "prompt": ("PromptTuningConfig", dict(num_virtual_tokens=4)),
    "p_tuning": ("PromptEncoderConfig", dict(num_virtual_tokens=4, encoder_hidden_size=32)),
    "adalora": ("AdaLoraConfig", dict(init_r=6, target_r=4, total_step=10)),
    "loha": ("LoHaConfig", dict(r=4, target_modules=["q_proj", "v_proj"], init_weights=False)),
    "lokr": ("LoKrConfig", dict(r=4, target_modules=["q_proj", "v_proj"], init_weights=False)),
    "oft": ("OFTConfig", dict(r=4, oft_block_size=0, target_modules=["q_proj", "v_proj"])),
    "vera": ("VeraConfig", dict(r=8, target_modules=["q_proj"])),
    "ln_tuning": ("LNTuningConfig", dict(target_modules=["input_layernorm", "norm"])),
    "fourier": ("FourierFTConfig", dict(n_frequency=32, target_modules=["q_proj", "v_proj"], init_weights=True)),
    "bone": ("MissConfig", dict(r=4, target_modules=["q_proj", "v_proj"])),
}


def preload() -> None:
    import peft  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401


def adapted(kind: str = "lora") -> Any:
    import peft

    name, settings = KINDS[kind]
    torch.manual_seed(0)
    return peft.get_peft_model(model(), getattr(peft, name)(task_type="CAUSAL_LM", **settings))


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(3))
    return dict(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)


@scenario("peft/{}", KINDS)
def run_adapter(run: Any, kind: str) -> Any:
    one = adapted(kind).train()
    with torch.no_grad():  # some begin as zeros, whose other half then has no gradient
        generator = torch.Generator().manual_seed(7)
        for p in one.parameters():
            if p.requires_grad:
                p.add_(0.02 * torch.randn(p.shape, generator=generator))
    return train(run, one, batch())


@scenario("peft/merge_and_unmerge")
def run_merge(run: Any) -> Any:
    one, inputs = adapted().eval(), batch()
    compiled, logits = run.compile(one), {}
    with torch.no_grad():
        logits["apart"] = compiled(**inputs).logits
        one.merge_adapter()
        logits["merged"] = compiled(**inputs).logits
        one.unmerge_adapter()
        logits["unmerged"] = compiled(**inputs).logits
        with one.disable_adapter():
            logits["disabled"] = compiled(**inputs).logits
        whole = one.merge_and_unload()
        logits["unloaded"] = run.compile(whole)(**inputs).logits
    return logits


@scenario("peft/two_adapters")
def run_two(run: Any) -> Any:
    import peft

    one, inputs = adapted(), batch()
    one.add_adapter("other", peft.LoraConfig(task_type="CAUSAL_LM", r=2, init_lora_weights=False))
    compiled, losses = run.compile(one), []
    for name in ("default", "other", "default"):
        one.set_adapter(name)
        loss = compiled(**inputs).loss
        loss.backward()
        losses.append(loss)
    one.add_weighted_adapter(["default", "other"], [0.7, 0.3], "both", combination_type="linear" if False else "cat")
    one.set_adapter("both")
    losses.append(compiled(**inputs).loss)
    return {"losses": losses, "gradients": {n: p.grad for n, p in one.named_parameters()}}


@scenario("peft/lora_dropout_zero_with_checkpointing")
def run_checkpointing(run: Any) -> Any:
    one = adapted()
    one.enable_input_require_grads()
    one.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    return train(run, one.train(), batch())


@scenario("peft/compile_before_adapters")
def run_before(run: Any) -> Any:
    import peft

    base = model()
    for layer in base.model.layers if run.name else ():
        layer.compile(backend=run.name)
    name, settings = KINDS["lora"]
    torch.manual_seed(0)
    one = peft.get_peft_model(base, getattr(peft, name)(task_type="CAUSAL_LM", **settings))
    return train(type("Whole", (), {"compile": staticmethod(lambda m: m)}), one, batch())
