"""Training steps of whole models on CPU: eager, Inductor and mindspeed, interleaved.

    python -m benchmarks.whole_models [--rounds 7] [--models llama,qwen3,gpt2,mixtral,megatron_gpt,megatron_moe]
    [--attention eager,sdpa] [--seqs 512,2048] [--dtype float32] [--autocast bfloat16]
    [--alternatives eager,inductor,mindspeed]

Two layers, hidden 512, vocabulary 8192, weights of --dtype; two sequences of 512 tokens or one of 2048. What is
compiled returns the loss alone, as a training loop needs it. Hugging Face's models compute attention by hand ("eager")
or call SDPA; Megatron-core's compute it by hand. The last lines are geometric means over the models.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import statistics
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import common

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

LAYERS, HIDDEN, FFN, HEADS, KV_HEADS, VOCAB = 2, 512, 1408, 8, 4, 8192
EXPERTS, EXPERT_FFN = 4, 704
LLAMA = dict(
    hidden_size=HIDDEN,
    intermediate_size=FFN,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    vocab_size=VOCAB,
)
HUGGING_FACE = {
    "llama": ("llama", LLAMA),
    "qwen3": ("qwen3", {**LLAMA, "head_dim": HIDDEN // HEADS}),
    "gemma2": ("gemma2", {**LLAMA, "head_dim": HIDDEN // HEADS, "sliding_window": 128}),
    "gpt2": (
        "gpt2",
        dict(
            n_embd=HIDDEN,
            n_layer=LAYERS,
            n_head=HEADS,
            n_positions=2048,
            vocab_size=VOCAB,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        ),
    ),
    "mixtral": ("mixtral", {**LLAMA, "num_local_experts": EXPERTS, "intermediate_size": EXPERT_FFN}),
}
MEGATRON = {
    "megatron_gpt": {},
    "megatron_moe": dict(
        num_moe_experts=EXPERTS,
        moe_router_topk=2,
        moe_ffn_hidden_size=EXPERT_FFN,
        moe_router_load_balancing_type="none",
    ),
}


class Loss(torch.nn.Module):
    """What a training loop compiles: nothing but the loss leaves, so that the logits need not."""

    def __init__(self, model: torch.nn.Module, autocast: torch.dtype | None = None):
        super().__init__()
        self.model, self.autocast = model, autocast

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", self.autocast, enabled=self.autocast is not None):
            out = self.model(**inputs)
            return out.mean() if isinstance(out, torch.Tensor) else out.loss


def hugging_face(name: str, attention: str, ids: torch.Tensor) -> tuple[torch.nn.Module, dict[str, Any]]:
    kind, sizes = HUGGING_FACE[name]
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **sizes, pad_token_id=0), attn_implementation=attention
    )
    model.loss_type = "ForCausalLM"  # GPT-2's class names none; transformers warns, at which Dynamo breaks the graph
    return model, dict(input_ids=ids, labels=ids, use_cache=False)


def megatron(name: str, ids: torch.Tensor) -> tuple[torch.nn.Module, dict[str, Any]]:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    import mindspeed_fx.megatron_adaptor  # noqa: F401

    _one_rank()
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=KV_HEADS,
        ffn_hidden_size=FFN,
        use_cpu_initialization=True,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        attention_softmax_in_fp32=True,
        **MEGATRON[name],
    )
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", num_experts=config.num_moe_experts)
    model = GPTModel(
        config,
        spec,
        vocab_size=VOCAB,
        max_sequence_length=ids.shape[1],
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    return model, dict(
        input_ids=ids,
        position_ids=torch.arange(ids.shape[1]).expand_as(ids),
        attention_mask=None,
        labels=ids.roll(-1, 1),
    )


def _one_rank() -> None:
    from megatron.core import parallel_state

    if not dist.is_initialized():
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29556", RANK="0", WORLD_SIZE="1")
        dist.init_process_group("gloo")
        parallel_state.initialize_model_parallel()


def compare(name: str, attention: str, seq: int, args: argparse.Namespace) -> tuple[float, float]:
    """(time, peak) of ours over Inductor's for one model."""
    torch.manual_seed(0)
    ids = torch.randint(0, VOCAB, (max(1, 1024 // seq), seq))
    model, inputs = megatron(name, ids) if name in MEGATRON else hugging_face(name, attention, ids)
    model = model.to(getattr(torch, args.dtype))
    autocast = getattr(torch, args.autocast) if args.autocast else None
    steps = common.rivals(Loss(model, autocast), inputs, lambda loss: loss, names=args.alternatives.split(","))
    under = f" under autocast to {args.autocast}" if autocast else ""
    common.header(f"{name}, attention {attention}, {ids.shape[0]} x {seq} tokens, {args.dtype}{under}")
    times = common.interleaved(steps, args.rounds, args.warmup)
    peaks = {b: common.peak_bytes(step, common.gradient_bytes(model)) for b, step in steps.items()}
    common.table(times, peaks, "mindspeed")
    return statistics.median(times["mindspeed"]) / statistics.median(times["inductor"]), peaks["mindspeed"] / peaks[
        "inductor"
    ]


def summary(what: str, ratios: list[tuple[float, float]]) -> None:
    time, peak = zip(*ratios)
    mean = math.exp(statistics.mean(map(math.log, time)))
    print(
        f"{what}: geometric mean of time {mean:.3f}, worst {max(time):.3f}, largest peak {max(peak):.3f} of "
        "Inductor's\n",
        flush=True,
    )


def main() -> None:
    args = common.arguments(
        rounds=7,
        warmup=2,
        models="llama,qwen3,gpt2,mixtral,megatron_gpt,megatron_moe",
        attention="eager,sdpa",
        seqs="512,2048",
        dtype="float32",
        autocast="",
        alternatives="eager,inductor,mindspeed",
    )
    for attention in args.attention.split(","):
        names = [n for n in args.models.split(",") if attention == "eager" or n not in MEGATRON]
        results = []
        for seq in map(int, args.seqs.split(",")):
            ratios = [compare(name, attention, seq, args) for name in names]
            summary(f"attention {attention}, {seq} tokens", ratios)
            results += ratios
        summary(f"attention {attention}", results)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
