"""DeepSeek-V4 by MindSpeed-LLM's flags: streams, pooled keys, experts by a table, a rotation of its own.

``megatron.deepseek4`` and ``megatron.square_root_router`` do what the rows here let through.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any, Callable

from mindspeed_fx.megatron.deepseek4.settings import CHOSEN, NAME
from mindspeed_fx.megatron.flags.flag import (
    MEGATRON,
    OPTION,
    REFUSED,
    Flag,
    NotDone,
    added,
    get,
    number,
    setting,
    switch,
)
from mindspeed_fx.megatron.flags.pipeline import noop_layers

SPEC = "deepseek4_spec"
ALONE = f"only layers of {SPEC} have it; give --spec mindspeed_llm.tasks.models.spec.{SPEC} layer_spec, or remove it"
WANTED = {
    "multi_latent_attention": "--multi-latent-attention",
    "q_lora_rank": "--q-lora-rank",
    "num_experts": "--num-experts",
    "qk_layernorm": "--qk-layernorm",
    "enable_mhc": "--enable-mhc",
    "kv_compress": "--kv-compress",
    "enable_dsa_indexer": "--enable-dsa-indexer",
    "compress_ratios": "--compress-ratios",
}
"""Without which MindSpeed-LLM's layers are none, or fail."""
ABSENT = {
    "hidden_dropout": "--hidden-dropout 0",
    "attention_dropout": "--attention-dropout 0",
    "add_bias_linear": "--disable-bias-linear",
    "add_qkv_bias": "no --add-qkv-bias",
    "reset_attention_mask": "no --reset-attention-mask, whose documents would be seen",
    "variable_seq_lengths": "no --variable-seq-lengths, whose messages have three dimensions",
    "first_k_dense_replace": "experts in every layer, without --first-k-dense-replace",
    "index_topk_pattern": "no --index-topk-pattern: each layer chooses for itself",
    "indexer_qk_quant_scheme": "no --indexer-qk-quant-scheme: keys of an indexer are in the type of the model",
    "fine_grained_activation_offloading": "no --fine-grained-activation-offloading",
    "experimental_attention_variant": "no --experimental-attention-variant, which asks for other layers",
}
"""What these layers do not have: an argument, and what to give."""


def is_asked(args: Namespace) -> bool:
    """Whether --spec asks for these layers; it does so still where that was refused."""
    words = getattr(args, "spec", None) or []
    return get(args, "mindspeed_layers") == NAME or bool(words and str(words[0]).endswith(f".{SPEC}"))


def set_layers(args: Namespace) -> None:
    """``--spec ...deepseek4_spec layer_spec``.

    Raises:
        NotDone: with what to give.
    """
    for name, flag in WANTED.items():
        if not get(args, name):
            raise NotDone(f"{SPEC} has it in every model; give {flag}")
    for name, wanted in ABSENT.items():
        value = get(args, name, None)
        if value and not (isinstance(value, int) and value < 0):
            raise NotDone(f"layers of {SPEC} have {wanted}")
    if get(args, "moe_model_type") == "deepspeed_moe":
        raise NotDone(f"experts of {SPEC} are Megatron's; remove --moe-model-type deepspeed_moe")
    if (get(args, "index_topk_freq", 1) or 1) > 1:
        raise NotDone(f"layers of {SPEC} choose for themselves; remove --index-topk-freq")
    if get(args, "normalization", "LayerNorm") != "RMSNorm":
        raise NotDone(f"norms of {SPEC} are RMS norms; give --normalization RMSNorm")
    if get(args, "position_embedding_type") != NAME:
        raise NotDone(f"{SPEC} rotates in its own way; give --position-embedding-type {NAME}")
    _check_ranks(args)
    if get(args, "recompute_granularity") == "selective":
        raise NotDone(f"layers of {SPEC} are recomputed whole; give --recompute-granularity full")
    _set_ratios(args)
    args.mindspeed_layers = NAME


