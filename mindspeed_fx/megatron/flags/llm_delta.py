"""MindSpeed-LLM's layers of Qwen3-Next: gated delta nets, and attention with a gated output in every N-th layer.

They are Megatron-core's ``experimental_attention_variant="gated_delta_net"`` with ``attention_output_gate``, whose
projections hold the same rows in another order; ``megatron.model_parts`` changes what starts or rounds differently.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from mindspeed_fx.megatron.flags.flag import MEGATRON, OPTION, Flag, NotDone, get, setting, switch

INTERVAL = "--full-attention-interval"
VARIANT = "gated_delta_net"


def _interval(args: Namespace) -> str:
    _refuse_beside(args)
    args.experimental_attention_variant, args.attention_output_gate = VARIANT, True
    args.linear_attention_freq = args.full_attention_interval
    args.linear_conv_kernel_dim = get(args, "mamba_d_conv", 4)
    return (
        f"experimental_attention_variant = {VARIANT}, linear_attention_freq = {args.linear_attention_freq}, "
        f"linear_conv_kernel_dim = {args.linear_conv_kernel_dim}, attention_output_gate = True; norms of delta nets "
        "have no offset, and the kernel chooses its chunks"
    )


def _refuse_beside(args: Namespace) -> None:
    """Raises for what MindSpeed-LLM's delta nets do not run beside, or Megatron's compute otherwise."""
    if get(args, "experimental_attention_variant") not in (None, VARIANT):
        raise NotDone(f"--experimental-attention-variant {args.experimental_attention_variant} asks for other layers")
    for name in ("tensor_model_parallel_size", "context_parallel_size"):
        if get(args, name, 1) > 1:
            raise NotDone(f"a delta net has all heads and tokens on one rank; give --{name.replace('_', '-')} 1")
    if get(args, "multi_latent_attention"):
        raise NotDone("latent attention has no gate; remove --multi-latent-attention")
    if get(args, "mtp_num_layers"):
        raise NotDone("layers of multi-token prediction are not built beside delta nets; remove --mtp-num-layers")
    if get(args, "noop_layers"):
        raise NotDone("layers that do nothing are left out here, and would be counted; remove --noop-layers")
    if not get(args, "swiglu"):
        raise NotDone("Megatron's delta nets have the activation of the MLP, MindSpeed-LLM's SiLU; give --swiglu")


def _three_projections(args: Namespace) -> str:
    if not get(args, "full_attention_interval"):
        raise NotDone(f"attention has three projections with {INTERVAL} alone, and none without it; remove the flag")
    return "one projection holds the rows of the three"


def _wide_norms(args: Namespace) -> str:
    if get(args, "normalization", "LayerNorm") != "RMSNorm":
        return "no effect without --normalization RMSNorm"
    if not get(args, "add_rmsnorm_offset"):
        return "norms multiply in float32"
    return "norms add their offset and multiply in float32"


def _setting(name: str, default: Any = False, kind: Any = None) -> Flag:
    return setting(name, INTERVAL, default, kind, llm=True)


FLAGS = [
    Flag(
        INTERVAL,
        OPTION,
        "every so many layers one of attention with a gated output, delta nets between",
        "`--experimental-attention-variant gated_delta_net --linear-attention-freq N --attention-output-gate`; weights "
        "lie as Megatron's; an error with tensor or context parallelism, where MindSpeed-LLM has none either",
        type=int,
        default=0,
        act=_interval,
        shown_by="test_delta_nets.py::test_a_layer_by_formula",
        llm=True,
    ),
    _setting("--use-triton-gdn"),
    _setting("--mamba-chunk-size", 256, int),
    _setting("--mamba-d-conv", 4, int),
    _setting("--mamba-d-ssm", None, int),
    _setting("--mamba-expand", 1, int),
    switch(
        "--no-enable-linear-qkv",
        MEGATRON,
        "queries, keys and values by three projections",
        f"one projection of the same rows, beside {INTERVAL}; an error without it",
        act=_three_projections,
        llm=True,
    ),
    switch(
        "--rmsnorm-weight-in-fp32",
        OPTION,
        "norms multiply by their weights in float32",
        "so, the offset of --add-rmsnorm-offset included; the weights keep their type, as in MindSpeed-LLM",
        act=_wide_norms,
        shown_by="test_delta_nets.py::test_norms_multiply_in_float32",
        llm=True,
    ),
]
"""Rows of the table."""
