"""Memory: recomputation, moving to host memory, leaner optimizer states."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from mindspeed_fx.megatron.flags import main_weights, swapped
from mindspeed_fx.megatron.flags.flag import (
    COMPILER,
    MEGATRON,
    OPTION,
    REFUSED,
    Flag,
    NotDone,
    count_layers,
    get,
    has_virtual_stages,
    number,
    setting,
    switch,
    word,
)

HOST = 'remove it, and give `MINDSPEED_FX_OPTIONS={"memory_budget": ..., "offload": true}` where memory is short'
BUDGET = 'remove it, and give `MINDSPEED_FX_OPTIONS={"memory_budget": ...}`, which plans what is made again'
STATES_ON_HOST = "remove it; Megatron's --optimizer-cpu-offload keeps optimizer states on the host"


def _first_layers(flag: str, attribute: str) -> Any:
    """An ``act`` for a number of layers."""

    def act(args: Namespace) -> str:
        count = get(args, attribute)
        if count is None or count >= count_layers(args):
            return "every layer"
        counted = "a pipeline rank" if get(args, "enable_recompute_layers_per_pp_rank") else "a stage"
        return f"the first {count} layers of {counted}, behind those that are recomputed whole"

    return act


def _per_rank(args: Namespace) -> str:
    """Layers to recompute, counted per rank: the same as per stage where a rank holds one."""
    if not has_virtual_stages(args):
        return "a rank holds one stage: the same number"
    if get(args, "recompute_granularity") == "full" and get(args, "recompute_method") != "block":
        raise NotDone("with virtual stages it counts layers one by one; give --recompute-method block")
    return "layer i of virtual stage s is number i v + s of v virtual stages"


def _zero_memory(args: Namespace) -> str:
    level = args.moe_zero_memory
    if get(args, "moe_token_dispatcher_type", "allgather") != "alltoall":
        raise NotDone("tokens are not exchanged one by one; give --moe-token-dispatcher-type alltoall")
    modules = getattr(args, "recompute_modules", None) or []
    modules = {modules} if isinstance(modules, str) else {*modules}
    repeated = sorted(modules & {"moe", "moe_act", "shared_experts"})
    if get(args, "recompute_granularity") == "selective" and repeated:
        raise NotDone(f"--recompute-modules {' '.join(repeated)} makes the same again; remove one of the two")
    if get(args, "recompute_granularity") == "full":
        return f"{level}, in layers that are not recomputed whole"
    return f"{level}: experts keep {'their first product' if level == 'level0' else 'nothing'} for the backward"


def _adaptive(args: Namespace) -> str:
    scale = get(args, "moe_adaptive_recompute_activation_scale", 2.0)
    if not get(args, "num_experts"):
        return "no effect without --num-experts"
    if scale <= 0:
        raise NotDone(f"--moe-adaptive-recompute-activation-scale {scale}: a number above 0 is expected")
    if get(args, "moe_zero_memory", "disable") != "disable":
        raise NotDone("--moe-zero-memory beside it, which makes the same again at every step; remove one of the two")
    return f"an expert with more than {scale} times its share of tokens makes its layer keep nothing for the backward"


def _zero_memory_layers(args: Namespace) -> str:
    if get(args, "moe_zero_memory", "disable") == "disable":
        raise NotDone("it counts layers of --moe-zero-memory level1; give that too")
    if args.moe_zero_memory == "level0":
        return "no effect: level0 is of all layers"
    return f"level1 in {args.moe_zero_memory_num_layers or 'all'} layers of a stage"


def _recompute_modules(args: Namespace) -> str:
    """Megatron's own recomputation of the up-projections of latent attention."""
    if get(args, "enable_mla_absorb") or get(args, "use_dsa_absorb"):
        return "no effect: absorbed up-projections are not made at all"
    if get(args, "recompute_granularity") == "full":
        return "whole layers are recomputed already"
    args.recompute_granularity = "selective"
    args.recompute_modules = sorted({*(getattr(args, "recompute_modules", None) or []), "mla_up_proj"})
    return f"recompute_granularity = selective, recompute_modules = {args.recompute_modules}"


