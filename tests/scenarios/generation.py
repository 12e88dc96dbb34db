"""``generate`` of transformers in its modes, with a compiled forward."""

from __future__ import annotations

from typing import Any

import torch

from tests.scenarios import configs
from tests.scenarios.table import scenario

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": dict(do_sample=True, temperature=0.8),
    "top_k_top_p": dict(do_sample=True, top_k=5, top_p=0.9),
    "min_p": dict(do_sample=True, min_p=0.05),
    "beams": dict(num_beams=3),
    "beam_sampling": dict(num_beams=3, do_sample=True),
    "several_sequences": dict(num_beams=4, num_return_sequences=2),
    "no_cache": dict(use_cache=False),
    "dynamic_cache": dict(cache_implementation="dynamic"),
    "static_cache": dict(cache_implementation="static"),
    "repetition_penalty": dict(repetition_penalty=1.3, no_repeat_ngram_size=2),
    "prompt_lookup": dict(prompt_lookup_num_tokens=3),
    "bad_words": dict(bad_words_ids=[[5], [7, 9]], min_new_tokens=4),
    "offloaded": dict(cache_implementation="offloaded"),
}
FAMILIES = {
    "sliding_cache/mistral": ("mistral", {}),
    "sliding_cache/gemma2": ("gemma2", {}),
    "sliding_cache/gemma3": ("gemma3_text", {}),
    "static_sliding_cache/gemma2": ("gemma2", dict(cache_implementation="static")),
    "family/gpt2": ("gpt2", {}),
    "family/opt": ("opt", {}),
    "family/bloom": ("bloom", {}),
    "family/qwen3_moe": ("qwen3_moe", {}),
    "family/mamba": ("mamba", {}),
    "family/deepseek_v3": ("deepseek_v3", {}),
}


def preload() -> None:
    import transformers  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401


def causal(kind: str = "llama") -> Any:
    from transformers import AutoModelForCausalLM

    config = configs.small(kind, use_cache=True)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)  # no two tokens alike
    model.generation_config.eos_token_id = None
    return model


def prompt(rows: int = 2, length: int = 6) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 100, (rows, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if rows > 1:
        mask[1, :2] = 0  # padded on the left
    return dict(input_ids=ids, attention_mask=mask)


def generate(run: Any, model: Any, inputs: dict[str, Any], **how: Any) -> Any:
    if run.name:
        model.forward = torch.compile(model.forward, backend=run.name)
    torch.manual_seed(5)
    how = dict(max_new_tokens=6, return_dict_in_generate=True, output_scores=True, pad_token_id=0) | how
    result = model.generate(**inputs, **how)
    return {"tokens": result.sequences, "scores": list(result.scores)}


@scenario("transformers/generate/{}", MODES)
def run_mode(run: Any, mode: str) -> Any:
    rows = 1 if mode == "prompt_lookup" else 2
    return generate(run, causal(), prompt(rows), **MODES[mode])


@scenario("transformers/generate/{}", FAMILIES)
def run_family(run: Any, name: str) -> Any:
    kind, how = FAMILIES[name]
    return generate(run, causal(kind), prompt(), max_new_tokens=12 if "sliding" in name else 6, **how)


@scenario("transformers/generate/assisted")
def run_assisted(run: Any) -> Any:
    assistant = causal()
    return generate(run, causal(), prompt(1), assistant_model=assistant)


@scenario("transformers/generate/compile_config/{}", ("llama", "gemma2", "qwen3_moe"))
def run_compile_config(run: Any, kind: str) -> Any:
    """The backend named in the generation's own configuration; on a CPU transformers asks for one setting more."""
    from transformers import CompileConfig

    model, how = causal(kind), {}
    if run.name:
        config = CompileConfig(backend=run.name, mode=None, fullgraph=False)
        config._compile_all_devices = True
        how = dict(compile_config=config)
    torch.manual_seed(5)
    result = model.generate(
        **prompt(),
        max_new_tokens=6,
        cache_implementation="static",
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **how,
    )
    return {"tokens": result.sequences, "scores": list(result.scores)}


@scenario("transformers/generate/seq2seq/{}", ("t5", "bart"))
def run_sequences(run: Any, kind: str) -> Any:
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_config(configs.small(kind, decoder_start_token_id=0, use_cache=True)).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.forced_eos_token_id = None
    return generate(run, model, prompt(), num_beams=2)


@scenario("transformers/generate/own_loop_with_static_cache")
def run_own_loop(run: Any) -> Any:
    from transformers import StaticCache

    model, inputs = causal(), prompt(1)
    step = run.compile(model)
    cache = StaticCache(config=model.config, max_cache_len=16)
    ids, logits, at = inputs["input_ids"], [], torch.arange(6)
    with torch.no_grad():
        for _ in range(4):
            out = step(input_ids=ids, past_key_values=cache, cache_position=at, position_ids=at[None], use_cache=True)
            logits.append(out.logits[:, -1])
            ids, at = logits[-1].argmax(-1, keepdim=True), at[-1:] + 1
    return logits


@scenario("transformers/generate/inference_mode_bfloat16")
def run_bfloat16(run: Any) -> Any:
    model, inputs = causal().bfloat16(), prompt()
    compiled = run.compile(model)
    with torch.inference_mode():
        return compiled(**inputs, use_cache=False).logits.clone()
