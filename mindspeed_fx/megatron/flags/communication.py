"""Communication: products beside collectives, pipeline messages, the settings of HCCL."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from mindspeed_fx.megatron.flags.flag import (
    COMPILER,
    MEGATRON,
    OPTION,
    REFUSED,
    NotDone,
    enable,
    get,
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
    return "enable_gloo_process_groups = False"


MOE = "speed alone: overlap.schedule orders the collectives of a captured layer"
HCCL = "remove it; HCCL_BUFFSIZE in the environment sets the size of all buffers"


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
        REFUSED,
        "the forward of one microbatch runs beside the backward of another",
        "remove it; Megatron's --overlap-moe-expert-parallel-comm needs Transformer Engine",
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
        "`--disable-gloo-process-groups`",
        act=_disable_gloo,
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
    word("--hccl-group-buffer", None, REFUSED, "sizes of HCCL's buffers by group", HCCL, skip=True),
    switch("--hccl-group-buffer-adaptive", REFUSED, "sizes of HCCL's buffers from the model", HCCL, skip=True),
    setting("--hccl-ep-group-buffer-adaptive-factor", "--hccl-group-buffer-adaptive", -1.0),
    word(
        "--hccl-op-mode",
        None,
        REFUSED,
        "how HCCL expands operators, by group",
        "remove it; HCCL_OP_EXPANSION_MODE in the environment sets it for all",
        skip=True,
    ),
    switch("--aiqos", REFUSED, "priorities of groups on the network", "remove it", skip=True),
    setting("--aiqos-enable-roce", "--aiqos"),
    setting("--aiqos-mode", "--aiqos", "auto"),
    setting("--aiqos-schedule", "--aiqos", None, str),
]
"""Rows of the table."""
