"""Fused operators and the attention kernel: the compiler recognizes what these flags would switch on."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from mindspeed_fx.megatron.flags.flag import (
    COMPILER,
    OPTION,
    REFUSED,
    Flag,
    NotDone,
    added,
    get,
    number,
    switch,
    word,
)


def _fused(name: str, asks: str, fusion: str, **more: Any) -> Flag:
    """A switch for what a fusion finds in the graph by itself."""
    answer = f"{fusion} finds it in the graph, with the flag or without (level 1 and up)"
    return switch(name, COMPILER, asks, answer, act=lambda args: f"{fusion} finds it in the graph", **more)


def _kernel(name: str, asks: str, **more: Any) -> Flag:
    """A switch for how the attention kernel of an NPU is called."""
    answer = "how attention is called is chosen where it is lowered; the values are the same"
    return switch(name, COMPILER, asks, answer, act=lambda args: "chosen where attention is lowered", **more)


def _sparse_mode(args: Namespace) -> str:
    if args.sparse_mode in (0, 2, 3):
        return "the mask is read from the graph"
    raise NotDone(f"mode {args.sparse_mode} is another mask than the model's causal one; modes 0, 2 and 3 are causal")


def _pre_tokens(args: Namespace) -> str:
    if get(args, "seq_length") and args.pre_tockens < args.seq_length:
        raise NotDone(f"{args.pre_tockens} is a window; give Megatron's `--window-size {args.pre_tockens},0`")
    return "every earlier token is in reach: the causal mask"


def _next_tokens(args: Namespace) -> str:
    if args.next_tockens:
        raise NotDone("a causal model sees no later token; remove the flag")
    return "no later token is seen: the causal mask"


def _alibi(args: Namespace) -> str:
    if get(args, "multi_latent_attention"):
        raise NotDone("latent attention has its own positions; remove --position-embedding-type alibi")
    args.position_embedding_type, args.alibi = "none", True
    return "slopes times distances are added to the scores"


def _alibi_form(args: Namespace) -> str:
    return "the same values" if get(args, "alibi") else "no effect without --position-embedding-type alibi"


def _alibi_type(args: Namespace) -> str:
    if not get(args, "alibi"):
        return "no effect without --position-embedding-type alibi"
    if args.alibi_fusion_attn_type in (None, 0, 2):
        return "the same values"
    raise NotDone(f"{args.alibi_fusion_attn_type} is another bias, m sqrt(|i - j|), or none; valid: 0, 2")


def _fuse_expert_gradients(args: Namespace) -> str:
    if not get(args, "num_experts"):
        return "no effect without experts"
    if not get(args, "moe_grouped_gemm"):
        raise NotDone("it is about grouped products, as in MindSpeed; give --moe-grouped-gemm")
    return "the experts' gradients are added to main_grad in float32"


def _fix_router(args: Namespace) -> str:
    if not get(args, "num_experts"):
        return "no effect without experts"
    if get(args, "moe_expert_capacity_factor"):
        raise NotDone("experts in turn are full alike; remove --moe-expert-capacity-factor")
    return "tokens go to experts in turn; losses mean nothing"


def _fix_documents(args: Namespace) -> str:
    if not get(args, "reset_attention_mask"):
        return "no effect without --reset-attention-mask"
    if not 0 < args.fix_sub_seq_length <= get(args, "seq_length", args.fix_sub_seq_length):
        return "no effect outside 1 to --seq-length"
    return f"documents of {args.fix_sub_seq_length} tokens; losses mean nothing"


FLAGS = [
    _fused("--use-fused-rmsnorm", "npu_rms_norm for RMSNorm", "fusion.rms_norm"),
    _fused("--use-fused-swiglu", "npu_swiglu for the gate of the MLP", "fusion.swiglu"),
    _fused("--use-fused-rotary-pos-emb", "npu_rotary_mul for the rotation", "fusion.rope"),
    _fused(
        "--use-fused-moe-token-permute-and-unpermute",
        "npu_moe_token_permute and unpermute",
        "fusion.moe_permute",
    ),
    _kernel("--use-fusion-attn-v2", "npu_fusion_attention_v2"),
    word(
        "--shape-order",
        "SBH",
        COMPILER,
        "the layout in which attention is called",
        "chosen where attention is lowered; the values are the same",
        choices=("SBH", "BSH", "BSND", "BNSD"),
        act=lambda args: "chosen where attention is lowered",
    ),
    number(
        "--sparse-mode",
        0,
        COMPILER,
        "which mask the attention kernel assumes",
        "the mask is read from the graph; an error for a mode that is not causal",
        act=_sparse_mode,
    ),
    number(
        "--pre-tockens",
        65536,
        COMPILER,
        "how far back a token sees",
        "the mask is read from the graph; an error for a window",
        act=_pre_tokens,
    ),
    number(
        "--next-tockens",
        0,
        COMPILER,
        "how far ahead a token sees",
        "the mask is read from the graph; an error above 0",
        act=_next_tokens,
    ),
    _kernel("--mla-fa-without-pad", "values of latent attention are not padded to the width of keys", llm=True),
    _kernel("--mla-fa-divide-qk", "rotated and other parts of queries and keys are passed apart", llm=True),
    number(
        "--padded-base-length",
        128,
        COMPILER,
        "to which multiple latent attention pads",
        "chosen where attention is lowered; the values are the same",
        act=lambda args: "chosen where attention is lowered",
        llm=True,
    ),
    switch(
        "--mla-mm-split",
        COMPILER,
        "two up-projections of latent attention as four",
        "the same sums; the projections stay two, in checkpoints too",
        act=lambda args: "the projections stay two: the same sums",
        llm=True,
    ),
    switch(
        "--gemm-gradient-accumulation-fusion",
        OPTION,
        "experts' weight gradients are added in float32 inside the grouped product",
        "gradient_accumulation_fusion of the experts' layers: products in float32, added to main_grad",
        act=_fuse_expert_gradients,
        shown_by="test_gradients_of_experts_go_to_main_grad",
        skip=True,
    ),
    added(
        "--position-embedding-type",
        "alibi",
        OPTION,
        "ALiBi: m (j - i) is added to scores, with a slope m for each head",
        "added to the scores of the local attention, under context parallelism too; causal attention alone",
        act=_alibi,
        shown_by="test_alibi.py::test_training_is_that_of_the_formula",
    ),
    Flag(
        "--alibi-fusion-attn-type",
        OPTION,
        "how the fused attention is given the bias: 0 as values, 2 made in the kernel, 3 by square roots of distances",
        "0 and 2 are the same values; 3 is an error",
        type=int,
        act=_alibi_type,
    ),
    *(
        switch(
            name,
            COMPILER,
            asks,
            "causal attention reads nothing above the diagonal: the same values",
            act=_alibi_form,
        )
        for name, asks in (
            ("--alibi-diagonal-opposite", "the other sign of the bias above the diagonal"),
            ("--square-alibi-mask", "the bias is stored for every pair instead of for every key"),
            ("--fill-neg-inf", "the bias above the diagonal is -inf"),
        )
    ),
    number(
        "--optimization-level",
        2,
        OPTION,
        "0 compatibility, 1 also fused operators, 2 also MindSpeed's accelerations",
        "option `level`",
        choices=(0, 1, 2),
        act=lambda args: f"level = {args.optimization_level}",
        options=lambda args: {"level": args.optimization_level},
    ),
    switch(
        "--fix-router",
        OPTION,
        "tokens go to experts in turn, whatever the router says (a benchmark)",
        "choice j of token i is expert (i k + j) mod E, zero experts included, with the token's j-th largest weight; "
        "losses mean nothing",
        act=_fix_router,
        shown_by="test_tokens_go_to_experts_in_turn",
    ),
    number(
        "--fix-sub-seq-length",
        -1,
        OPTION,
        "documents of one length, for tests",
        "with --reset-attention-mask documents end after so many tokens, whatever the data says",
        act=_fix_documents,
        shown_by="test_documents_of_one_length",
    ),
    Flag(
        "--skip-bias-add",
        REFUSED,
        "a bias is added at once instead of by a fused operator",
        "remove it: where a bias is added is Megatron's choice",
        action="store_false",
        default=True,
        skip=True,
    ),
]
"""Rows of the table."""
