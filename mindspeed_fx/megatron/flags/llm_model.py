"""What MindSpeed-LLM's flags say about a model: latent attention, rotations, activations, scales, its layer specs."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from mindspeed_fx.megatron.flags.flag import MEGATRON, OPTION, REFUSED, Flag, NotDone, get, number, switch, word
from mindspeed_fx.megatron.flags.llm_deepseek4 import set_layers
from mindspeed_fx.megatron.flags.llm_parts import ALL_HEADS, DENSE_BIAS, POST_NORM, SHORTCUT
from mindspeed_fx.megatron.flags.rope_scaling import set_scaling

LATENT = "latent attention, as Megatron's own layers have it with --multi-latent-attention"
NORMS = "attention with norms of queries and keys, as Megatron's own layers have it with --qk-layernorm"
AFTER = "norms after attention and MLP are added to Megatron's own layers"
SPECS = {
    "deepseek_spec": LATENT,
    "minicpm_spec": LATENT,
    "qwen3_spec": NORMS,
    "bailing_spec": NORMS,
    "qwen2_moe_spec": "shared experts, as Megatron's own layers have them",
    "gemma2_spec": AFTER,
    "grok_spec": AFTER,
    "minimax_spec": "the norms of queries and keys are over all heads of Megatron's own layers",
    "phi35_moe_spec": "attention whose output projection may have a bias of its own, by --add-dense-bias",
    "longcat_spec": "two latent attentions and two MLPs a layer, experts beside them",
    "plm_spec": "latent attention with a norm of keys and values",
    "deepseek4_spec": "several streams, keys pooled, experts in part by a table",
    "qwen3_next_spec": "delta nets between attention with a gate, by --full-attention-interval",
}
"""Layer specs of MindSpeed-LLM whose layers are Megatron's own, or nearly."""


LATENT_SPECS = ("deepseek_spec", "minicpm_spec", "plm_spec", "longcat_spec")


def _set_plm_layers(args: Namespace) -> None:
    """Queries straight from the hidden states, a norm of keys and values whatever --qk-layernorm says, no experts."""
    for name in ("q_lora_rank", "num_experts", "enable_dsa_indexer"):
        if get(args, name):
            raise NotDone(f"plm_spec has no such part; remove --{name.replace('_', '-')}")
    args.qk_layernorm = True


def _refuse_beside_shortcuts(args: Namespace) -> None:
    if not get(args, "num_experts"):
        raise NotDone("longcat_spec has experts in every layer; give --num-experts")
    for name in ("mtp_num_layers", "enable_dsa_indexer", "first_k_dense_replace", "noop_layers", "scale_depth"):
        if get(args, name):
            raise NotDone(f"longcat_spec's layers were not built with it; remove --{name.replace('_', '-')}")
    if get(args, "recompute_granularity") == "selective" and (get(args, "recompute_modules") or ["core_attn"]) != [
        "core_attn"
    ]:
        raise NotDone("layers of longcat_spec recompute all or core attention; give --recompute-modules core_attn")


def _spec_name(args: Namespace) -> str | None:
    """The file of MindSpeed-LLM that ``--spec`` names."""
    words = getattr(args, "spec", None) or []
    path = words[0] if isinstance(words, (list, tuple)) and words else ""
    return path.rpartition(".")[2] if path.startswith("mindspeed_llm.") else None


def _spec(args: Namespace) -> str:
    name = _spec_name(args)
    if name not in SPECS:
        raise NotDone(f"the layers of {name} are not Megatron's own; valid: {', '.join(SPECS)}, or a spec of your own")
    if name in LATENT_SPECS and not get(args, "multi_latent_attention"):
        raise NotDone(f"{name} is latent attention; give --multi-latent-attention")
    if SPECS[name] == AFTER:
        if not get(args, "post_norm"):
            raise NotDone(f"{name} has norms after attention and MLP; give --post-norm")
        args.mindspeed_layers = POST_NORM
    if name == "minimax_spec":
        if get(args, "tensor_model_parallel_size", 1) > 1:
            raise NotDone("norms over all heads want them on one rank; give --tensor-model-parallel-size 1")
        args.mindspeed_layers = ALL_HEADS
    if name == "plm_spec":
        _set_plm_layers(args)
    if name == "longcat_spec":
        _refuse_beside_shortcuts(args)
        args.mindspeed_layers = SHORTCUT
    if name == "deepseek4_spec":
        set_layers(args)
    if name == "phi35_moe_spec":
        args.mindspeed_layers = DENSE_BIAS
    if name == "qwen3_next_spec" and not get(args, "full_attention_interval"):
        raise NotDone("qwen3_next_spec is read with --full-attention-interval; give it")
    args.spec = None
    if get(args, "num_experts") and not get(args, "first_k_dense_replace"):
        args.moe_layer_freq = 1  # such a spec has experts in every layer
    return f"Megatron's own layers: {SPECS[name]}"


