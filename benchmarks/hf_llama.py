"""Hugging Face Llama, one training step on CPU: eager, Inductor and mindspeed, interleaved.

python -m benchmarks.hf_llama [--rounds 9]
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import common

CASES = {"512": dict(layers=4, seq=512, batch=2, vocab=8192), "2048": dict(layers=2, seq=2048, batch=1, vocab=32768)}


def run(name: str, attention: str, rounds: int) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=case["layers"],
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=case["vocab"],
        max_position_embeddings=case["seq"],
        attn_implementation=attention,
    )
    model = LlamaForCausalLM(config)
    ids = torch.randint(0, case["vocab"], (case["batch"], case["seq"]))
    inputs = dict(input_ids=ids, labels=ids, use_cache=False)
    steps = common.rivals(model, inputs, lambda out: out.loss)
    common.race(f"HF Llama, attn_implementation={attention}, {case}", model, steps, rounds)


if __name__ == "__main__":
    options = common.arguments(rounds=9, case="all", attention="all")
    for case in CASES if options.case == "all" else [options.case]:
        for attention in ("eager", "sdpa") if options.attention == "all" else [options.attention]:
            run(case, attention, options.rounds)
