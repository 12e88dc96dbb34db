"""Tensor, context and data parallelism."""

from __future__ import annotations

import dataclasses
import os
from argparse import Namespace
from typing import Any

from mindspeed_fx.errors import OptionError
from mindspeed_fx.megatron import fsdp2_config, layerzero
from mindspeed_fx.megatron.flags.flag import (
    MEGATRON,
    OPTION,
    REFUSED,
    Flag,
    NotDone,
    get,
    number,
    rename,
    setting,
    switch,
    word,
)

CONTEXT = "mindspeed_fx.megatron.context_parallel reads it"
ALGORITHMS = (
    "ulysses_cp_algo",
    "megatron_cp_algo",
    "hybrid_cp_algo",
    "adaptive_cp_algo",
    "hybrid_adaptive_cp_algo",
    "kvallgather_cp_algo",
    "mamba_cp_algo",
)


def _context(args: Namespace) -> str:
    size = get(args, "context_parallel_size", 1) or 1
    return CONTEXT if size > 1 else "context parallel size 1: nothing to divide"


def _context_flag(name: str, default: Any, asks: str, **more: Any) -> Flag:
    """A flag of context parallelism: stored, and read where sequences are divided."""
    if default is False:
        return switch(name, OPTION, asks, CONTEXT, act=_context, **more)
    kind = more.pop("type", None) or type(default)
    return Flag(name, OPTION, asks, CONTEXT, type=kind, default=default, act=_context, **more)


def _share_experts(args: Namespace) -> str:
    """A tensor-parallel group holds whole experts: more expert parallelism, experts not divided."""
    tp, ep = get(args, "tensor_model_parallel_size", 1), get(args, "expert_model_parallel_size", 1)
    if get(args, "num_experts") and args.num_experts % (tp * ep):
        raise NotDone(f"{args.num_experts} experts do not divide over {tp} * {ep} ranks")
    args.expert_model_parallel_size, args.expert_tensor_parallel_size = tp * ep, 1
    return f"expert_model_parallel_size = {tp * ep}, expert_tensor_parallel_size = 1"


def _fsdp2(args: Namespace) -> str:
    if not get(args, "use_torch_fsdp2"):
        raise NotDone("its settings are those of --use-torch-fsdp2; give that too")
    try:
        settings = fsdp2_config.read(args.fsdp2_config_path)
    except OptionError as error:
        raise NotDone(str(error)) from None
    if settings.recompute_modules and get(args, "recompute_granularity"):
        raise NotDone("recompute_modules beside --recompute-granularity: both choose what is recomputed; remove one")
    if get(args, "torch_fsdp2_reshard_after_forward", True) is False:
        raise NotDone("its reshard_after_forward decides; remove --torch-fsdp2-no-reshard-after-forward")
    return f"fully_shard with {settings}"


def _two_dimensions(args: Namespace) -> str:
    x, y, tp = (get(args, name, 1) for name in ("tp_x", "tp_y", "tensor_model_parallel_size"))
    if x * y != tp or x < 1 or tp < 2:
        raise NotDone(f"--tp-x {x} times --tp-y {y} is not --tensor-model-parallel-size {tp} above 1")
    cp = get(args, "context_parallel_size", 1) or 1
    for name in ("num_experts", "multi_latent_attention", "mtp_num_layers", "sequence_parallel", "add_qkv_bias"):
        if get(args, name):
            raise NotDone(f"--{name.replace('_', '-')} beside it; remove one of the two")
    if get(args, "add_bias_linear"):
        raise NotDone("its linear layers have no bias; give --disable-bias-linear")
    if get(args, "normalization", "LayerNorm") != "RMSNorm" or get(args, "apply_layernorm_1p"):
        raise NotDone("its norms over divided rows are RMSNorm's; give --normalization RMSNorm")
    if (get(args, "save") or get(args, "load")) and get(args, "ckpt_format", "torch_dist") not in SAVED_IN_PARTS:
        raise NotDone(f"its weights are parts of their own; give --ckpt-format {' or '.join(SAVED_IN_PARTS)}")
    for name, parts in (("seq_length", x * y * cp), ("hidden_size", x * y), ("ffn_hidden_size", x * y)):
        if (get(args, name) or 0) % parts:
            raise NotDone(f"--{name.replace('_', '-')} {get(args, name)} does not divide over {parts} ranks")
    return f"{x} times {y} ranks"


