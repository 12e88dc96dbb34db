"""Models of transformers that are no causal language models: vision, audio, sequences to sequences, images with text;
tiny and with random weights, in one training step.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo import images
from tests.zoo.architectures import SMALL, has, known_sizes

IMAGE, PATCH, SAMPLES = 32, 8, 1600
VISION: dict[str, Any] = dict(
    image_size=IMAGE,
    patch_size=PATCH,
    num_channels=3,
    depths=[1, 1],
    hidden_sizes=[64, 64],
    drop_path_rate=0.0,
    classifier_dropout_prob=0.0,
    projection_dim=64,
    pooler_dropout=0.0,
)
AUDIO: dict[str, Any] = dict(
    conv_dim=[32, 32],
    conv_kernel=[10, 4],
    conv_stride=[5, 4],
    num_feat_extract_layers=2,
    feat_extract_norm="layer",
    num_conv_pos_embeddings=16,
    num_conv_pos_embedding_groups=4,
    classifier_proj_size=32,
    mask_time_prob=0.0,
    mask_feature_prob=0.0,
    feat_proj_dropout=0.0,
    final_dropout=0.0,
    num_mel_bins=16,
    max_source_positions=40,
    max_target_positions=40,
    encoder_ffn_dim=96,
    encoder_attention_heads=4,
    apply_spec_augment=False,
    max_length=64,
)
TEXT: dict[str, Any] = dict(
    decoder_start_token_id=1,
    num_decoder_layers=2,
    d_ff=96,
    d_kv=16,
    dropout_rate=0.0,
    encoder_ffn_dim=96,
    encoder_attention_heads=4,
    max_source_positions=64,
    max_target_positions=64,
)
COMPUTED = ("num_attention_heads", "num_hidden_layers", "num_layers", "hidden_size")
"""Other names of what Swin's configuration has in lists: None leaves a size out."""

OWN: dict[str, dict[str, Any]] = {
    "audio/audio-spectrogram-transformer": dict(patch_size=8, frequency_stride=8, time_stride=8),
    "vision/swin": dict(embed_dim=32, num_heads=[2, 4], window_size=2, patch_size=4, **dict.fromkeys(COMPUTED)),
    "vision/swinv2": dict(embed_dim=32, num_heads=[2, 4], window_size=2, patch_size=4, **dict.fromkeys(COMPUTED)),
    "multimodal/llava": dict(image_seq_length=16, image_token_id=5, image_token_index=5),
    "multimodal/gemma3": dict(mm_tokens_per_image=4, image_token_id=5, image_token_index=5),
    "multimodal/paligemma": dict(image_token_id=5, image_token_index=5),
    "multimodal/internvl": dict(image_token_id=5, image_seq_length=4),
    "multimodal/aya_vision": dict(image_token_index=5, image_token_id=5),
    "multimodal/smolvlm": dict(image_token_id=5, scale_factor=2),
    "multimodal/idefics3": dict(image_token_id=5, scale_factor=2),
    "multimodal/cohere2_vision": dict(image_token_id=5),
    "multimodal/got_ocr2": dict(image_token_id=5, image_token_index=5),
    "vision/pvt_v2": dict(num_attention_heads=[1, 2, 4, 8], hidden_sizes=[16, 32, 64, 64], depths=[1, 1, 1, 1]),
    "vision/segformer": dict(num_attention_heads=[1, 2, 4, 8], hidden_sizes=[16, 32, 64, 64], depths=[1, 1, 1, 1]),
}
"""What single architectures need besides."""

NOTES = dict.fromkeys(
    ("vision/clip", "vision/siglip", "vision/metaclip_2"),
    "layer_norm: 1 of the pooled output, which no loss reads, so that no graph has it",
)

IMAGE_TOKENS = {"llava": 16, "gemma3": 4, "paligemma": 16, "internvl": 4, "aya_vision": 4, "smolvlm": 4, "idefics3": 4,
                "cohere2_vision": 4, "got_ocr2": 1}  # fmt: skip
"""Tokens of an image of :data:`IMAGE` in the text of each model of images and text."""

