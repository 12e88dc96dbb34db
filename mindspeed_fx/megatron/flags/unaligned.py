"""``--unaligned-linear``: what :mod:`mindspeed_fx.megatron.uneven` does, and what it does not go together with."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from mindspeed_fx.megatron.flags.flag import OPTION, NotDone, get, switch

NAME = "--unaligned-linear"
BESIDE = (
    ("num_experts", "experts"),
    ("multi_latent_attention", "latent attention"),
    ("mtp_num_layers", "multi-token prediction"),
    ("full_attention_interval", "delta nets"),
    ("experimental_attention_variant", "other attention than Megatron's own"),
)
"""Arguments of models whose parts are not divided so; MindSpeed's are not either."""


def _act(args: Namespace) -> str:
    ranks = get(args, "tensor_model_parallel_size", 1) or 1
    uneven = _uneven_sizes(args, ranks)
    if not uneven:
        return f"heads, widths and tokens divide by {ranks} tensor-parallel ranks: nothing to do"
    for name, what in BESIDE:
        if get(args, name):
            raise NotDone(f"{what} beside it: parts are equal there; give a --tensor-model-parallel-size that divides")
    if (get(args, "context_parallel_size", 1) or 1) > 1:
        raise NotDone("context parallelism beside it divides heads and tokens evenly; give --context-parallel-size 1")
    if get(args, "use_ascend_mc2"):
        raise NotDone("--use-ascend-mc2 beside it: MindSpeed takes one of the two")
    if (get(args, "save") or get(args, "load")) and get(args, "ckpt_format", "torch_dist") != "torch":
        raise NotDone("torch_dist describes a weight as equal parts; give --ckpt-format torch")
    _check_groups(args, ranks)
    return f"{', '.join(uneven)}: the first of {ranks} tensor-parallel ranks hold one unit more each"


def _uneven_sizes(args: Namespace, ranks: int) -> list[str]:
    """What ranks cannot share evenly, in words."""
    groups, heads, width = _groups(args), args.num_attention_heads, _width(args)
    sizes = {f"{groups} query groups": groups, f"{heads} heads": heads, f"a width of {width} in the MLP": width}
    if get(args, "sequence_parallel"):
        sizes[f"{args.seq_length} tokens"] = args.seq_length
    return [text for text, size in sizes.items() if size % ranks]


def _width(args: Namespace) -> int:
    """Of the MLP; Megatron's default is known after the flags have acted."""
    wide = 4 * args.hidden_size
    return get(args, "ffn_hidden_size") or (int(wide * 2 / 3 / 64) * 64 if get(args, "swiglu") else wide)


def _groups(args: Namespace) -> int:
    return (get(args, "group_query_attention") and get(args, "num_query_groups")) or args.num_attention_heads


def _check_groups(args: Namespace, ranks: int) -> None:
    groups, heads = _groups(args), args.num_attention_heads
    if groups < ranks and (heads % ranks or ranks % groups):
        raise NotDone(
            f"of {ranks} tensor-parallel ranks some would have none of {groups} query groups; give a "
            "--tensor-model-parallel-size that is not larger"
        )


def _start(args: Namespace) -> None:
    from mindspeed_fx.megatron import uneven

    uneven.allow(args.seq_length)


def _options(args: Namespace) -> dict[str, Any]:
    from mindspeed_fx.megatron import uneven

    ranks = get(args, "tensor_model_parallel_size", 1) or 1
    return uneven.OPTIONS if ranks > 1 and _uneven_sizes(args, ranks) else {}


FLAGS = [
    switch(
        NAME,
        OPTION,
        "heads, widths and tokens that tensor-parallel ranks do not share evenly",
        "query groups with their heads, channels of the MLP and tokens of sequence parallelism by parts that differ by "
        "one, collectives in the program's order; the vocabulary is padded as ever; an error with experts, latent "
        "attention, multi-token prediction, context parallelism or a torch_dist checkpoint",
        act=_act,
        start=_start,
        options=_options,
    ),
]
"""Rows of the table."""
