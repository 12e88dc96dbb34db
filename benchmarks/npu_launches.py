"""Kernels that a layer starts on an NPU, forward and backward: the graphs that torch_npu runs, with passes and without.

    python -m benchmarks.npu_launches [--models llama,qwen3,mixtral,deepseek_v3,qwen3_next,mamba,mamba2,falcon_h1,bamba]
        [--soc Ascend910B2]

Each model of Hugging Face is traced in bfloat16 through the real torch_npu, on fake tensors, with two depths; a layer
is the difference. Views start nothing. Counted, not run. Needs the tool chain (``mindspeed-fx toolchain install
torch_npu``).
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

import mindspeed_fx
from benchmarks import common

TOKENS = 512
WIDTHS = dict(hidden_size=512, intermediate_size=1024, num_attention_heads=8, vocab_size=4096)
STATE_SPACE = dict(mamba_n_heads=16, mamba_d_head=64, mamba_d_state=128, mamba_n_groups=1)
DENSE = dict(**WIDTHS, num_key_value_heads=4, head_dim=64)
MODELS: dict[str, tuple[str, dict[str, Any], tuple[int, int]]] = {
    "llama": ("Llama", DENSE, (2, 4)),
    "qwen3": ("Qwen3", DENSE, (2, 4)),
    "mixtral": ("Mixtral", dict(**DENSE, num_local_experts=8), (2, 4)),
    "deepseek_v3": (
        "DeepseekV3",
        dict(
            **WIDTHS,
            num_key_value_heads=8,
            moe_intermediate_size=512,
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            q_lora_rank=192,
            kv_lora_rank=128,
            qk_rope_head_dim=32,
            qk_nope_head_dim=64,
            v_head_dim=64,
            first_k_dense_replace=1,
        ),
        (2, 4),
    ),
    "qwen3_next": (
        "Qwen3Next",
        dict(
            **DENSE,
            linear_num_key_heads=4,
            linear_num_value_heads=8,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=256,
            shared_expert_intermediate_size=256,
            full_attention_interval=4,
        ),
        (4, 8),
    ),
    "mamba": ("Mamba", dict(hidden_size=512, vocab_size=4096), (2, 4)),
    "mamba2": ("Mamba2", dict(hidden_size=512, vocab_size=4096, num_heads=16, n_groups=1), (2, 4)),
    "falcon_h1": ("FalconH1", dict(**DENSE, **STATE_SPACE, mamba_d_ssm=1024), (2, 4)),
    "bamba": ("Bamba", dict(**DENSE, **STATE_SPACE, attn_layer_indices=[]), (2, 4)),
}
"""Name -> class, sizes, and two depths; three of four layers of Qwen3-Next are linear attention, so it has fours.
Layers of Bamba are state spaces here, those of Falcon-H1 have one beside attention."""


def build(name: str, layers: int) -> tuple[torch.nn.Module, torch.Tensor]:
    import transformers

    family, sizes, _ = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**sizes, num_hidden_layers=layers)
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16)
        return model, torch.zeros(1, TOKENS, dtype=torch.long)


def count(name: str, layers: int, soc: str) -> dict[str, tuple[int, int]]:
    """Direction -> kernels with the passes, and without."""
    model, ids = build(name, layers)
    report = mindspeed_fx.cross_compile(
        model, kwargs=dict(input_ids=ids, labels=ids, use_cache=False), soc=soc, kernels=False
    )
    totals = []
    for graphs in (report.graphs, report.values["unfused"]["graphs"]):
        sides = [(s["side"], s["cost"]["kernels"]) for g in graphs for s in g["sides"]]
        totals.append(
            {
                "backward": sum(n for side, n in sides if side == "backward"),
                "forward": sum(n for side, n in sides if side != "backward"),
            }
        )
    fused, unfused = totals
    return {side: (fused[side], unfused[side]) for side in ("forward", "backward")}


def main(names: list[str], soc: str) -> None:
    common.header(f"kernels started by one layer on {soc}, traced, not run; {TOKENS} tokens, bfloat16")
    print(f"{'model':<12} {'direction':<9} {'fused':>6} {'unfused':>8}  ratio")
    for name in names:
        depths = MODELS[name][2]
        few, many = (count(name, n, soc) for n in depths)
        both = [0.0, 0.0]
        for side in few:
            fused, unfused = ((many[side][i] - few[side][i]) / (depths[1] - depths[0]) for i in (0, 1))
            both = [both[0] + fused, both[1] + unfused]
            print(f"{name:<12} {side:<9} {fused:6.1f} {unfused:8.1f}  {fused / unfused:.2f}", flush=True)
        print(f"{name:<12} {'both':<9} {both[0]:6.1f} {both[1]:8.1f}  {both[0] / both[1]:.2f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--soc", default="Ascend910B2")
    options = parser.parse_args()
    main(options.models.split(","), options.soc)