VISIONS = ("vit", "beit", "dinov2", "dinov2_with_registers", "ijepa", "vit_msn", "data2vec-vision", "siglip",
           "clip", "swin", "swinv2", "convnext", "convnextv2", "pvt_v2", "segformer", "metaclip_2")  # fmt: skip
AUDIOS = ("wav2vec2", "hubert", "wavlm", "unispeech", "unispeech-sat", "data2vec-audio", "wav2vec2-conformer", "sew",
          "audio-spectrogram-transformer", "whisper")  # fmt: skip
SEQUENCES = ("t5", "mt5", "umt5", "longt5", "marian", "m2m_100", "mbart", "bart", "pegasus", "pegasus_x", "led",
             "switch_transformers", "t5gemma", "blenderbot", "plbart", "mvp", "nllb-moe", "prophetnet")  # fmt: skip
MASKED = ("modernbert", "bert", "roberta", "xlm-roberta", "deberta", "deberta-v2", "albert", "distilbert", "mpnet",
          "electra", "esm", "nomic_bert", "eurobert", "camembert", "mobilebert", "roformer", "ernie",
          "rembert")  # fmt: skip
TASKS = {"vision": VISIONS, "audio": AUDIOS, "seq2seq": SEQUENCES, "masked": MASKED,
         "multimodal": (*IMAGE_TOKENS, *images.OWN)}  # fmt: skip


def names() -> list[str]:
    return [f"{task}/{kind}" for task, kinds in TASKS.items() for kind in kinds]


def build(name: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model in training mode, in float64 where its operators have it, and inputs of one step."""
    import transformers

    task, kind = name.split("/", 1)
    if task == "multimodal" and kind in images.OWN:
        return images.build(kind)
    auto, sizes = {
        "vision": (transformers.AutoModelForImageClassification, VISION),
        "audio": (transformers.AutoModelForAudioClassification, AUDIO),
        "seq2seq": (transformers.AutoModelForSeq2SeqLM, TEXT),
        "masked": (transformers.AutoModelForMaskedLM, TEXT),
        "multimodal": (transformers.AutoModelForImageTextToText, VISION),
    }[task]
    torch.manual_seed(0)
    config = _config(kind, {**SMALL, **sizes, **OWN.get(name, {})}, OWN.get(name, {}))
    if task == "seq2seq":
        config.decoder_start_token_id = 1
    model = auto.from_config(config, attn_implementation="eager").double().train()
    inputs = _inputs(task, config)
    if task == "multimodal":
        inputs["input_ids"][:, 1 : 1 + IMAGE_TOKENS[kind]] = 5
        inputs["pixel_values"] = torch.randn(2, *[1] * (kind in ("smolvlm", "idefics3")), 3, IMAGE, IMAGE).double()
    return model, inputs


def _config(kind: str, sizes: dict[str, Any], own: dict[str, Any]) -> Any:
    """The configuration of ``kind``, every part of it small."""
    from transformers import AutoConfig

    default = AutoConfig.for_model(kind)
    sizes, own = ({k: v for k, v in d.items() if v is not None or k not in own} for d in (sizes, own))
    parts = {p: known_sizes(getattr(default, p), sizes) for p in default.sub_configs if has(default, p)}
    return AutoConfig.for_model(kind, **{**known_sizes(default, sizes), **own, **parts})


def _inputs(task: str, config: Any) -> dict[str, Any]:
    if task == "vision":
        return dict(pixel_values=torch.randn(2, 3, IMAGE, IMAGE).double(), labels=torch.tensor([0, 1]))
    if task == "audio" and hasattr(config, "num_mel_bins"):
        frames = getattr(config, "max_length", None) or 2 * config.max_source_positions
        whisper = config.model_type == "whisper"
        frames = 2 * config.max_source_positions if whisper else frames
        shape = (2, config.num_mel_bins, frames) if whisper else (2, frames, config.num_mel_bins)
        key = "input_features" if whisper else "input_values"
        return {key: torch.randn(shape).double(), "labels": torch.tensor([0, 1])}
    if task == "audio":
        return dict(input_values=torch.randn(2, SAMPLES).double(), labels=torch.tensor([0, 1]))
    ids = torch.randint(6, 100, (2, 24))
    return dict(input_ids=ids, labels=ids.clone(), attention_mask=torch.ones_like(ids))
