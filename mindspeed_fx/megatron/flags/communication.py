"""Communication: products beside collectives, pipeline messages, the settings of HCCL."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from mindspeed_fx.errors import OptionError
from mindspeed_fx.megatron.flags import group_options
from mindspeed_fx.megatron.flags.flag import (
    COMPILER,
    MEGATRON,
    OPTION,
    REFUSED,
    NotDone,
    enable,
    get,
    has_virtual_stages,
    number,
    setting,
    switch,
    word,
)


def _decompose(args: Namespace) -> str:
    if get(args, "use_ascend_mc2"):
        raise NotDone("--use-ascend-mc2 beside it: MindSpeed takes one of the two")
    return "overlap.decompose"


def _disable_gloo(args: Namespace) -> str:
    args.enable_gloo_process_groups = False
    text = "enable_gloo_process_groups = False"
    if not get(args, "use_distributed_optimizer") or get(args, "ckpt_format", "torch_dist") != "torch":
        return text
    size = get(args, "hccl_slice_size", 0)
    if size < 1:
        raise NotDone(f"--hccl-slice-size {size}: a number of weights from 1 is expected")
    return f"{text}; states of the optimizer are gathered {size} numbers of a rank at a time"


MOE = "speed alone: overlap.schedule orders the collectives of a captured layer"
HCCL = "options of the groups that Megatron makes on an NPU; no effect on other devices; traced, not run"


def _group_config(args: Namespace) -> dict[str, dict[str, int]]:
    try:
        return group_options.configurations(args)
    except OptionError as error:
        raise NotDone(str(error)) from None


def _group_buffer(args: Namespace) -> str:
    return group_options.describe(_group_config(args), "hccl_buffer_size")


def _adaptive_buffer(args: Namespace) -> str:
    missing = [name for name in ("seq_length", "micro_batch_size", "hidden_size") if not get(args, name)]
    if missing:
        raise NotDone(f"sizes of messages are not known; give --{', --'.join(missing).replace('_', '-')}")
    return _group_buffer(args)


def _op_mode(args: Namespace) -> str:
    return group_options.describe(_group_config(args), "hccl_op_expansion_mode")


def _forward_beside_backward(args: Namespace) -> str:
    if get(args, "overlap_moe_expert_parallel_comm"):
        raise NotDone("--overlap-moe-expert-parallel-comm beside it, Megatron's own way of eager layers; remove one")
    if get(args, "pipeline_model_parallel_size", 1) > 1 and not has_virtual_stages(args):
        raise NotDone(
            "with pipeline ranks it needs virtual stages; give --schedules-method dualpipev, or "
            "--num-layers-per-virtual-pipeline-stage"
        )
    return "a forward and a backward beside it take turns at the waits of their collectives"


def _order(args: Namespace) -> str:
    return MOE


def _coc_settings(args: Namespace) -> str:
    return (
        "overlap.decompose chooses the parts" if get(args, "use_ascend_coc") else "no effect without --use-ascend-coc"
    )


def _coc_options(args: Namespace) -> dict[str, Any]:
    return enable("overlap.decompose")(args)


FLAGS = [
    switch(
        "--use-ascend-coc",
        OPTION,
        "tensor-parallel products and collectives in parts, one beside the other",
        "pass overlap.decompose",
        act=_decompose,
        options=_coc_options,
    ),
    number(
        "--coc-parallel-num",
        1,
        OPTION,
        "how many parts",
        "overlap.decompose takes 2, 4, 8 or unequal parts, by the cost model; the number is no order",
        act=_coc_settings,
    ),
    switch(
        "--coc-fused-kernel",
        OPTION,
        "ATB's fused kernels instead of parts",
        "overlap.decompose, without ATB's kernels; the same values",
        act=_coc_settings,
    ),
    number(
        "--coc-mode",
        -1,
        OPTION,
        "off, in parts, or fused",
        "overlap.decompose; 0 leaves it to the cost model too",
        act=_coc_settings,
    ),
    switch(
        "--use-ascend-mc2",
        OPTION,
        "npu_all_gather_base_mm and npu_mm_reduce_scatter_base",
        "pass overlap.mc2 (target npu)",
        act=lambda args: "overlap.mc2",
        options=enable("overlap.mc2"),
    ),
    switch(
        "--moe-permutation-async-comm",
        COMPILER,
        "the dispatcher's collectives start early",
        "speed alone: overlap.schedule orders collectives of captured layers; others stay Megatron's",
        act=_order,
    ),
    switch(
        "--moe-allgather-overlap-comm",
        COMPILER,
        "experts compute beside the all-gather",
        "speed alone, as --moe-permutation-async-comm",
        act=_order,
    ),
    switch(
        "--moe-alltoall-overlap-comm",
        COMPILER,
        "router, shared experts and weight gradients compute beside the all-to-all",
        "speed alone, as --moe-permutation-async-comm",
        act=_order,
    ),
    switch(
        "--mla-up-proj-tp-overlap",
        COMPILER,
        "up-projections of latent attention beside tensor-parallel collectives",
        "speed alone: overlap.schedule orders collectives",
        act=lambda args: "speed alone: overlap.schedule orders collectives",
        llm=True,
    ),
    switch(
        "--moe-fb-overlap",
        OPTION,
        "the forward of one microbatch runs beside the backward of another",
        "compiled chunks take turns at the waits of their collectives, in DualPipeV's order, in Megatron's interleaved "
        'one and without pipeline; option `codegen="eager"`; the same values; eager chunks run one after the other',
        act=_forward_beside_backward,
        options=lambda args: {"codegen": "eager"},
        skip=True,
    ),
    switch(
        "--moe-alltoall-mc2",
        REFUSED,
        "all-to-all and grouped products in one kernel",
        "remove it; overlap.mc2_experts does it by itself for experts of a fixed capacity",
        skip=True,
    ),
    switch(
        "--moe-bmm-mc2",
        REFUSED,
        "all-to-all, all-gather and batched products in one kernel",
        "remove it; overlap.mc2_experts does it by itself for experts of a fixed capacity",
        skip=True,
    ),
    switch(
        "--disable-gloo-group",
        MEGATRON,
        "checkpoints are gathered without gloo groups",
        "`--disable-gloo-process-groups`; states of the distributed optimizer for `--ckpt-format torch` go through the "
        "device, `--hccl-slice-size` numbers of a rank at a time",
        act=_disable_gloo,
        skip=True,
    ),
    setting("--hccl-slice-size", "--disable-gloo-group", 10 * 1024 * 1024),
    switch(
        "--async-log-allreduce",
        MEGATRON,
        "the mean of the logged loss is not waited for",
        "speed alone: Megatron's own reduction of what it logs stays",
        act=lambda args: "Megatron's own reduction stays",
    ),
    *(
        switch(
            name,
            MEGATRON,
            "messages between stages in two groups at once",
            "speed alone: Megatron's messages stay, which it overlaps with virtual stages",
            act=lambda args: "Megatron's messages between stages stay",
        )
        for name in ("--optimize-send-recv-comm", "--optimize-vpp-send-recv-comm")
    ),
    word(
        "--hccl-group-buffer",
        None,
        OPTION,
        "MiB of HCCL's buffers by group, as in dp:200;tp:300",
        HCCL,
        act=_group_buffer,
    ),
    switch(
        "--hccl-group-buffer-adaptive",
        OPTION,
        "MiB of HCCL's buffers from the model",
        f"the largest message of a group; {HCCL}",
        act=_adaptive_buffer,
        skip=True,
    ),
    number(
        "--hccl-ep-group-buffer-adaptive-factor",
        -1.0,
        OPTION,
        "how many times the tokens of balanced experts a rank gets",
        "read by --hccl-group-buffer-adaptive; below 0: 200 MiB",
        act=lambda args: "read by --hccl-group-buffer-adaptive",
    ),
    word(
        "--hccl-op-mode",
        None,
        OPTION,
        "how HCCL expands operators, by group, as in cp:2;ep:2",
        HCCL,
        act=_op_mode,
    ),
    switch("--aiqos", REFUSED, "priorities of groups on the network", "remove it", skip=True),
    setting("--aiqos-enable-roce", "--aiqos"),
    setting("--aiqos-mode", "--aiqos", "auto"),
    setting("--aiqos-schedule", "--aiqos", None, str),
]
"""Rows of the table."""
