"""Training steps of Hugging Face models on CPU: eager, Inductor and mindspeed, interleaved.

    python benchmarks/whole_models.py [--rounds 7] [--models llama,qwen3,gpt2,mixtral] [--attention eager,sdpa]

Two layers, hidden 512, batch 2, sequence 512, vocabulary 8192, float32. What is compiled returns the loss alone, as a
training loop needs it. The last lines are geometric means over the models.
"""

from __future__ import annotations

import logging
import math
import statistics
import warnings

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import common

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

LAYERS, HIDDEN, FFN, HEADS, KV_HEADS, VOCAB, SEQ, BATCH = 2, 512, 1408, 8, 4, 8192, 512, 2
LLAMA = dict(hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, vocab_size=VOCAB)
MODELS = {
    "llama": ("llama", LLAMA),
    "qwen3": ("qwen3", {**LLAMA, "head_dim": HIDDEN // HEADS}),
    "gemma2": ("gemma2", {**LLAMA, "head_dim": HIDDEN // HEADS, "sliding_window": 128}),
    "gpt2": ("gpt2", dict(n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, vocab_size=VOCAB, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)),
    "mixtral": ("mixtral", {**LLAMA, "num_local_experts": 4, "intermediate_size": 704}),
}


class LossOnly(torch.nn.Module):
    """What a training loop compiles: nothing but the loss leaves, so that the logits need not."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        return self.model(**inputs).loss


def compare(name: str, attention: str, rounds: int) -> tuple[float, float]:
    """(time, peak) of ours over Inductor's for one model."""
    kind, sizes = MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, pad_token_id=0), attn_implementation=attention)
    ids = torch.randint(0, VOCAB, (BATCH, SEQ))
    steps = common.rivals(LossOnly(model), dict(input_ids=ids, labels=ids, use_cache=False), lambda loss: loss)
    common.header(f"{name}, attention {attention}")
    times = common.interleaved(steps, rounds)
    peaks = {b: common.peak_bytes(step, common.gradient_bytes(model)) for b, step in steps.items()}
    common.table(times, peaks, "mindspeed")
    return statistics.median(times["mindspeed"]) / statistics.median(times["inductor"]), peaks["mindspeed"] / peaks["inductor"]


def main() -> None:
    args = common.arguments(rounds=7, models="llama,qwen3,gemma2,gpt2,mixtral", attention="eager,sdpa")
    for attention in args.attention.split(","):
        ratios = {name: compare(name, attention, args.rounds) for name in args.models.split(",")}
        mean = math.exp(statistics.mean(math.log(t) for t, _ in ratios.values()))
        print(f"attention {attention}: geometric mean of time {mean:.3f}, worst {max(t for t, _ in ratios.values()):.3f}, largest peak {max(p for _, p in ratios.values()):.3f} of Inductor's\n", flush=True)


if __name__ == "__main__":
    main()