def _check_ranks(args: Namespace) -> None:
    if get(args, "tensor_model_parallel_size", 1) > 1 and not get(args, "sequence_parallel"):
        raise NotDone(f"tensor-parallel ranks of {SPEC} divide the tokens; give --sequence-parallel")
    if get(args, "bf16") or get(args, "fp16"):
        for name in ("reuse_fp32_param", "use_megatron_fsdp", "use_torch_fsdp2"):
            if get(args, name):
                raise NotDone(f"weights of streams are float32; remove --{name.replace('_', '-')}")
    algorithm = get(args, "context_parallel_algo", "ulysses_cp_algo")
    if (get(args, "context_parallel_size", 1) or 1) > 1 and algorithm != "kvallgather_cp_algo":
        raise NotDone(f"{algorithm} has no entries; give --context-parallel-algo kvallgather_cp_algo")


def _set_ratios(args: Namespace) -> None:
    """Of the layers that do something; those of --noop-layers are left out later."""
    ratios, layers = list(args.compress_ratios), get(args, "num_layers") or 0
    skipped = noop_layers(args) if get(args, "noop_layers") else []
    kept = [n for n in range(layers) if n not in skipped]
    if kept and kept[-1] >= len(ratios) or min(ratios) < 0:
        raise NotDone(
            f"--compress-ratios {' '.join(map(str, ratios))}: {kept[-1] + 1} numbers are expected, one a layer, 0 "
            f"without entries, {CHOSEN} with an indexer"
        )
    args.ratios_of_layers = [ratios[n] for n in kept]
    args.table_layers = sum(n < (get(args, "n_hash_layers") or 0) for n in kept)


def _of_these(text: str, then: Callable[[Namespace], None] = lambda args: None) -> Callable[[Namespace], str]:
    """An ``act`` of a flag that these layers read, and no others."""

    def act(args: Namespace) -> str:
        if get(args, "mindspeed_layers") != NAME:
            if is_asked(args):
                return "see --spec"
            raise NotDone(ALONE)
        then(args)
        return text

    return act


def _set_rope(args: Namespace) -> None:
    args.position_embedding_type = "rope"  # Megatron knows no other beside multi-token prediction; it builds none here


def _set_messages(args: Namespace) -> None:
    if get(args, "hc_mult", 4) < 1 or get(args, "hc_sinkhorn_iters", 20) < 1:
        raise NotDone("--hc-mult and --hc-sinkhorn-iters are at least 1")
    args.streams_between_stages = get(args, "hc_mult", 4)


def _mtp_spec(args: Namespace) -> str:
    words = args.mtp_spec if isinstance(args.mtp_spec, list) else [args.mtp_spec]
    if not words[0].endswith(f".{SPEC}"):
        raise NotDone(f"layers of multi-token prediction are those of --spec; valid: one of {SPEC}, or remove it")
    return _of_these("layers of multi-token prediction see their window alone, and have streams of their own")(args)


def _table(args: Namespace) -> str:
    if not args.n_hash_layers:
        return "0 layers: no effect"
    if get(args, "moe_router_score_function") != "sqrtsoftplus":
        raise NotDone("weights of experts by a table are sqrtsoftplus; give --moe-router-score-function sqrtsoftplus")
    return _of_these(f"experts of the first {get(args, 'table_layers', 0)} layers by the table tid2eid")(args)


def _scores(args: Namespace) -> str:
    kind = get(args, "moe_router_load_balancing_type", "aux_loss")
    if kind not in ("none", "seq_aux_loss"):
        raise NotDone(f"it has no loss of type {kind}; give --moe-router-load-balancing-type none, --seq-aux with it")
    for name in ("moe_expert_capacity_factor", "moe_router_fusion", "moe_enable_routing_replay"):
        if get(args, name):
            raise NotDone(f"its routers were not built with it; remove --{name.replace('_', '-')}")
    args.moe_router_score_function, args.square_root_scores = "sigmoid", True
    return "routers score sqrt(softplus(l)); Megatron is told sigmoid, which has a bias of experts too"


def _clamp(args: Namespace) -> str:
    if args.swiglu_limit <= 0 or not get(args, "swiglu"):
        return "no effect without --swiglu and a limit above 0"
    if get(args, "moe_shared_expert_overlap"):
        raise NotDone("Megatron's overlapped shared experts do not clamp; remove --moe-shared-expert-overlap")
    args.activation_func_clamp_value, args.bias_swiglu_fusion = args.swiglu_limit, False
    return f"activation_func_clamp_value = {args.swiglu_limit}, bias_swiglu_fusion = False"


