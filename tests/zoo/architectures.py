"""Causal language models of Hugging Face transformers with random weights, small enough to compile in seconds."""

from __future__ import annotations

import collections
from typing import Any

import torch

Output = collections.namedtuple("Output", "loss")
"""What models of other sources return, as transformers' do."""

SMALL: dict[str, Any] = dict(
    hidden_size=64,
    d_model=64,
    n_embd=64,
    embedding_size=64,
    word_embed_proj_dim=64,
    attention_hidden_size=64,
    num_hidden_layers=2,
    num_layers=2,
    n_layer=2,
    n_layers=2,
    decoder_layers=2,
    encoder_layers=2,
    num_attention_heads=4,
    num_heads=4,
    n_head=4,
    n_heads=4,
    decoder_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=96,
    ffn_dim=96,
    n_inner=96,
    ffn_hidden_size=96,
    decoder_ffn_dim=96,
    vocab_size=128,
    max_position_embeddings=64,
    n_positions=64,
    rotary_dim=8,
    sliding_window=8,
    kv_lora_rank=16,
    q_lora_rank=24,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=16,
    num_local_experts=4,
    num_experts=4,
    n_routed_experts=4,
    moe_num_experts=4,
    num_experts_per_tok=2,
    moe_k=2,
    n_shared_experts=1,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
    n_group=1,
    topk_group=1,
    decoder_sparse_step=1,
    first_k_dense_replace=1,
    num_nextn_predict_layers=0,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    use_cache=False,
    use_mamba_kernels=False,
    **dict.fromkeys(
        (
            "attention_dropout",
            "hidden_dropout",
            "attn_pdrop",
            "embd_pdrop",
            "resid_pdrop",
            "residual_dropout",
            "dropout",
            "hidden_dropout_prob",
            "attention_probs_dropout_prob",
            "activation_dropout",
            "layerdrop",
        ),
        0.0,
    ),
)
"""Sizes by the names that configurations use; dropout is off, so that two runs can be compared."""

OPTIONAL = ("n_inner", "head_dim", "sliding_window", "q_lora_rank", "num_key_value_heads")
"""Left alone where the configuration says None, which means something else than a number."""

OWN: dict[str, dict[str, Any]] = {
    "cohere_compass_text": dict(rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 1e4}}),
    "dbrx": dict(
        attn_config=dict(kv_n_heads=2, rope_theta=1e4, clip_qkv=8.0),
        ffn_config=dict(ffn_hidden_size=96, moe_num_experts=4, moe_top_k=2),
    ),
    "gemma3n_text": dict(
        num_kv_shared_layers=0,
        layer_types=["sliding_attention", "full_attention"],
        activation_sparsity_pattern=[0.0, 0.0],
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=128,
        laurel_rank=8,
    ),
    "gemma4_text": dict(
        num_kv_shared_layers=0,
        layer_types=["sliding_attention", "full_attention"],
        head_dim=16,
        global_head_dim=16,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=128,
    ),
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]], window_size=8),
    "hunyuan_v1_dense": dict(head_dim=16),
    "hunyuan_v1_moe": dict(head_dim=16),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"], num_dense_layers=1),
    "mamba2": dict(num_heads=8, head_dim=16, n_groups=2, state_size=16, chunk_size=8),
    "ministral": dict(head_dim=16),
    "nemotron": dict(num_key_value_heads=2),
    "reformer": dict(
        is_decoder=True,
        local_attention_probs_dropout_prob=0.0,
        lsh_attention_probs_dropout_prob=0.0,
        axial_pos_embds=False,
        attn_layers=["local", "local"],
        local_attn_chunk_length=8,
        attention_head_size=16,
        feed_forward_size=96,
    ),
    "zamba": dict(
        layers_block_type=["linear_attention", "hybrid"] * 2,
        num_hidden_layers=4,
        attention_hidden_size=128,
        attention_head_dim=32,
        mamba_dt_rank=8,
    ),
    "zamba2": dict(
        layers_block_type=["linear_attention", "hybrid"],
        attention_hidden_size=128,
        attention_head_dim=32,
        n_mamba_heads=8,
        mamba_headdim=16,
        mamba_d_state=16,
        chunk_size=8,
    ),
    "xmod": dict(default_language="en_XX"),
}
"""What single architectures need besides."""


def names() -> list[str]:
    """Every causal language model that transformers knows by name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def build(name: str, attention: str = "eager") -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model in training mode, in float64 where its operators have it and else in float32, and inputs of one step."""
    from transformers import AutoConfig, AutoModelForCausalLM

    default = AutoConfig.for_model(name)
    if not set(default.sub_configs) <= {"attn_config", "ffn_config"}:
        raise ValueError(f"made of several models: {', '.join(default.sub_configs)}")
    small = known_sizes(default, SMALL)
    if "qk_rope_head_dim" in small and "head_dim" in small:
        # Multi-head latent attention: head_dim is the part that is rotated, and no heads are shared.
        small.update(head_dim=small["qk_rope_head_dim"], num_key_value_heads=small["num_attention_heads"])
    small |= OWN.get(name, {})
    torch.manual_seed(0)
    model = (
        AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **small), attn_implementation=attention)
        .double()
        .train()
    )
    ids = torch.randint(3, 100, (2, 16))
    return as_wide(model, dict(input_ids=ids, labels=ids.clone(), use_cache=False))


def as_wide(model: torch.nn.Module, inputs: dict[str, Any]) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model in float64 and its inputs; both in float32 where its operators have no float64."""
    try:
        model(**inputs)
    except RuntimeError as error:
        if "ouble" not in str(error) and "converted to type float" not in str(error):
            raise
        wide = {k: v.float() for k, v in inputs.items() if torch.is_tensor(v) and v.is_floating_point()}
        return model.float(), inputs | wide
    return model, inputs


def known_sizes(config: Any, sizes: dict[str, Any]) -> dict[str, Any]:
    """Those of ``sizes`` that a configuration has under their names, and does not say None of or compute."""
    known = {k: v for k, v in sizes.items() if has(config, k) and not (k in OPTIONAL and getattr(config, k) is None)}
    return {k: v for k, v in known.items() if not isinstance(getattr(type(config), k, None), property)}


def has(config: Any, name: str) -> bool:
    """Whether a configuration knows a name."""
    try:
        return hasattr(config, name)
    except Exception:  # noqa: BLE001  an attribute that differs by layer and is asked of all
        return False


def every(sources: dict[str, str]) -> list[str]:
    """All architectures: transformers', Megatron-core's where it is installed, and those of ``sources`` (name ->
    folder).
    """
    from tests.zoo import modalities, others

    return [*names(), *modalities.names(), *others.names(sources)]


def made(name: str, sources: dict[str, str]) -> tuple[torch.nn.Module, dict[str, Any]]:
    """:func:`build` of an architecture of any source."""
    from tests.zoo import modalities, others

    if name.split("/")[0] in modalities.TASKS:
        return modalities.build(name)
    return others.build(name, sources) if "/" in name else build(name)
