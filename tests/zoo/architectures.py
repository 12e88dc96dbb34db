"""Causal language models of Hugging Face transformers with random weights, small enough to compile in seconds."""

from __future__ import annotations

from typing import Any

import torch

SMALL: dict[str, Any] = dict(
    hidden_size=64, d_model=64, n_embd=64, embedding_size=64, word_embed_proj_dim=64, attention_hidden_size=64,
    num_hidden_layers=2, num_layers=2, n_layer=2, n_layers=2, decoder_layers=2, encoder_layers=2,
    num_attention_heads=4, num_heads=4, n_head=4, n_heads=4, decoder_attention_heads=4, num_key_value_heads=2, head_dim=16,
    intermediate_size=96, ffn_dim=96, n_inner=96, ffn_hidden_size=96, decoder_ffn_dim=96,
    vocab_size=128, max_position_embeddings=64, n_positions=64, rotary_dim=8, sliding_window=8,
    kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
    num_local_experts=4, num_experts=4, n_routed_experts=4, moe_num_experts=4, num_experts_per_tok=2, moe_k=2, n_shared_experts=1,
    moe_intermediate_size=32, shared_expert_intermediate_size=32, n_group=1, topk_group=1, decoder_sparse_step=1, first_k_dense_replace=1,
    num_nextn_predict_layers=0, pad_token_id=0, bos_token_id=1, eos_token_id=2, use_cache=False, use_mamba_kernels=False,
    **{name: 0.0 for name in ("attention_dropout", "hidden_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "dropout", "hidden_dropout_prob",
                              "attention_probs_dropout_prob", "activation_dropout", "layerdrop")},
)  # fmt: skip
"""Sizes by the names that configurations use; dropout is off, so that two runs can be compared."""

OPTIONAL = ("n_inner", "head_dim", "sliding_window", "q_lora_rank", "num_key_value_heads")
"""Left alone where the configuration says None, which means something else than a number."""


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
    small = {k: v for k, v in SMALL.items() if hasattr(default, k) and not (k in OPTIONAL and getattr(default, k) is None)}
    small = {k: v for k, v in small.items() if not isinstance(getattr(type(default), k, None), property)}
    if "qk_rope_head_dim" in small and "head_dim" in small:
        # Multi-head latent attention: head_dim is the part that is rotated, and no heads are shared.
        small.update(head_dim=small["qk_rope_head_dim"], num_key_value_heads=small["num_attention_heads"])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **small), attn_implementation=attention).double().train()
    ids = torch.randint(3, 100, (2, 16))
    inputs = dict(input_ids=ids, labels=ids.clone(), use_cache=False)
    try:
        model(**inputs)
    except RuntimeError as error:
        if "ouble" not in str(error):
            raise
        model = model.float()
    return model, inputs
