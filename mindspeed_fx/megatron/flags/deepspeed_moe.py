"""DeepSpeed's mixture of experts (``--moe-model-type deepspeed_moe``), and the flags that put its work in parts."""

from __future__ import annotations

from argparse import Namespace

from mindspeed_fx.megatron import deepspeed_moe, pieces
from mindspeed_fx.megatron.flags.flag import (
    COMPILER,
    OPTION,
    Flag,
    NotDone,
    count_layers,
    get,
    number,
    setting,
    switch,
    word,
)

TYPE = "--moe-model-type"
OTHERS = {
    "moe_expert_capacity_factor": "its capacity is that of --moe-train-capacity-factor",
    "moe_router_enable_expert_bias": "its gate has no bias",
    "moe_shared_expert_intermediate_size": "it has no shared experts",
    "moe_router_num_groups": "its gate has no groups",
    "moe_router_topk_scaling_factor": "its weights have no scale",
    "moe_latent_size": "its experts take whole tokens",
}
"""Arguments that ask for something that this layer has not, and why."""


def is_asked(args: Namespace) -> bool:
    """Whether a run has such layers."""
    return bool(get(args, "moe_model_type") == deepspeed_moe.NAME and get(args, "num_experts"))


def _layer(args: Namespace) -> str:
    if get(args, "moe_model_type") != deepspeed_moe.NAME:
        return "Megatron's experts"
    if not get(args, "num_experts"):
        return "no effect without --num-experts"
    _check(args)
    topk, factor = get(args, "moe_router_topk", 2), args.moe_train_capacity_factor
    args.use_legacy_models = False
    args.moe_router_load_balancing_type, args.moe_token_dispatcher_type = "aux_loss", "alltoall"
    args.moe_router_pre_softmax = True  # not read; Megatron refuses one expert without it
    args.moe_router_dtype = get(args, "moe_router_dtype") or "fp32"
    args.moe_expert_capacity_factor = None if args.moe_no_drop else factor
    args.moe_pad_expert_input_to_capacity = not args.moe_no_drop
    text = "no token is dropped" if args.moe_no_drop else f"of n tokens an expert takes n * {topk} * {factor} / experts"
    if topk == 1 and get(args, "moe_aux_loss_coeff"):
        args.moe_aux_loss_coeff = 0.0
        text = f"{text}; no loss of balance with one expert of a token, as in MindSpeed"
    return f"DeepSpeed's gate in Megatron-core's layers; {text}"


def _check(args: Namespace) -> None:
    """Raises :class:`NotDone` where the layer cannot be, or MindSpeed refuses it."""
    topk = get(args, "moe_router_topk", 2)
    if topk not in (1, 2):
        raise NotDone(f"a token has one expert or two, and --moe-router-topk is {topk}; give 1 or 2")
    if args.moe_train_capacity_factor <= 0:
        raise NotDone(f"--moe-train-capacity-factor is {args.moe_train_capacity_factor}; give more than 0")
    for attribute, why in OTHERS.items():
        if get(args, attribute):
            raise NotDone(f"{why}; remove --{attribute.replace('_', '-')}")
    if get(args, "moe_ffn_hidden_size") not in (None, get(args, "ffn_hidden_size")):
        raise NotDone("its experts are as wide as an MLP; remove --moe-ffn-hidden-size, or give as --ffn-hidden-size")
    if get(args, "moe_router_load_balancing_type", "aux_loss") not in ("aux_loss", "none"):
        raise NotDone("its gate is its own; remove --moe-router-load-balancing-type (--moe-use-sinkhorn is a flag)")
    if get(args, "moe_router_score_function", "softmax") != "softmax":
        raise NotDone("its gate is a softmax; remove --moe-router-score-function")
    if get(args, "tensor_model_parallel_size", 1) > 1 and not get(args, "sequence_parallel"):
        raise NotDone("with --tensor-model-parallel-size it needs --sequence-parallel, as in MindSpeed; give it")
    if args.moe_dynamic_padding and not args.moe_no_drop:
        raise NotDone("--moe-dynamic-padding is about --moe-no-drop; give both, or neither")
    if args.moe_no_drop and get(args, "pipeline_model_parallel_size", 1) > 1:
        raise NotDone("MindSpeed does not take --moe-no-drop beside --pipeline-model-parallel-size; remove one of them")


