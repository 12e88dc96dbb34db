"""One layer of Qwen3-Next, Falcon-H1, Bamba and DeepSeek-V3.2 on CPU, forward and backward: Inductor and mindspeed.

    python -m benchmarks.new_layers [--models qwen3_next,falcon_h1,bamba,deepseek_v32] [--rounds 5] [--seq 2048]
        [--clock wall] [--dtype float32] [--attention sdpa] [--alternatives inductor,mindspeed]

transformers' models of one layer: hidden 512; heads, states and keys as wide as the published models', in numbers that
keep their proportion to the hidden size; 8 experts, 2 for a token. They are given what would be embedded, and their
last hidden state has a gradient. Qwen3-Next's layer is a gated delta rule with experts, Falcon-H1's attention beside a
state space, Bamba's a state space, DeepSeek-V3.2's sparse attention with experts. Inductor compiles the delta rule's
unrolled chunks for minutes.
"""

from __future__ import annotations

import argparse
import logging
import math
import statistics
import warnings
from typing import Any

import torch
from transformers import AutoConfig, AutoModel

from benchmarks import common

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

HIDDEN = 512
EVERY = dict(hidden_size=HIDDEN, num_hidden_layers=1, vocab_size=16, pad_token_id=0, use_cache=False)
STATE_SPACE = dict(mamba_n_heads=16, mamba_d_head=64, mamba_d_state=128, num_attention_heads=8, num_key_value_heads=2)
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_next": dict(
        layer_types=["linear_attention"],
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        num_attention_heads=4,
        num_key_value_heads=1,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
    ),
    "falcon_h1": dict(**STATE_SPACE, mamba_d_ssm=1024, intermediate_size=1792, head_dim=64),
    "bamba": dict(**STATE_SPACE, intermediate_size=1792, attn_layer_indices=[]),
    "deepseek_v32": dict(
        num_attention_heads=8,
        num_key_value_heads=8,
        q_lora_rank=128,
        kv_lora_rank=512,
        index_n_heads=4,
        index_topk=256,
        mlp_layer_types=["sparse"],
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=256,
    ),
}
"""Model -> what its configuration says beside :data:`EVERY`."""


def compare(name: str, args: argparse.Namespace) -> tuple[float, float]:
    """(time, peak) of ours over Inductor's for one layer."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **EVERY, **MODELS[name])
    dtype = getattr(torch, args.dtype)
    model = AutoModel.from_config(config, attn_implementation=args.attention).to(dtype)
    grad = torch.randn(1, args.seq, HIDDEN, dtype=dtype)
    inputs = {"inputs_embeds": torch.randn(1, args.seq, HIDDEN, dtype=dtype, requires_grad=True)}
    names = args.alternatives.split(",")
    steps = common.rivals(model, inputs, lambda out: (out.last_hidden_state * grad).sum(), names=names)
    common.header(f"one layer of {name}, {args.seq} tokens, {args.dtype}, {args.clock} time")
    times = common.interleaved(steps, args.rounds, warmup=1, clock=args.clock)
    gradients = common.gradient_bytes(model)
    peaks = {backend: common.peak_bytes(step, gradients) for backend, step in steps.items()}
    common.table(times, peaks, "mindspeed")
    ours, other = (statistics.median(times[backend]) for backend in ("mindspeed", "inductor"))
    return ours / other, peaks["mindspeed"] / peaks["inductor"]


def main() -> None:
    args = common.arguments(
        models=",".join(MODELS),
        rounds=5,
        seq=2048,
        clock="wall",
        dtype="float32",
        attention="sdpa",
        alternatives="inductor,mindspeed",
    )
    ratios = [compare(name, args) for name in args.models.split(",")]
    times, peaks = zip(*ratios)
    mean = math.exp(statistics.mean(map(math.log, times)))
    print(f"geometric mean of time {mean:.3f}, worst {max(times):.3f}, largest peak {max(peaks):.3f} of Inductor's")


if __name__ == "__main__":
    main()