def _to(attribute: str) -> Any:
    """An ``act`` that renames a flag of its own attribute: beta_fast of before, of today."""

    def act(args: Namespace) -> str:
        if not get(args, "multi_latent_attention"):
            return "no effect without latent attention and YaRN"
        return f"{attribute} = {getattr(args, attribute)}"

    return act


def set_plain_rope(args: Namespace) -> str | None:
    """Latent attention without --rope-scaling-type: MindSpeed-LLM rotates plainly, Megatron would take YaRN."""
    if not get(args, "multi_latent_attention") or get(args, "rope_scaling_type") or get(args, "rope_type"):
        return None
    args.rope_type = "rope"
    return "rope_type = rope, as MindSpeed-LLM has it without --rope-scaling-type"


def _partial(args: Namespace) -> str:
    args.rotary_percent = args.partial_rotary_factor
    return f"rotary_percent = {args.rotary_percent}"


def _dynamic(args: Namespace) -> str:
    """base (a s / p - (a - 1))^(d / (d - 2)): a the factor, s the longer of sequence and positions p, d of a head."""
    factor, positions = args.dynamic_factor, get(args, "max_position_embeddings")
    if factor <= 1:
        return "no effect up to 1"
    if not positions or not (get(args, "kv_channels") or get(args, "hidden_size")):
        raise NotDone("give --max-position-embeddings and the width of a head")
    dim = get(args, "kv_channels") or args.hidden_size // args.num_attention_heads
    length = max(get(args, "seq_length") or 0, positions)
    growth = (factor * length / positions - (factor - 1)) ** (dim / (dim - 2))
    args.rotary_base = get(args, "rotary_base", 10000) * growth
    return f"rotary_base = {args.rotary_base}"


def _interleaved(args: Namespace) -> str:
    args.rotary_interleaved = True
    return "rotary_interleaved = True"


def _attention_scale(args: Namespace) -> str:
    args.softmax_scale = float(args.query_pre_attn_scalar) ** -0.5
    return f"softmax_scale = {args.softmax_scale}"


def _gelu_gate(approximate: str) -> Any:
    def act(args: Namespace) -> str:
        if get(args, "swiglu") and not get(args, "ffn_hidden_size"):
            raise NotDone("give --ffn-hidden-size, which --swiglu would choose for another activation")
        args.swiglu, args.bias_gelu_fusion, args.mindspeed_gate = False, False, approximate
        return f"gated_linear_unit = True, activation_func = gelu ({approximate})"

    return act


def _absent(name: str, asks: str, out: str = "Megatron-core has no such part", **more: Any) -> Flag:
    """A part of a model that Megatron-core does not have."""
    answer = f"{out}; a model with it cannot be built from flags here: register its layers with --spec"
    return switch(name, REFUSED, asks, answer, llm=True, **more)