def _rearranged(args: Namespace) -> str:
    return "tokens are indexed in any case, not multiplied by masks" if is_asked(args) else NO_EFFECT


def _padding(args: Namespace) -> str:
    return "no padding, and so no length to predict: the rows there are are exchanged" if is_asked(args) else NO_EFFECT


def _noise(args: Namespace) -> str:
    if not is_asked(args):
        return NO_EFFECT
    policy, topk = args.noisy_gate_policy, get(args, "moe_router_topk", 2)
    if policy == "RSample" and topk == 2:
        return "RSample is read with one expert of a token, as in MindSpeed"
    if policy == "Jitter":
        return f"in training the gate sees tokens times 1 +- {deepspeed_moe.JITTER}, as DeepSpeed's; not in MindSpeed"
    return "the choice is that of the logits plus Gumbel noise, in training" if policy == "RSample" else "no noise"


def _interval(args: Namespace) -> str:
    if not is_asked(args):
        return NO_EFFECT
    layers, interval = count_layers(args), args.expert_interval
    if not 0 < interval <= layers:
        raise NotDone(f"{interval} is no number from 1 to --num-layers {layers}")
    if get(args, "moe_layer_freq", 1) != 1 and interval > 1:
        raise NotDone("--moe-layer-freq names layers with experts already; remove one of the two")
    if interval > 1:
        args.moe_layer_freq = [int((n + 1) % interval == 0) for n in range(layers)]
    return f"moe_layer_freq = {args.moe_layer_freq}"


def _parts(args: Namespace) -> str:
    """--use-pipe-experts."""
    if not is_asked(args):
        return NO_EFFECT
    if args.pipe_experts_multi_data < 1:
        raise NotDone(f"--pipe-experts-multi-data is {args.pipe_experts_multi_data}; give 1 or more")
    if args.pipe_experts_multi_stream and not get(args, "sequence_parallel"):
        raise NotDone("--pipe-experts-multi-stream is about --sequence-parallel in MindSpeed; give both, or neither")
    if args.moe_no_drop:
        return "rows are known at run time: one exchange of them all, beside what is independent of it"
    _check_pieces(args)
    if not pieces.has_effect(args):
        return (
            f"no effect: {args.pipe_experts_multi_data} slices are no larger multiple of --ampipe-degree, as in "
            "MindSpeed"
        )
    number = f"{args.pipe_experts_multi_data} slices of " if args.pipe_experts_multi_data > 1 else ""
    return f"{number}every expert by itself, while others are exchanged"


def _check_pieces(args: Namespace) -> None:
    """Refuses what layers in pieces have not."""
    if get(args, "moe_zero_memory", "disable") != "disable":
        raise NotDone("its rows are exchanged in pieces, which are not made again; remove --moe-zero-memory")
    if get(args, "moe_apply_probs_on_input"):
        raise NotDone("rows are weighted when they are back; remove --moe-apply-probs-on-input")


def _ampipe(args: Namespace) -> str:
    degree = args.ampipe_degree
    if degree == 1:
        return "one part"
    if degree < 1:
        raise NotDone(f"{degree} is no number of parts; give 1 or more")
    if not is_asked(args):
        raise NotDone(f"it is about DeepSpeed's experts; give {TYPE} {deepspeed_moe.NAME} and --num-experts")
    cp = get(args, "context_parallel_size", 1)
    if cp > 1 and degree != 2:
        raise NotDone("with --context-parallel-size it is 2 in MindSpeed; give --ampipe-degree 2")
    ranks = cp * (get(args, "tensor_model_parallel_size", 1) if get(args, "sequence_parallel") else 1)
    if args.seq_length % (degree * ranks):
        raise NotDone(f"--seq-length {args.seq_length} is not divided by {degree} parts on {ranks} ranks")
    if get(args, "moe_z_loss_coeff"):
        raise NotDone("a part's loss of logits would count as the whole's; remove --moe-z-loss-coeff")
    text = f"the gate's capacity counts each of {degree} parts of a rank's tokens"
    if args.moe_no_drop:
        return text
    _check_pieces(args)
    whole = [f"--{name.replace('_', '-')}" for name in WHOLE if get(args, name)]
    if get(args, "recompute_granularity") == "selective":
        whole.append("--recompute-granularity selective")
    if cp > 1 or whole:
        return f"{text}, and experts work part by part; attention whole ({', '.join(whole) or 'context parallelism'})"
    return f"{text}; attention and experts work part by part, while others are exchanged"


