"""Optimizers and the types of what they keep."""

from __future__ import annotations

import importlib.util
from argparse import Namespace

from mindspeed_fx.megatron.flags.flag import (
    MEGATRON,
    OPTION,
    REFUSED,
    NotDone,
    get,
    number,
    rename,
    switch,
    word,
)
from mindspeed_fx.megatron.scaled_moments import BLOCKS

AVERAGE = "remove it; Megatron keeps no average of the weights"
NOT_BESIDE_AVERAGES = (
    "reuse_fp32_param",
    "swap_optimizer",
    "quant_states",
    "use_precision_aware_optimizer",
    "optimizer_cpu_offload",
)
NOT_BESIDE_SCALES = (
    "o2_optimizer",
    "swap_optimizer",
    "optimizer_cpu_offload",
    "use_torch_fsdp2",
    "use_megatron_fsdp",
    "layerzero",
)
GRADIENTS = "remove it; Megatron's --grad-reduce-in-bf16 keeps gradients in 2 bytes"


def _selection(args: Namespace) -> str:
    if args.optimizer_selection != "fused_ema_adamw":
        return "Megatron's AdamW: the same step"
    if not 0 <= get(args, "ema_decay", 0.9999) <= 1:
        raise NotDone(f"--ema-decay is {args.ema_decay}; valid: 0 to 1")
    if get(args, "optimizer", "adam") != "adam":
        raise NotDone(f"--optimizer {args.optimizer} is no AdamW; give --optimizer adam")
    for flag in NOT_BESIDE_AVERAGES:
        if get(args, flag):
            raise NotDone(f"--{flag.replace('_', '-')} keeps no average of the weights; remove one of the two")
    if (get(args, "save") or get(args, "load")) and get(args, "ckpt_format", "torch_dist") != "torch":
        raise NotDone("averages are saved by --ckpt-format torch; give it")
    return f"AdamW also keeps an average, decay {get(args, 'ema_decay', 0.9999)}; checkpoints have it as ema_model"


def _decay(args: Namespace) -> str:
    if get(args, "optimizer_selection") == "fused_ema_adamw":
        return "see --optimizer-selection"
    return "no effect without --optimizer-selection fused_ema_adamw"


def _narrow_gradients(args: Namespace) -> str:
    if not get(args, "bf16"):
        return "no effect without --bf16"
    if get(args, "gradient_accumulation_fusion"):
        raise NotDone("a fused gradient is added in float32; give --no-gradient-accumulation-fusion")
    args.grad_reduce_in_bf16 = True
    return "grad_reduce_in_bf16 = True"


def _narrow_moments(args: Namespace) -> str:
    if get(args, "optimizer", "adam") != "adam":
        raise NotDone(f"--optimizer {args.optimizer} has no such moments; give --optimizer adam")
    if get(args, "use_precision_aware_optimizer"):
        raise NotDone("--use-precision-aware-optimizer has types of its own for moments; remove one of the two")
    return "Adam's moments in bfloat16 between steps"


def _scale_moments(args: Namespace) -> str:
    form = args.quant_states
    if form not in BLOCKS:
        raise NotDone(f"--quant-states {form} is a type of the NPU's alone; give {' or '.join(BLOCKS)}")
    for flag in NOT_BESIDE_SCALES:
        if get(args, flag):
            raise NotDone(f"--{flag.replace('_', '-')} keeps moments in its own way; remove one of the two")
    _narrow_moments(args)
    return f"Adam's moments in 8 bits between steps, {BLOCKS[form]} with a scale"


def _coefficients(args: Namespace) -> str:
    kind = args.muon_coefficient_type
    if "muon" not in get(args, "optimizer", "adam"):
        return "no effect without --optimizer muon"
    if importlib.util.find_spec("emerging_optimizers") is not None and kind != "quintic":
        raise NotDone("Megatron's own Muon, by the package emerging_optimizers, has quintic alone; remove one of them")
    return f"{kind} coefficients of mindspeed_fx's Muon" if kind != "quintic" else "quintic, as Megatron has it"


def _scalar(args: Namespace) -> str:
    if args.muon_scalar_optimizer != "adam":
        raise NotDone("Megatron takes Adam for what is no matrix; remove the flag")
    return "Adam, as Megatron has it"


FLAGS = [
    word(
        "--optimizer-selection",
        "fused_adamw",
        OPTION,
        "whose AdamW steps; fused_ema_adamw also keeps an average of the weights",
        "the same step; fused_ema_adamw keeps the average and saves it with --ckpt-format torch",
        choices=("fused_adamw", "fused_torch_adamw", "fused_ema_adamw"),
        act=_selection,
        shown_by="test_averages.py::test_averages_follow_the_formula",
    ),
    number(
        "--ema-decay",
        0.9999,
        OPTION,
        "how much of the average stays in a step; less in the first steps",
        "of --optimizer-selection fused_ema_adamw",
        act=_decay,
        shown_by="test_averages.py::test_averages_follow_the_formula",
    ),
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
        OPTION,
        "coefficients of Muon's iteration",
        "those of mindspeed_fx's Muon, which stands for emerging_optimizers'; quintic is Megatron's",
        choices=("simple", "quintic", "polar_express", "aol"),
        act=_coefficients,
        shown_by="test_muon.py::test_newton_schulz_by_formula",
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
    switch("--quant-grads", REFUSED, "gradients in few bits", GRADIENTS),
    word(
        "--quant-states",
        None,
        OPTION,
        "Adam's moments in 8 bits: 6 bytes a main weight less",
        "Adam keeps them so between steps, with a scale for each 128 or 32, and steps in float32",
        choices=("fp8", "hif8", "mxfp8"),
        act=_scale_moments,
        shown_by="test_scaled_moments.py::test_a_step_is_adams_of_moments_that_are_rounded_behind_it",
    ),
    switch(
        "--o2-gradient",
        MEGATRON,
        "gradients are added in bfloat16: 2 bytes a weight less",
        "`--grad-reduce-in-bf16`",
        act=_narrow_gradients,
        llm=True,
    ),
    switch(
        "--o2-optimizer",
        OPTION,
        "Adam's moments in bfloat16: 4 bytes a main weight less",
        "Adam keeps its moments so between steps, and steps in float32",
        act=_narrow_moments,
        shown_by="test_moments_in_bfloat16",
        llm=True,
    ),
]
"""Rows of the table."""
