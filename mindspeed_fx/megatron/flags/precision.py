"""Eight bits and less: products, training with quantization, distillation."""

from __future__ import annotations

from argparse import Namespace

from mindspeed_fx.megatron import missing
from mindspeed_fx.megatron.flags.flag import OPTION, REFUSED, Flag, NotDone, added, setting, switch, word
from mindspeed_fx.megatron.fp8_linears import VALID

EIGHT = f"needs TransformerEngine; use {VALID}, or --bf16 alone"
QUANTIZED = "train with --bf16: remove it"


def _squares(args: Namespace) -> str:
    if missing.has_transformer_engine():
        raise NotDone("TransformerEngine, which is installed, has no such recipe; use --fp8-recipe mxfp8")
    return "linears of layers are mindspeed::linear_fp8, for which --fp8-format is e4m3"


FLAGS = [
    added("--fp8-format", "hif8", REFUSED, "products in HiF8", EIGHT, dest="fp8"),
    added("--fp8-recipe", "groupwise", REFUSED, "how products in 8 bits are scaled", EIGHT),
    added(
        "--fp8-recipe",
        "mxfp8-32x32",
        OPTION,
        "scales of 32 numbers, of 32 x 32 of a weight",
        "with --fp8-format e4m3 linears of layers (mindspeed::linear_fp8)",
        act=_squares,
        shown_by="test_fp8_linears.py::test_linears_of_layers_and_no_others",
    ),
    switch("--fp8-reuse-quantized-weight", REFUSED, "weights in 8 bits are kept over microbatches", EIGHT),
    Flag(
        "--no-use-gmm-fp8",
        REFUSED,
        "grouped products stay in 16 bits",
        "remove it: products are in 16 bits without --fp8-format",
        action="store_false",
        default=True,
        dest="use_gmm_fp8",
        skip=True,
    ),
    switch("--te-comparison-with-bf16", REFUSED, "products in 8 bits are compared with 16 bits", EIGHT),
    switch("--te-comparison-with-cpu", REFUSED, "products in 8 bits are compared with the host's", EIGHT),
    word(
        "--te-gmm-mode",
        "compatible",
        REFUSED,
        "how grouped products in 8 bits are called",
        EIGHT,
        choices=("performance", "compatible"),
    ),
    word("--qat-scheme", None, REFUSED, "training as if weights had few bits", QUANTIZED),
    setting("--qat-quant-block-size", "--qat-scheme", None, int),
    switch("--qad-enable", REFUSED, "distillation of a quantized model", QUANTIZED),
    Flag(
        "--no-qad-enable",
        REFUSED,
        "a setting of `--qad-enable`",
        "what becomes of `--qad-enable`; without that flag it has no effect",
        action="store_false",
        default=False,
        dest="qad_enable",
        of="--qad-enable",
    ),
    setting("--qad-teacher-load", "--qad-enable", ""),
    setting("--kl-loss-reduction", "--qad-enable", "mean", choices=("mean", "sum")),
    setting("--kl-loss-weight", "--qad-enable", 1.0),
    setting("--kl-temperature", "--qad-enable", 1.0),
]
"""Rows of the table."""