WHOLE = (
    "multi_latent_attention",
    "experimental_attention_variant",
    "window_size",
    "attention_output_gate",
    "no_rope_freq",
)
"""Arguments with which attention is not divided into parts."""
NO_EFFECT = f"no effect without {TYPE} {deepspeed_moe.NAME}"

FLAGS: list[Flag] = [
    word(
        TYPE,
        "megatron_moe",
        OPTION,
        "deepspeed_moe: experts with a capacity as DeepSpeed has them",
        "DeepSpeed's gate as the router of Megatron-core's layer, with or without `--use-legacy-models`; the loss of "
        "balance counts as Megatron scales it (MindSpeed's: once for every micro-batch, rank and part)",
        choices=(deepspeed_moe.NAME, "megatron_moe"),
        act=_layer,
        shown_by="test_deepspeed_moe.py::test_a_layer_by_formula",
    ),
    *(setting(name, TYPE) for name in ("--moe-no-drop", "--moe-use-sinkhorn")),
    setting("--moe-train-capacity-factor", TYPE, 1.0),
    switch(
        "--enable-token-rearrange-opt",
        COMPILER,
        "deepspeed_moe: tokens are indexed, not multiplied by masks",
        "they are in any case",
        act=_rearranged,
        shown_by="test_deepspeed_moe.py::test_a_layer_by_formula",
    ),
    switch(
        "--moe-dynamic-padding",
        COMPILER,
        "deepspeed_moe without dropping: the capacity is predicted",
        "nothing is padded: ranks exchange the rows there are; an error without --moe-no-drop",
        act=_padding,
        shown_by="test_deepspeed_moe.py::test_a_layer_by_formula",
    ),
    word(
        "--noisy-gate-policy",
        None,
        OPTION,
        "deepspeed_moe: noise of the gate in training",
        "RSample: Gumbel noise where a token has one expert; Jitter: tokens times 1 +- 0.01 for the gate",
        choices=("Jitter", "RSample", "None"),
        act=_noise,
        shown_by="test_deepspeed_moe.py::test_noise_of_the_gate",
    ),
    Flag(
        "--no-use-rts",
        COMPILER,
        "deepspeed_moe: which tokens are dropped is not drawn",
        "it never is, here and in MindSpeed, whose default is the same: the first tokens keep their places",
        action="store_false",
        default=False,
        dest="use_rts",
        act=lambda args: "the first tokens keep their places" if is_asked(args) else NO_EFFECT,
        shown_by="test_deepspeed_moe.py::test_a_layer_by_formula",
    ),
    number(
        "--expert-interval",
        1,
        OPTION,
        "deepspeed_moe: every how many layers have experts",
        "`--moe-layer-freq` with a number for every layer: those whose number, from 1 on, it divides",
        act=_interval,
    ),
    switch(
        "--use-pipe-experts",
        OPTION,
        "deepspeed_moe: experts computed in parts beside the all-to-all",
        "each expert, or a slice of its capacity, is exchanged and computed by itself: the exchange of one starts "
        "before the product of the one before it, in the backward too",
        act=_parts,
        shown_by="test_deepspeed_moe.py::test_experts_of_two_ranks",
    ),
    setting("--pipe-experts-multi-data", "--use-pipe-experts", 1),
    setting("--pipe-experts-multi-stream", "--use-pipe-experts"),
    number(
        "--ampipe-degree",
        1,
        OPTION,
        "deepspeed_moe: attention and experts in parts of the sequence",
        "the gate's capacity counts the tokens of a part, whose exchange starts before the attention of the next one; "
        "attention stays whole where it is latent or has a window, and with context parallelism",
        act=_ampipe,
        shown_by="test_deepspeed_moe.py::test_a_layer_by_formula",
    ),
    setting("--ampipe-tp-sp-comm-overlap", "--ampipe-degree"),
]
"""Rows of the table."""
