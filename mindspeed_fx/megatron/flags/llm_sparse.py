"""DeepSeek-V3.2's sparse attention by MindSpeed-LLM's flags, and norms with weights in float32.

``megatron.sparse_attention`` and ``megatron.wide_norms`` do what the rows here let through.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any, Callable

from mindspeed_fx.megatron.flags import llm_deepseek4
from mindspeed_fx.megatron.flags.flag import OPTION, Flag, NotDone, get, setting, switch

DSA = "--enable-dsa-indexer"
LOSS = "its loss takes the scale of the routers' losses"


def _sparse(args: Namespace) -> str:
    if llm_deepseek4.is_asked(args):
        args.dsa_indexer_loss_coeff = get(args, "indexer_loss_coeff", 1.0)
        return f"layers with overlapping pools see {get(args, 'index_topk', 2048)} entries, which an indexer chooses"
    _refuse_models(args)
    _refuse_beside(args)
    if get(args, "index_topk_freq", 1) > 1 or get(args, "index_topk_pattern"):
        _refuse_beside_sharing(args)
    args.dsa_indexer_loss_coeff = get(args, "indexer_loss_coeff", 1.0)  # Megatron logs the loss then
    tokens = get(args, "index_topk", 2048)
    return f"every latent attention has an indexer and sees {tokens} tokens; dsa_indexer_loss_coeff is logged"


def _refuse_models(args: Namespace) -> None:
    if not get(args, "multi_latent_attention") or not get(args, "q_lora_rank"):
        raise NotDone("an indexer reads the latent of queries; give --multi-latent-attention and --q-lora-rank")
    if not get(args, "num_experts"):
        raise NotDone(f"{LOSS}; give --num-experts, or Megatron's `--experimental-attention-variant dsa`")
    if get(args, "kv_compress") or get(args, "indexer_qk_quant_scheme"):
        raise NotDone("keys of an indexer are whole and in the type of the model; remove --indexer-qk-quant-scheme")
    if get(args, "experimental_attention_variant"):
        raise NotDone("Megatron's --experimental-attention-variant asks for other layers; remove one of the two")
    scales = get(args, "rope_scaling_mscale", 1.0), get(args, "rope_scaling_mscale_all_dim", 0.0)
    has_factor = get(args, "rope_scaling_type") == "yarn" and scales[0] != scales[1]
    if has_factor and not get(args, "apply_rope_no_in_complex"):
        raise NotDone(
            "MindSpeed-LLM's complex rotation leaves out YaRN's factor; give --apply-rope-no-in-complex, or "
            "--rope-scaling-mscale and --rope-scaling-mscale-all-dim of one value"
        )


def _refuse_beside(args: Namespace) -> None:
    if (get(args, "context_parallel_size", 1) or 1) > 1:
        raise NotDone("scores are of all tokens on a rank; give --context-parallel-size 1")
    if get(args, "reset_attention_mask"):
        raise NotDone("tokens of other documents would be seen; remove --reset-attention-mask")
    if get(args, "attention_dropout"):
        raise NotDone("attention has no dropout there; give --attention-dropout 0")
    modules = get(args, "recompute_modules") or ["core_attn"]
    if get(args, "recompute_granularity") == "selective" and "core_attn" in modules:
        raise NotDone("core attention alone cannot be recomputed; give --recompute-granularity full, or other modules")


def _refuse_beside_sharing(args: Namespace) -> None:
    if get(args, "mtp_num_layers"):
        raise NotDone("layers of multi-token prediction choose for themselves; remove --index-topk-freq or MTP")
    if get(args, "noop_layers"):
        raise NotDone("layers that do nothing are left out here, and would be counted; remove --noop-layers")


def _by_operators(args: Namespace) -> str:
    if llm_deepseek4.is_asked(args):
        return "DeepSeek-V4's entries are chosen and seen under a mask: the same values, all scores are made"
    if not get(args, "enable_dsa_indexer"):
        return f"no effect without {DSA}"
    return "attention reads the chosen keys alone: mindspeed::lightning_indexer, mindspeed::sparse_attention"


def _absorbed(args: Namespace) -> str:
    if llm_deepseek4.is_asked(args):
        raise NotDone("DeepSeek-V4's attention sees entries of its own; remove it")
    if not get(args, "multi_latent_attention"):
        raise NotDone("it is about latent attention; give --multi-latent-attention")
    if "mla_up_proj" in (getattr(args, "recompute_modules", None) or []):
        raise NotDone("up-projections are not made at all there; remove --recompute-modules mla_up_proj")
    if get(args, "cache_mla_latents"):
        raise NotDone("--cache-mla-latents has queries and keys of its own; remove one of the two")
    shared = "all heads share one key and one value, the latent"
    if get(args, "enable_dsa_indexer"):
        return f"{shared}; attention reads the chosen ones alone"
    if (get(args, "context_parallel_size", 1) or 1) > 1:
        raise NotDone("--context-parallel-size above 1 beside it: one head of keys cannot be exchanged; remove it")
    args.absorb_up_projections = True
    return f"{shared}; without {DSA} attention to all keys has more work in this form"


def _absorbed_for_indexer(args: Namespace) -> str:
    if not get(args, "enable_dsa_indexer"):
        raise NotDone(f"{DSA} is what it is about, as in MindSpeed; --enable-mla-absorb absorbs without one")
    return _absorbed(args)


def _operators(name: str, llm: bool = False) -> Flag:
    return switch(
        name,
        OPTION,
        "a fused operator of sparse attention",
        "choice, attention and the target of the indexer's loss are operators that make no tensor of tokens times "
        "tokens and read the chosen keys alone, one such flag as all (not in DeepSeek-V4's layers)",
        act=_by_operators,
        shown_by="test_sparse_attention.py::test_operators_are_the_mask",
        llm=llm,
    )


def _absorb(name: str, without: str, act: Callable[[Namespace], str], llm: bool = False) -> Flag:
    return switch(
        name,
        OPTION,
        "up-projections of latent attention absorbed into its products",
        "the same values: queries and results are multiplied by the up-projections of keys and values, and attention "
        f"reads the latent, by operators to the chosen tokens; without --enable-dsa-indexer {without}",
        act=act,
        shown_by="test_sparse_attention.py::test_operators_are_the_mask",
        skip=True,
        llm=llm,
    )


def _wide_norms(args: Namespace) -> str:
    if not (get(args, "bf16") or get(args, "fp16")):
        return "no effect without --bf16 or --fp16"
    if get(args, "reuse_fp32_param"):
        raise NotDone("--reuse-fp32-param keeps weights of 16 bits alone; remove one of the two")
    for name in ("use_megatron_fsdp", "use_torch_fsdp2"):
        if get(args, name):
            raise NotDone(f"FSDP keeps weights of one type together; remove --{name.replace('_', '-')}")
    return "weights of norms are float32, and so is what they compute"


def _setting(name: str, default: Any = False, kind: Any = None) -> Flag:
    return setting(name, DSA, default, kind, llm=True)


FLAGS = [
    switch(
        DSA,
        OPTION,
        "sparse attention with an indexer",
        "latent attention under the mask of the tokens that the indexer has chosen, and the indexer's loss; without "
        "the Hadamard rotation, which leaves scores as they are; every tensor-parallel rank has the whole indexer; in "
        "DeepSeek-V4's layers it chooses among entries; an error without experts, with documents or dropout of "
        "attention, and but in these layers with context parallelism",
        act=_sparse,
        shown_by="test_sparse_attention.py::test_a_layer_by_formula",
        llm=True,
    ),
    _setting("--apply-rope-no-in-complex"),
    _setting("--index-n-heads", 64, int),
    _setting("--index-head-dim", 128, int),
    _setting("--index-topk", 2048, int),
    _setting("--index-topk-freq", 1, int),
    _setting("--index-topk-pattern", None, str),
    _setting("--index-skip-topk-offset", 2, int),
    _setting("--index-share-for-mtp-iteration"),
    _setting("--indexer-loss-coeff", 1.0, float),
    _setting("--indexer-qk-quant-scheme", None, str),
    _setting("--no-use-sparse-c8-indexer"),
    _operators("--use-fused-lightning-indexer"),
    _operators("--use-fused-lightning-indexer-kl-loss"),
    _operators("--use-fused-sparse-flash-attention"),
    _operators("--use-fused-lightning-indexer-loss", llm=True),
    _operators("--use-sparse-flash-attn", llm=True),
    _absorb("--enable-mla-absorb", "to all keys, with more work, but not beside context parallelism", _absorbed, True),
    _absorb("--use-dsa-absorb", "an error, as it is about the indexer's attention", _absorbed_for_indexer),
    _setting("--scale-fmt", None, str),
    _setting("--max-batch-size", 4, int),
    switch(
        "--init-norm-weight-in-fp32",
        OPTION,
        "weights of norms in float32",
        "weights of norms of a 16-bit model turn to float32 where Megatron has turned them to 16 bits, and norms "
        "compute in float32",
        act=_wide_norms,
        shown_by="test_sparse_attention.py::test_norms_have_float32_weights",
        llm=True,
    ),
]
"""Rows of the table."""
