"""Causal language models of transformers: dense, mixtures of experts, state spaces; two steps of training."""

from __future__ import annotations

from typing import Any

from tests.scenarios.steps import train
from tests.scenarios.table import scenario
from tests.zoo import architectures

DENSE = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neo", "gpt_neox", "gptj"),
    *("opt", "bloom", "falcon", "mpt", "phi", "phi3", "stablelm", "starcoder2", "olmo", "olmo2", "cohere", "cohere2"),
    *("granite", "glm", "glm4", "nemotron", "persimmon", "codegen", "gpt_bigcode", "xglm", "openai-gpt", "biogpt"),
    *("helium", "smollm3", "diffllama", "ernie4_5", "apertus", "seed_oss"),
)
MIXTURES = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "granitemoe", "gpt_oss", "dbrx"),
    *("hunyuan_v1_moe", "glm4_moe", "minimax"),
)
STATES = ("mamba", "mamba2", "falcon_mamba", "rwkv", "recurrent_gemma", "jamba", "bamba", "qwen3_next", "lfm2")


def preload() -> None:
    import transformers  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401


@scenario("transformers/causal/{}", DENSE)
@scenario("transformers/mixture/{}", MIXTURES)
@scenario("transformers/state_space/{}", STATES)
def run_causal(run: Any, kind: str) -> Any:
    try:
        model, inputs = architectures.build(kind, "sdpa")
    except ValueError:  # it has one of its own alone
        model, inputs = architectures.build(kind, "eager")
    return train(run, model, inputs)
