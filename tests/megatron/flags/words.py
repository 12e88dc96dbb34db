"""Arguments of a script, parsed without Megatron-LM: MindSpeed's flags by our parser, Megatron's as they stand."""

from __future__ import annotations

import argparse
import functools

from mindspeed_fx.megatron.flags import add_arguments, parser

MEGATRON = dict(
    num_layers=4,
    hidden_size=64,
    num_attention_heads=4,
    ffn_hidden_size=256,
    kv_channels=None,
    seq_length=32,
    micro_batch_size=None,
    sequence_parallel=False,
    max_position_embeddings=32,
    init_method_std=0.02,
    init_method_xavier_uniform=False,
    swiglu=False,
    bias_gelu_fusion=True,
    rotary_base=10000,
    rotary_percent=1.0,
    rope_type=None,
    rope_scaling_factor=8.0,
    use_rope_scaling=False,
    multi_latent_attention=False,
    spec=None,
    num_experts=None,
    moe_layer_freq=1,
    moe_ffn_hidden_size=None,
    moe_shared_expert_intermediate_size=None,
    moe_router_load_balancing_type="aux_loss",
    moe_router_score_function="softmax",
    moe_router_topk=2,
    moe_router_pre_softmax=False,
    moe_router_num_groups=None,
    moe_router_group_topk=None,
    moe_router_topk_scaling_factor=None,
    moe_router_enable_expert_bias=False,
    moe_expert_capacity_factor=None,
    moe_aux_loss_coeff=0.0,
    moe_token_dispatcher_type="allgather",
    tensor_model_parallel_size=1,
    pipeline_model_parallel_size=1,
    context_parallel_size=1,
    expert_model_parallel_size=1,
    expert_tensor_parallel_size=None,
    num_layers_per_virtual_pipeline_stage=None,
    num_virtual_stages_per_pipeline_rank=None,
    mtp_num_layers=None,
    recompute_granularity=None,
    recompute_modules=None,
    window_attn_skip_freq=None,
    no_rope_freq=None,
    profile_ranks=[0],
    yaml_cfg=None,
)
"""The arguments of Megatron's parser that flags read, with its defaults and a small model."""


@functools.cache
def our_parser() -> argparse.ArgumentParser:
    return add_arguments(parser._Parser(allow_abbrev=False))


def parse(words: list[str]) -> argparse.Namespace:
    args, rest = our_parser().parse_known_args(words)
    parser._guess(args, rest)
    for name, value in MEGATRON.items():
        if getattr(args, name, None) is None:
            setattr(args, name, list(value) if isinstance(value, list) else value)
    return args
