"""MindSpeed-LLM's flags for parts of models that Megatron-core's have not: scales, soft-caps, norms, windows.

``megatron.model_parts`` builds what the rows here let through.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any, Callable

from mindspeed_fx.megatron.flags.flag import MEGATRON, OPTION, Flag, NotDone, get, switch

POST_NORM, ALL_HEADS, DENSE_BIAS, SHORTCUT = "post_norm", "all_heads", "dense_bias", "shortcut"
"""Values of ``mindspeed_layers``: norms after attention and MLP; norms of queries and keys over all heads; a bias in
the output projection of attention, where --add-dense-bias asks for it; experts beside the rest of a layer."""
WITHOUT_SPEC = "no effect without --spec mindspeed_llm.tasks.models.spec.gemma2_spec layer_spec, as in MindSpeed-LLM"


def _refuse_with_mtp(args: Namespace) -> None:
    if get(args, "mtp_num_layers"):
        raise NotDone("multi-token prediction, whose layers do not have it in MindSpeed-LLM; remove --mtp-num-layers")


def _added(text: str) -> Callable[[Namespace], str]:
    def act(args: Namespace) -> str:
        _refuse_with_mtp(args)
        return text

    return act


def _offset(args: Namespace) -> str:
    if get(args, "normalization", "LayerNorm") != "RMSNorm":
        return "no effect without --normalization RMSNorm"
    args.layernorm_zero_centered_gamma = True
    return "layernorm_zero_centered_gamma = True, with weights that start at one"


def _score_cap(args: Namespace) -> str:
    _refuse_with_mtp(args)
    if get(args, "context_parallel_size", 1) > 1:
        raise NotDone("context parallelism has no soft-cap; give --context-parallel-size 1")
    if get(args, "apply_query_key_layer_scaling"):
        raise NotDone("scores are not whole where --apply-query-key-layer-scaling divides them; remove one of the two")
    return "scores are capped after their scale"


def _post_norm(args: Namespace) -> str:
    if get(args, "mindspeed_layers") != POST_NORM:
        return WITHOUT_SPEC
    _refuse_with_mtp(args)
    if get(args, "scale_depth"):
        raise NotDone("--scale-depth, which MindSpeed-LLM's layers with these norms do not have; remove one of the two")
    return "post_attn_norm and post_mlp_layernorm in every layer"


def _dense_bias(args: Namespace) -> str:
    if get(args, "mindspeed_layers") != DENSE_BIAS:
        return "no effect without --spec mindspeed_llm.tasks.models.spec.phi35_moe_spec layer_spec, as in MindSpeed-LLM"
    _refuse_with_mtp(args)
    return "a bias in the output projection of attention"


def _scaled_latent(name: str, width: str) -> Callable[[Namespace], str]:
    def act(args: Namespace) -> str:
        if not get(args, "multi_latent_attention"):
            return "no effect without --multi-latent-attention"
        if not get(args, width):
            raise NotDone(f"there is no such latent; give --{width.replace('_', '-')}, or remove the flag")
        if get(args, "enable_dsa_indexer"):
            raise NotDone("MindSpeed-LLM's sparse attention reads the latent without it; remove --enable-dsa-indexer")
        return f"{name} times the root of the hidden size over {width}"

    return act


def _window(args: Namespace, size: int, skip: int | None) -> str:
    if get(args, "reset_attention_mask"):
        raise NotDone("Megatron's layers with a window see no mask of documents; remove --reset-attention-mask")
    args.window_size, args.window_attn_skip_freq = (size, 0), skip
    return f"window_size = {args.window_size}, window_attn_skip_freq = {skip}"


def _interleaved(args: Namespace) -> str:
    if get(args, "mindspeed_layers") != POST_NORM:
        return WITHOUT_SPEC
    return _window(args, args.interleave_sliding_window - 1, 2)


def _sliding(args: Namespace) -> str:
    length = get(args, "seq_length")
    if length and length <= args.sliding_window:
        return "no effect on sequences that are no longer"
    return _window(args, args.sliding_window, None)


def _number(name: str, default: Any, asks: str, text: str, **more: Any) -> Flag:
    row = dict(state=OPTION, answer=text, type=float, act=_added(text), llm=True)
    return Flag(name=name, asks=asks, default=default, **{**row, **more})


SCALES, NORMS = "test_scales_and_caps", "test_layers_of_gemma2"
FLAGS = [
    _number("--scale-emb", None, "scale of the embeddings", "what the embedding returns times it", shown_by=SCALES),
    _number(
        "--embedding-multiplier-scale",
        1.0,
        "scale of the embeddings",
        "what the embedding returns times it",
        shown_by=SCALES,
    ),
    switch(
        "--input-embeds-norm",
        OPTION,
        "embeddings times the root of their width",
        "what the embedding returns times sqrt(h) in the type of the weights",
        act=_added("the embedding times sqrt(h)"),
        shown_by=SCALES,
        llm=True,
    ),
    _number(
        "--scale-depth",
        None,
        "scale of what layers add",
        "what attention and MLP return times it over the root of the number of layers",
        shown_by=SCALES,
    ),
    _number(
        "--dim-model-base",
        None,
        "scale of the logits by a width",
        "the output layer's input times it over the hidden size",
        shown_by=SCALES,
    ),
    _number("--output-multiplier-scale", None, "scale of the logits", "logits times it", shown_by=SCALES),
    _number("--output-logit-softcapping", None, "soft-cap of the logits", "c tanh(logits / c)", shown_by=SCALES),
    _number(
        "--attn-logit-softcapping",
        None,
        "soft-cap of the scores",
        "c tanh(scores / c) before the mask; an error with context parallelism",
        act=_score_cap,
        shown_by=SCALES,
    ),
    *(
        switch(
            flag,
            OPTION,
            f"scaled {name} of latent attention",
            f"what their norm returns times the root of hidden size over {width}",
            act=_scaled_latent(name, width),
            shown_by="test_longcat.py::test_a_layer_by_formula",
            llm=True,
        )
        for flag, name, width in (
            ("--enable-mla-scale-q-lora", "queries", "q_lora_rank"),
            ("--enable-mla-scale-kv-lora", "keys and values", "kv_lora_rank"),
        )
    ),
    switch(
        "--add-dense-bias",
        OPTION,
        "a bias in the output projection of attention alone",
        "so, with phi35_moe_spec; no effect without it",
        act=_dense_bias,
        shown_by="test_phi_and_plm.py::test_biases_of_phi",
        llm=True,
    ),
    switch(
        "--add-output-layer-bias",
        OPTION,
        "a bias of the output layer",
        "logits plus a weight for each token of the vocabulary, which starts at zero",
        act=lambda args: "logits have a bias",
        shown_by="test_phi_and_plm.py::test_biases_of_phi",
        llm=True,
    ),
    switch(
        "--add-rmsnorm-offset",
        OPTION,
        "norms times 1 + weight",
        "`--apply-layernorm-1p`, with weights that start at one as MindSpeed-LLM's do",
        act=_offset,
        shown_by=NORMS,
        llm=True,
    ),
    switch(
        "--post-norm",
        OPTION,
        "norms after attention and MLP",
        "norms in every layer, with gemma2_spec; no effect without it",
        act=_post_norm,
        shown_by=NORMS,
        llm=True,
    ),
    Flag(
        "--interleave-sliding-window",
        MEGATRON,
        "every other layer sees a window of so many tokens, its own among them",
        "with gemma2_spec `--window-size N-1,0 --window-attn-skip-freq 2`; no effect without it",
        type=int,
        act=_interleaved,
        shown_by=NORMS,
        llm=True,
    ),
    Flag(
        "--sliding-window",
        MEGATRON,
        "layers see so many tokens before their own",
        "`--window-size N,0` for longer sequences",
        type=int,
        act=_sliding,
        shown_by="test_a_window",
        llm=True,
    ),
]
"""Rows of the table."""
