"""Small configurations of transformers' models by type."""

from __future__ import annotations

from typing import Any

from tests.zoo.architectures import OPTIONAL, OWN, SMALL, has

EXTRA: dict[str, Any] = dict(
    dim=64,
    hidden_dim=96,
    d_ff=96,
    d_inner=96,
    d_kv=16,
    inner_dim=96,
    encoder_attention_heads=4,
    encoder_ffn_dim=96,
    num_decoder_layers=2,
    num_encoder_layers=2,
    block_size=8,
    image_size=32,
    patch_size=8,
    num_mel_bins=16,
    type_vocab_size=2,
    num_labels=6,
    projection_dim=32,
    dropout_rate=0.0,
    classifier_dropout=0.0,
    classifier_dropout_prob=0.0,
    emb_dropout=0.0,
    embedding_dropout=0.0,
    embed_dropout=0.0,
    mlp_dropout=0.0,
    qkv_dropout=0.0,
    attention_dropout_prob=0.0,
    attn_dropout=0.0,
    feat_proj_dropout=0.0,
    final_dropout=0.0,
    dropout_prob=0.0,
    drop_path_rate=0.0,
    summary_last_dropout=0.0,
    summary_first_dropout=0.0,
    encoder_layerdrop=0.0,
    decoder_layerdrop=0.0,
    apply_spec_augment=False,
    initializer_range=0.1,
)
"""Names that encoders, vision and audio models have besides those of the zoo."""


def small(kind: str, **own: Any) -> Any:
    """The configuration of ``kind`` in small sizes, by the names that it has for them; parts alike."""
    from transformers import AutoConfig

    default = AutoConfig.for_model(kind)
    values = sizes(default) | OWN.get(kind, {}) | own
    for part in default.sub_configs:
        inner = getattr(default, part, None)
        if part not in own and inner is not None and hasattr(inner, "to_dict"):
            values[part] = {**inner.to_dict(), **sizes(inner)}
    return AutoConfig.for_model(kind, **values)


def sizes(default: Any) -> dict[str, Any]:
    values = {
        k: v
        for k, v in (SMALL | EXTRA).items()
        if has(default, k)
        and not isinstance(getattr(type(default), k, None), property)
        and not (k in OPTIONAL and getattr(default, k) is None)
        and not isinstance(getattr(default, k), (list, tuple))
    }
    if "qk_rope_head_dim" in values and "head_dim" in values:
        values.update(head_dim=values["qk_rope_head_dim"], num_key_value_heads=values["num_attention_heads"])
    return values