FLAGS = [
    Flag(
        "--spec",
        MEGATRON,
        "layers of MindSpeed-LLM: mindspeed_llm.tasks.models.spec.NAME layer_spec",
        f"Megatron's own layers for {', '.join(SPECS)}; an error for others",
        value="mindspeed_llm",
        requested=lambda args: _spec_name(args) is not None,
        act=_spec,
        llm=True,
    ),
    word(
        "--rope-scaling-type",
        None,
        MEGATRON,
        "which frequencies the rotation has",
        "yarn: `--rope-type yarn` of latent attention, else frequencies set so; longrope: set so; llama3: "
        "`--use-rope-scaling`; plm: plain frequencies",
        choices=("llama3", "yarn", "longrope", "plm"),
        act=set_scaling,
        shown_by="test_yarn",
    ),
    number(
        "--rope-scaling-mscale",
        1.0,
        MEGATRON,
        "YaRN: scale of the cosines",
        "`--mscale`, beside --rope-scaling-type yarn",
        act=lambda args: "read by --rope-scaling-type",
    ),
    number(
        "--rope-scaling-mscale-all-dim",
        0.0,
        MEGATRON,
        "YaRN: scale of the softmax",
        "`--mscale-all-dim`, beside --rope-scaling-type yarn",
        act=lambda args: "read by --rope-scaling-type",
    ),
    number(
        "--rope-scaling-original-max-position-embeddings",
        None,
        MEGATRON,
        "YaRN: positions of the model before",
        "original_max_position_embeddings of latent attention, beside --rope-scaling-type yarn",
        act=lambda args: "read by --rope-scaling-type",
    ),
    number(
        "--beta-fast",
        32,
        MEGATRON,
        "YaRN: rotations of the fast end",
        "beta_fast of latent attention",
        act=_to("beta_fast"),
        llm=True,
    ),
    number(
        "--beta-slow",
        1,
        MEGATRON,
        "YaRN: rotations of the slow end",
        "beta_slow of latent attention",
        act=_to("beta_slow"),
        llm=True,
    ),
    *(
        Flag(
            name,
            MEGATRON,
            "llama3: where frequencies change",
            "Megatron's --use-rope-scaling has it fixed; an error for another value",
            type=float,
            dest=dest,
            act=lambda args: "read by --rope-scaling-type",
            llm=True,
        )
        for name, dest in (
            ("--low-freq-factor", None),
            ("--high-freq-factor", None),
            ("--original-max-position-embeddings", "llama3_original_max_position_embeddings"),
        )
    ),
    *(
        Flag(
            name,
            OPTION,
            "a setting of `--rope-scaling-type longrope`",
            "read by it",
            type=kind,
            default=default,
            act=lambda args: "read by --rope-scaling-type longrope",
            shown_by="test_rope_scaling.py::test_longrope",
            llm=True,
        )
        for name, kind, default in (
            ("--longrope-freqs-type", str, "mul"),
            ("--long-factor", str, None),
            ("--short-factor", str, None),
            ("--long-mscale", float, None),
            ("--short-mscale", float, None),
        )
    ),
    number(
        "--partial-rotary-factor",
        0.0,
        MEGATRON,
        "the part of a head that is rotated",
        "`--rotary-percent`",
        act=_partial,
        shown_by="test_partial_and_dynamic_rotation",
        llm=True,
    ),
    number(
        "--dynamic-factor",
        1.0,
        MEGATRON,
        "a longer base for longer sequences",
        "`--rotary-base`, computed",
        act=_dynamic,
        shown_by="test_partial_and_dynamic_rotation",
        llm=True,
    ),
    number(
        "--query-pre-attn-scalar",
        None,
        MEGATRON,
        "scores times this to the power of -1/2",
        "softmax_scale of Megatron-core's configuration",
        act=_attention_scale,
        shown_by="test_the_scale_of_scores",
        llm=True,
    ),
    switch(
        "--geglu",
        MEGATRON,
        "GELU as the gate of the MLP",
        "gated_linear_unit and activation_func of Megatron-core's configuration",
        act=_gelu_gate("none"),
        shown_by="test_a_gate_of_gelu",
        llm=True,
    ),
    switch(
        "--gelu-tanh",
        MEGATRON,
        "GELU by its tanh formula as the gate of the MLP",
        "gated_linear_unit and activation_func of Megatron-core's configuration",
        act=_gelu_gate("tanh"),
        shown_by="test_a_gate_of_gelu",
        llm=True,
    ),
    switch("--use-triton-swiglu-limit", REFUSED, "the clamped gate as one kernel", "remove it", skip=True, llm=True),
    _absent("--no-post-layer-norm", "no norm after the last layer"),
    switch(
        "--use-glm-rope",
        MEGATRON,
        "GLM's rotation of neighbours in a part of a head",
        "`--rotary-interleaved`; the part is --rotary-percent's",
        act=_interleaved,
        shown_by="test_rotation_of_glm",
        llm=True,
    ),
    _absent("--share-kvstates", "layers share keys and values"),
    _absent("--input-layernorm-in-fp32", "the first norm of a layer in float32"),
    Flag(
        "--input-jitter",
        REFUSED,
        "noise on the router's input is left out",
        "remove it: Megatron has no noise without --moe-input-jitter-eps",
        action="store_false",
        default=True,
        llm=True,
    ),
    number(
        "--cla-share-factor",
        1,
        REFUSED,
        "layers that share keys and values",
        "Megatron-core has no such part; register layers with it by --spec",
        llm=True,
    ),
    Flag(
        "--fc-type", REFUSED, "how the MLP is built", "leave out --swiglu for an MLP without a gate", type=str, llm=True
    ),
]
"""Rows of the table."""