def _settings(of: str, *rows: tuple[str, Any, Any]) -> list[Flag]:
    return [setting(name, of, default, kind, llm=True) for name, default, kind in rows]


def _shown(test: str) -> str:
    return f"test_deepseek4.py::{test}"


FLAGS = [
    added(
        "--position-embedding-type",
        NAME,
        OPTION,
        "DeepSeek-V4's rotation",
        "the last channels of heads, of entries and of the indexer, neighbours together; layers without entries turn "
        "by --rope-theta, others by --compress-rope-theta and YaRN of --rope-factor, --beta-fast, --beta-slow and "
        "--original-seq-len; the other flags of YaRN and --rotary-base are not read, as in MindSpeed-LLM",
        act=_of_these("turned in the layers", _set_rope),
        shown_by=_shown("test_attention_by_formula"),
        llm=True,
    ),
    Flag(
        "--kv-compress",
        OPTION,
        "keys and values of DeepSeek-V4 compressed",
        "each layer pools as many tokens as --compress-ratios says into an entry; 4: pools overlap and the indexer "
        "chooses. Not read: --v-head-dim, --kv-lora-rank",
        action="store_true",
        default=False,
        act=_of_these("tokens are pooled"),
        shown_by=_shown("test_attention_by_formula"),
        llm=True,
    ),
    *_settings(
        "--kv-compress",
        ("--compress-rope-theta", 40000.0, float),
        ("--rope-theta", 10000.0, float),
        ("--rope-factor", 4.0, float),
        ("--original-seq-len", 65536, int),
        ("--sliding-window-size", 128, int),
        ("--o-groups", 8, int),
        ("--o-lora-rank", 1024, int),
    ),
    Flag(
        "--compress-ratios",
        REFUSED,
        "a setting of `--kv-compress`",
        "what becomes of `--kv-compress`; without that flag it has no effect",
        type=int,
        nargs="+",
        of="--kv-compress",
        llm=True,
    ),
    switch(
        "--enable-mhc",
        OPTION,
        "several residual streams",
        "manifold-constrained hyper-connections around attention and experts, with weights in float32; stages of a "
        "pipeline send all streams",
        act=_of_these("tokens have several streams", _set_messages),
        shown_by=_shown("test_a_layer_by_formula"),
        llm=True,
    ),
    *_settings(
        "--enable-mhc",
        ("--hc-eps", 1e-6, float),
        ("--hc-mult", 4, int),
        ("--hc-sinkhorn-iters", 20, int),
        ("--use-fused-mhc", False, None),
        ("--use-triton-mhc", False, None),
    ),
    Flag(
        "--mtp-spec",
        OPTION,
        "layers of multi-token prediction",
        f"those of {SPEC}; an error for others, which are those of --spec",
        type=str,
        nargs="*",
        act=_mtp_spec,
        shown_by=_shown("test_multi_token_prediction_by_formula"),
        llm=True,
    ),
    number(
        "--n-hash-layers",
        0,
        OPTION,
        "experts by a table of tokens",
        "the first layers take experts from a table, which begins with experts in turn and which a checkpoint has; an "
        "error where such a layer is not on the first stage, the one that is told the tokens",
        act=_table,
        shown_by=_shown("test_experts_by_formula"),
        llm=True,
    ),
    added(
        "--moe-router-score-function",
        "sqrtsoftplus",
        OPTION,
        "scores sqrt(softplus(l))",
        "routers score so, with a bias of experts and a loss of each sequence; an error with another loss, a capacity",
        act=_scores,
        shown_by=_shown("test_experts_by_formula"),
        llm=True,
    ),
    number(
        "--swiglu-limit",
        0.0,
        MEGATRON,
        "gate and up are clamped",
        "`--activation-func-clamp-value` without `--bias-swiglu-fusion`, which would not clamp: the gate from above, "
        "up on both sides",
        act=_clamp,
        shown_by=_shown("test_gates_are_clamped"),
        llm=True,
    ),
]
"""Rows of the table."""