def _layerzero(args: Namespace) -> str:
    if not get(args, "layerzero_config"):
        raise NotDone("its settings are those of a file; give --layerzero-config")
    if (get(args, "expert_model_parallel_size", 1) or 1) > 1:
        raise NotDone("--expert-model-parallel-size above 1 beside it: torch's FSDP2 in Megatron divides no experts")
    if get(args, "fp16"):
        raise NotDone("--fp16 beside it: torch's FSDP2 in Megatron scales no loss; give --bf16")
    for name in ("use_megatron_fsdp", "use_custom_fsdp", "use_torch_fsdp2", "fsdp2_config_path", "reuse_fp32_param"):
        if get(args, name):
            raise NotDone(f"--{name.replace('_', '-')} beside it; remove one of the two")
    if not get(args, "untie_embeddings_and_output_weights"):
        raise NotDone("tied weights would be gathered twice; give --untie-embeddings-and-output-weights")
    try:
        settings = layerzero.read(args.layerzero_config)
    except OptionError as error:
        raise NotDone(str(error)) from None
    tp, pp = (get(args, f"{name}_model_parallel_size", 1) or 1 for name in ("tensor", "pipeline"))
    ranks = get(args, "world_size", 1) // pp
    settings = dataclasses.replace(settings, sharding_size=max(1, min(settings.sharding_size, ranks) // tp))
    args.use_torch_fsdp2, args.mindspeed_layerzero, args.ckpt_format = True, dataclasses.asdict(settings), "torch_dist"
    args.use_distributed_optimizer = args.gradient_accumulation_fusion = False
    return f"use_torch_fsdp2 = True, fully_shard with {settings}"


def _allow_connections(args: Namespace) -> None:
    """Megatron asks for one with tensor parallelism, and refuses one for FSDP2."""
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)


FSDP = "remove it; Megatron's --use-distributed-optimizer and --use-megatron-fsdp divide states and weights"
SAVED_IN_PARTS = ("torch", "torch_dist")
ONE_DIMENSION = "remove it; --tensor-model-parallel-size with --sequence-parallel divides in one dimension"

FLAGS = [
    _context_flag(
        "--context-parallel-algo", "ulysses_cp_algo", "how attention sees divided sequences", choices=ALGORITHMS
    ),
    _context_flag("--ulysses-degree-in-cp", None, "ranks that exchange heads, in the hybrid algorithm", type=int),
    _context_flag("--cp-window-size", 1, "ranks of an inner ring"),
    _context_flag("--attention-mask-type", "causal", "the mask of ring attention", choices=("causal", "general")),
    _context_flag("--use-cp-send-recv-overlap", False, "sending and receiving in two groups at once"),
    _context_flag("--use-ulysses-allgather-kv", False, "keys and values are gathered, queries exchanged"),
    _context_flag("--use-fused-ring-attention-update", False, "one operator merges two parts of ring attention"),
    _context_flag("--megatron-cp-in-bnsd", False, "ring attention with heads before tokens"),
    _context_flag(
        "--context-parallel-kv-cache-policy",
        None,
        "keys (and values) of other ranks are kept for the backward",
        type=str,
        choices=("full", "half"),
    ),
    _context_flag("--context-parallel-cache-interval", 0, "in every how many layers they are kept"),
    _context_flag("--adaptive-cp-dynamic-attn-mask", False, "masks that change from batch to batch"),
    _context_flag("--adaptive-cp-manually-set-mask-list", False, "masks that the user sets"),
    _context_flag("--adaptive-cp-only-reschedule", False, "blocks are rescheduled, tokens stay"),
    _context_flag("--adaptive-cp-without-coarse", False, "the mask is read whole"),
    Flag(
        "--kv-head-repeat-before-uly-alltoall",
        OPTION,
        "heads of keys and values are repeated before they are exchanged",
        CONTEXT,
        action="store_true",
        default=True,
        act=_context,
        llm=True,
    ),
    switch(
        "--moe-tp-extend-ep",
        MEGATRON,
        "the ranks of a tensor-parallel group hold whole experts instead of parts of each",
        "expert parallel size times the tensor parallel size, `--expert-tensor-parallel-size 1`",
        act=_share_experts,
    ),
    switch(
        "--tp-2d",
        OPTION,
        "tensor parallelism in two dimensions",
        "weights in x times y parts, tokens in x and channels in y parts between layers, norms over divided rows; the "
        "values of tensor parallelism in one dimension; dense layers with RMSNorm and without biases, beside data "
        "and context parallelism and pipeline stages",
        act=_two_dimensions,
        shown_by="test_tp_2d.py::test_a_run_is_that_of_one_dimension",
        skip=True,
    ),
    setting("--tp-x", "--tp-2d", 1),
    setting("--tp-y", "--tp-2d", 1),
    setting("--enable-overlap-ag-with-matmul", "--tp-2d"),
    setting("--enable-overlap-matmul-with-rs", "--tp-2d"),
    setting("--enable-backward-overlap-ag-with-matmul", "--tp-2d"),
    switch("--use-nd-matmul", REFUSED, "tensor parallelism in several dimensions", ONE_DIMENSION, skip=True),
    setting("--nd1-dim1-size", "--use-nd-matmul", 1),
    setting("--nd2-dim1-size", "--use-nd-matmul", 1),
    switch(
        "--layerzero",
        OPTION,
        "weights gathered layer by layer",
        "torch's FSDP2 in Megatron (`--use-torch-fsdp2`) with zero3_size, transformer_layers, param_dtype, "
        "reduce_dtype and autocast_input of `--layerzero-config`, beside pipeline stages too; an error for "
        "ignored_modules, offload_grads and ckpt_load_path, with `--fp16` and expert ranks; states of the optimizer "
        "are divided as weights are",
        act=_layerzero,
        start=_allow_connections,
        shown_by="test_layerzero.py::test_a_file_of_all_settings",
        skip=True,
    ),
    setting("--layerzero-config", "--layerzero", None, str),
    switch("--enable-zero3", REFUSED, "weights divided over data-parallel ranks", FSDP, skip=True),
    word(
        fsdp2_config.FLAG,
        None,
        OPTION,
        "a YAML file of settings of torch's FSDP2",
        "sharding_size, sub_modules_to_wrap, reshard_after_forward, param_dtype, reduce_dtype, output_dtype, "
        "cast_forward_inputs, offload_to_cpu, pin_memory, num_to_forward_prefetch, ignored_modules and "
        "recompute_modules go to `fully_shard`; an error for another name or value, without `--use-torch-fsdp2`, and "
        "recompute_modules beside `--recompute-granularity`",
        act=_fsdp2,
        shown_by="test_fsdp2.py::test_settings_reach_fully_shard",
    ),
    switch(
        "--use-custom-fsdp",
        MEGATRON,
        "Megatron's FSDP under its name of before",
        "`--use-megatron-fsdp`",
        act=rename("--use-custom-fsdp", "use_megatron_fsdp"),
    ),
    switch(
        "--reset-bucket-group-order",
        MEGATRON,
        "parameters are gathered in the order of their use",
        "speed alone: Megatron's order of buckets stays",
        act=lambda args: "Megatron's order of buckets stays",
    ),
    number(
        "--param-and-grad-buffer-pad",
        None,
        REFUSED,
        "buffers of gradients are padded to multiples of this",
        "remove it; Megatron pads with --ddp-pad-buckets-for-high-nccl-busbw",
        skip=True,
    ),
    switch("--dist-train", REFUSED, "parts of a multimodal model on ranks of their own", "remove it"),
    switch(
        "--layerwise-disaggregated-training",
        REFUSED,
        "first and last layers on other machines than the rest",
        "remove it; --pipeline-model-parallel-layout places layers",
        llm=True,
    ),
]
"""Rows of the table."""
