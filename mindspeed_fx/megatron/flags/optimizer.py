"""Optimizers and the types of what they keep."""

from __future__ import annotations

from argparse import Namespace

from mindspeed_fx.megatron.flags.flag import (
    MEGATRON,
    REFUSED,
    Flag,
    NotDone,
    rename,
    setting,
    switch,
    word,
)

AVERAGE = "remove it; Megatron keeps no average of the weights"
PRECISION = "remove it; Megatron's --use-precision-aware-optimizer takes types for what the optimizer keeps"


def _selection(args: Namespace) -> str:
    if args.optimizer_selection == "fused_ema_adamw":
        raise NotDone("Megatron keeps no average of the weights; use --optimizer-selection fused_adamw")
    return "Megatron's AdamW: the same step"


def _quintic(args: Namespace) -> str:
    if args.muon_coefficient_type != "quintic":
        raise NotDone("Megatron's coefficients are quintic; remove the flag")
    return "quintic, as Megatron has it"


def _scalar(args: Namespace) -> str:
    if args.muon_scalar_optimizer != "adam":
        raise NotDone("Megatron takes Adam for what is no matrix; remove the flag")
    return "Adam, as Megatron has it"


FLAGS = [
    word(
        "--optimizer-selection",
        "fused_adamw",
        MEGATRON,
        "whose AdamW steps; fused_ema_adamw also keeps an average of the weights",
        "Megatron's AdamW, the same step; an error for fused_ema_adamw",
        choices=("fused_adamw", "fused_torch_adamw", "fused_ema_adamw"),
        act=_selection,
    ),
    setting("--ema-decay", "--use-ema", 0.9999),
    switch("--use-ema", REFUSED, "an average of the weights is kept", AVERAGE),
    switch(
        "--muon-nesterov",
        MEGATRON,
        "Nesterov's momentum in Muon",
        "`--muon-use-nesterov`",
        act=rename("--muon-nesterov", "muon_use_nesterov"),
    ),
    word(
        "--muon-coefficient-type",
        "quintic",
        MEGATRON,
        "coefficients of Muon's iteration",
        "quintic is Megatron's; others are an error",
        act=_quintic,
    ),
    word(
        "--muon-scalar-optimizer",
        "adam",
        MEGATRON,
        "what steps what is no matrix",
        "adam is Megatron's; lion is an error",
        choices=("adam", "lion"),
        act=_scalar,
    ),
    switch("--quant-grads", REFUSED, "gradients in few bits", PRECISION),
    Flag("--quant-states", REFUSED, "optimizer states in few bits", PRECISION, type=str),
    switch("--o2-gradient", REFUSED, "gradients are added in bfloat16", PRECISION, llm=True),
    switch("--o2-optimizer", REFUSED, "Adam's moments in bfloat16", PRECISION, llm=True),
]
"""Rows of the table."""