FLAGS = [
    switch(
        "--recompute-activation-function",
        OPTION,
        "the activation of the MLP is made again in the backward",
        'option `recompute`: "activation_function"',
        act=lambda args: "recompute = activation_function",
        options=swapped.options,
    ),
    number(
        "--recompute-activation-function-num-layers",
        None,
        OPTION,
        "in that many layers alone",
        "the first layers of every stage, by module paths in option `recompute`",
        act=_first_layers("--recompute-activation-function-num-layers", "recompute_activation_function_num_layers"),
    ),
    switch(
        "--recompute-norm",
        OPTION,
        "norms are made again in the backward",
        'option `recompute`: "norm"',
        act=lambda args: "recompute = norm",
        options=swapped.options,
    ),
    number(
        "--recompute-norm-num-layers",
        None,
        OPTION,
        "in that many layers alone",
        "the first layers of every stage, by module paths in option `recompute`",
        act=_first_layers("--recompute-norm-num-layers", "recompute_norm_num_layers"),
    ),
    switch(
        "--enable-recompute-layers-per-pp-rank",
        MEGATRON,
        "--recompute-num-layers counts per rank, not per virtual stage",
        "the same without virtual stages; with them recompute_num_layers of each chunk, and method block alone",
        act=_per_rank,
        skip=True,
    ),
    switch(
        "--swap-attention",
        OPTION,
        "what attention saves waits in host memory until its backward",
        "options `offload`, `memory_budget` and `recompute` by module",
        act=swapped.swap_attention,
        options=swapped.options,
        skip=True,
    ),
    word(
        "--swap-modules",
        "input_norm,self_attention,post_attention_norm",
        OPTION,
        "which parts of a layer --swap-attention moves",
        "read by --swap-attention",
        act=lambda args: "read by --swap-attention",
    ),
    switch(
        "--recompute-mla-up-proj",
        MEGATRON,
        "the up-projections of latent attention are made again in the backward",
        "`--recompute-modules mla_up_proj`",
        act=_recompute_modules,
        llm=True,
    ),
    switch(
        "--smart-swap",
        OPTION,
        "what the device has no room for waits in host memory, by an allocator that watches it",
        "options `memory_budget` and `offload`: what the device has, less 2 GiB, weights, gradients and states of the "
        "optimizer, shared by the micro-batches in flight; or `memory_budget` of `MINDSPEED_FX_OPTIONS`, as "
        "MindSpeed's `target_memory`",
        act=swapped.plan_memory,
        options=swapped.options,
        skip=True,
    ),
    switch(
        "--swap-layer-input",
        OPTION,
        "inputs of layers wait in host memory",
        'option `recompute`: "offload_input" of every layer but the last of a rank, recomputed or not',
        act=swapped.swap_input,
        options=swapped.options,
        skip=True,
    ),
    switch(
        "--mla-swap-core-attn-out",
        OPTION,
        "outputs of latent attention wait in host memory",
        "option `recompute`: what the backward reads of core_attention is offloaded",
        act=swapped.swap_core,
        options=swapped.options,
        skip=True,
        llm=True,
    ),
    switch("--mla-zero-memory", REFUSED, "latent attention saves next to nothing", BUDGET, skip=True, llm=True),
    switch(
        "--adaptive-memory-optimization",
        OPTION,
        "what is made again and what is swapped, chosen by profiling",
        "as `--smart-swap`, planned by the cost model; nothing is profiled",
        act=swapped.plan_memory,
        options=swapped.options,
        skip=True,
    ),
    number(
        "--adaptive-recompute-device-size",
        -1,
        OPTION,
        "what is made again, chosen by profiling for a device of so many MiB",
        "option `memory_budget`: what that has room for, planned by the cost model; nothing is profiled",
        act=swapped.plan_memory,
        options=swapped.options,
        skip=True,
    ),
    switch(
        "--adaptive-recompute-device-swap",
        OPTION,
        "what is made again, chosen by profiling for the device, which swaps while that lasts",
        "option `memory_budget`: what the device has room for, planned by the cost model; nothing is profiled",
        act=swapped.plan_memory,
        options=swapped.options,
        skip=True,
    ),
    number(
        "--adaptive-recompute-profiling-step",
        10,
        COMPILER,
        "the step at which profiling ends",
        "nothing is profiled",
        act=lambda args: "no effect: nothing is profiled",
    ),
    switch(
        "--moe-adaptive-recompute-activation",
        OPTION,
        "layers of experts recomputed in steps in which one has many tokens",
        "such a layer keeps nothing for the backward; the same values; an eager layer decides by its own counts, a "
        "compiled chunk by those of its last call, with a graph for each way, and in the first such call stops and "
        "begins again (not with context parallelism, --overlap-param-gather, FSDP, --moe-fb-overlap or a loss of the "
        "router over all ranks)",
        act=_adaptive,
        skip=True,
    ),
    setting("--moe-adaptive-recompute-activation-scale", "--moe-adaptive-recompute-activation", 2.0),
    word(
        "--moe-zero-memory",
        "disable",
        OPTION,
        "permuted tokens and activations (level0), also exchanged tokens (level1) are made again in the backward",
        "experts keep their first product (level0) or nothing (level1), shared experts too; the same values; the "
        "dispatcher alltoall, and no recomputation of experts beside it",
        act=_zero_memory,
        choices=("disable", "level0", "level1"),
        skip=True,
    ),
    number(
        "--moe-zero-memory-num-layers",
        None,
        OPTION,
        "layers of level1 in a stage, the others are of level0",
        "read by --moe-zero-memory level1; 0 is all of them, as in MindSpeed",
        act=_zero_memory_layers,
    ),
    switch("--moe-unperm2-mem-optim-swap", REFUSED, "unpermuted tokens wait in host memory", HOST, skip=True),
    switch(
        "--reuse-fp32-param",
        OPTION,
        "16-bit weights and the rest of the float32 ones share one buffer",
        "16 bits are kept beside a bfloat16 weight, from which both make its float32 one for the step: 2 bytes a main "
        "weight less, the same values; an error with --fp16 and where others read main weights between steps",
        act=main_weights.reuse_weights,
        skip=True,
    ),
    switch(
        "--swap-optimizer",
        OPTION,
        "optimizer states wait in host memory",
        "main weights too; copied to the device and back by parts in the step, the same values; an error with "
        "--reuse-fp32-param, --async-save and where others hold main weights or states",
        act=main_weights.swap_states,
        skip=True,
    ),
    number(
        "--swap-optimizer-times",
        16,
        OPTION,
        "parts of a step of --swap-optimizer",
        "read by --swap-optimizer",
        act=main_weights.swap_times,
    ),
    Flag(
        "--virtual-optimizer",
        REFUSED,
        "optimizer states in virtual memory that the host backs",
        STATES_ON_HOST,
        nargs="+",
        type=str,
        skip=True,
    ),
    word("--compress-activation", "", REFUSED, "saved activations compressed without loss", BUDGET, skip=True),
    switch("--compress-optimizer", REFUSED, "optimizer states compressed without loss", STATES_ON_HOST, skip=True),
    word(
        "--compress-dense",
        "disable",
        REFUSED,
        "saved activations of dense layers compressed",
        BUDGET,
        choices=("disable", "level0", "level1"),
    ),
    switch("--attention-mask-on-cpu", REFUSED, "the mask stays on the host", "remove it", skip=True),
    word(
        "--loss-compute-mode",
        "default",
        COMPILER,
        "`chunk`: the loss in parts of the sequence, so that not all logits live at once",
        "fusion.linear_cross_entropy makes the logits in chunks by itself",
        choices=("default", "chunk"),
        act=lambda args: "linear and cross-entropy are one operator in chunks",
        llm=True,
    ),
    number(
        "--loss-chunk-size",
        1024,
        COMPILER,
        "tokens of a chunk of the loss",
        "fusion.linear_cross_entropy chooses its chunks",
        act=lambda args: "chosen by fusion.linear_cross_entropy",
        llm=True,
    ),
    switch(
        "--mtp-mem-efficient-logits",
        COMPILER,
        "the loss of multi-token prediction holds its logits for a shorter time",
        "the fused cross-entropy keeps no float32 copy of the logits",
        act=lambda args: "the fused cross-entropy keeps no float32 copy of the logits",
        llm=True,
    ),
    number("--output-layer-slice-num", 1, REFUSED, "the output layer in slices", "remove it", skip=True, llm=True),
]
"""Rows of the table."""
