"""Training steps on CPU of Hugging Face models with the dropout of their own defaults (0.1 on embeddings, attention
weights and what is added to the residual stream): eager, Inductor and mindspeed, interleaved.

    python -m benchmarks.dropout [--rounds 9] [--models bert,gpt2,bart,t5] [--seqs 512] [--dtype float32] [--clock wall]
    python -m benchmarks.dropout --models attention [--seqs 64,128,256,512,1024]

Three layers of 512 with eight heads (BART and T5: three on each side), vocabulary 8192; two sequences, of which the
second ends in padding. What is compiled returns the loss alone. "attention" is one attention with dropout by hand, 8
heads of 64 and 2048 tokens in all, bidirectional, with padding and causal; there "unfused" is mindspeed without
fusion.attention.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import common
from benchmarks.whole_models import Loss

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

LAYERS, HIDDEN, FFN, HEADS, VOCAB, P = 3, 512, 1536, 8, 8192, 0.1
SIDES = {
    f"{side}_{what}": size
    for side in ("encoder", "decoder")
    for what, size in (("layers", LAYERS), ("ffn_dim", FFN), ("attention_heads", HEADS))
}
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": (
        "MaskedLM",
        dict(
            hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
            max_position_embeddings=2048,
        ),
    ),
    "gpt2": ("CausalLM", dict(n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, n_positions=2048)),
    "bart": ("Seq2SeqLM", dict(d_model=HIDDEN, max_position_embeddings=2048, **SIDES)),
    "t5": (
        "Seq2SeqLM",
        dict(d_model=HIDDEN, d_ff=FFN, num_layers=LAYERS, num_heads=HEADS, d_kv=64, decoder_start_token_id=0),
    ),
}  # fmt: skip
UNFUSED, FUSED = {"disable": ["fusion.attention"]}, {"enable": ["fusion.attention"]}


class Attention(torch.nn.Module):
    """softmax, dropout and both products, as models write them out."""

    def __init__(self, causal: bool):
        super().__init__()
        self.causal = causal

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, padding: torch.Tensor | None = None
    ) -> torch.Tensor:
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if self.causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
        if padding is not None:
            scores = scores + padding
        return F.dropout(scores.softmax(-1), P) @ v


def model_of(name: str, seq: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    import transformers

    head, sizes = SIZES[name]
    config = transformers.AutoConfig.for_model(name, vocab_size=VOCAB, **sizes)
    model = getattr(transformers, f"AutoModelFor{head}").from_config(config)
    ids = torch.randint(5, VOCAB, (2, seq))
    mask = torch.ones(2, seq, dtype=torch.int64)
    mask[1, seq * 3 // 4 :] = 0
    return Loss(model).train(), {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def attentions(seq: int, dtype: torch.dtype) -> dict[str, tuple[torch.nn.Module, dict[str, torch.Tensor]]]:
    batch = max(1, 2048 // seq)
    qkv = {n: torch.randn(batch, HEADS, seq, 64, dtype=dtype).requires_grad_() for n in "qkv"}
    padding = torch.zeros(batch, 1, 1, seq, dtype=dtype)
    padding[-1, ..., seq * 3 // 4 :] = torch.finfo(dtype).min
    return {
        "bidirectional": (Attention(False), qkv),
        "padded": (Attention(False), {**qkv, "padding": padding}),
        "causal": (Attention(True), qkv),
    }


def main() -> None:
    args = common.arguments(rounds=9, models=",".join(SIZES), seqs="512", dtype="float32", clock="wall")
    dtype = getattr(torch, args.dtype)
    for name in args.models.split(","):
        for seq in map(int, args.seqs.split(",")):
            torch.manual_seed(0)
            if name == "attention":
                for kind, (module, inputs) in attentions(seq, dtype).items():
                    square = lambda out: out.float().square().mean()  # noqa: E731
                    steps = common.rivals(module, inputs, square, FUSED, dynamic=False)
                    steps["unfused"] = common.rivals(
                        module, inputs, square, UNFUSED, names=("mindspeed",), dynamic=False
                    )["mindspeed"]
                    common.race(
                        f"attention, {kind}, {seq} rows, {args.dtype}, {args.clock} time",
                        module, steps, args.rounds, clock=args.clock,
                    )  # fmt: skip
                continue
            model, inputs = model_of(name, seq)
            steps = common.rivals(model.to(dtype), inputs, lambda loss: loss)
            common.race(
                f"{name}, {seq} tokens, {args.dtype}, {args.clock} time", model, steps, args.rounds, clock=args.clock
            )


if __name__ == "__main__":
    main()
