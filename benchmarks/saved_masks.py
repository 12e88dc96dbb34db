"""Training steps of models with dropout and relus on CPU: Inductor, mindspeed, and mindspeed whose masks stay bools.

    python -m benchmarks.saved_masks [--rounds 11] [--models bert,gpt2,opt,t5] [--dtypes float32,bfloat16]

Two layers, hidden 512, four sequences of 256 tokens, dropout as the models' configurations have it (0.1). Processor
seconds of one thread, interleaved, compilation apart. Ratios are to the step with `lowering.saved_masks`.
"""

from __future__ import annotations

import argparse
import logging
import warnings

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from benchmarks import common

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

VOCAB, TOKENS = 4096, (4, 256)
MODELS = {
    "bert": (
        AutoModelForMaskedLM,
        dict(hidden_size=512, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=8),
    ),
    "gpt2": (AutoModelForCausalLM, dict(n_embd=512, n_layer=2, n_head=8)),
    "opt": (
        AutoModelForCausalLM,
        dict(hidden_size=512, word_embed_proj_dim=512, ffn_dim=2048, num_hidden_layers=2, num_attention_heads=8),
    ),
    "t5": (AutoModelForSeq2SeqLM, dict(d_model=512, d_kv=64, d_ff=2048, num_layers=2, num_heads=8)),
}
VARIANTS = {
    "inductor": dict(backend="inductor"),
    "bools": dict(backend="mindspeed", options={"disable": ["lowering.saved_masks"]}),
    "mindspeed": dict(backend="mindspeed"),
}


def compare(kind: str, dtype: torch.dtype, rounds: int) -> None:
    torch.manual_seed(0)
    make, sizes = MODELS[kind]
    config = AutoConfig.for_model(kind, vocab_size=VOCAB, pad_token_id=0, decoder_start_token_id=0, **sizes)
    model = make.from_config(config).to(dtype).train()
    ids = torch.randint(2, VOCAB, TOKENS)
    inputs = dict(input_ids=ids, labels=ids) | ({} if kind == "bert" else dict(use_cache=False))
    steps = {}
    for name, how in VARIANTS.items():
        torch._dynamo.reset()
        steps[name] = common.training_step(model, torch.compile(model, **how), inputs, lambda out: out.loss)
        steps[name]()
    common.race(f"{kind}, {TOKENS[0]} x {TOKENS[1]} tokens, {dtype}", model, steps, rounds, clock="processor")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--dtypes", default="float32,bfloat16")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for kind in args.models.split(","):
        for dtype in args.dtypes.split(","):
            compare(kind, getattr(torch, dtype), args.rounds)


if __name__ == "__main__":
    main()
