"""Names of before: their value goes to a flag of today."""

from __future__ import annotations

import dataclasses
from argparse import Namespace

from mindspeed_fx.megatron.flags.flag import MEGATRON, Flag, switch


def _rename(flag: str, attribute: str, asks: str, kind: type = int) -> Flag:
    """A name of before: its value goes to Megatron's flag."""
    source = f"deprecated_{flag.lstrip('-').replace('-', '_')}"

    def act(args: Namespace) -> str:
        setattr(args, attribute, getattr(args, source))
        return f"{attribute} = {getattr(args, attribute)}"

    answer = f"`--{attribute.replace('_', '-')}`"
    return Flag(flag, MEGATRON, asks, answer, type=kind, dest=source, act=act)


def _latent(args: Namespace) -> str:
    args.multi_latent_attention = True
    return "multi_latent_attention = True"


def _llm(flag: Flag) -> Flag:
    return dataclasses.replace(flag, llm=True)


FLAGS = [
    _rename("--qk-rope-head-dim", "qk_pos_emb_head_dim", "width of the rotated part of a head"),
    _rename("--qk-nope-head-dim", "qk_head_dim", "width of the other part of a head"),
    switch(
        "--multi-head-latent-attention",
        MEGATRON,
        "latent attention",
        "`--multi-latent-attention`",
        dest="deprecated_multi_head_latent_attention",
        act=_latent,
    ),
    _llm(_rename("--moe-intermediate-size", "moe_ffn_hidden_size", "width of an expert")),
    _llm(_rename("--n-group", "moe_router_num_groups", "groups of experts")),
    _llm(_rename("--topk-group", "moe_router_group_topk", "groups of a token")),
    _llm(_rename("--routed-scaling-factor", "moe_router_topk_scaling_factor", "scale of the router", float)),
    _rename("--rope-scaling-beta-fast", "beta_fast", "YaRN: rotations of the fast end"),
    _rename("--rope-scaling-beta-slow", "beta_slow", "YaRN: rotations of the slow end"),
    _rename("--yarn-scaling-factor", "rope_scaling_factor", "YaRN: by how much positions grow", float),
    _llm(_rename("--cp-attention-mask-type", "attention_mask_type", "the mask of ring attention", str)),
    _llm(
        switch(
            "--use-mc2",
            MEGATRON,
            "--use-ascend-mc2 under its name of before",
            "`--use-ascend-mc2`",
            dest="deprecated_use_mc2",
            act=lambda args: setattr(args, "use_ascend_mc2", True) or "use_ascend_mc2 = True",
        )
    ),
    _llm(
        switch(
            "--use-deter-comp",
            MEGATRON,
            "--npu-deterministic under its name of before",
            "`--npu-deterministic`",
            dest="deprecated_use_deter_comp",
            act=lambda args: setattr(args, "npu_deterministic", True) or "npu_deterministic = True",
        )
    ),
]
"""Rows that come first: they give their value to a flag of today."""
