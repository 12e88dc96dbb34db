"""The architectures of the table of plans: tiny, of two layers, with random weights, in float64 throughout.

Norms, softmax and losses that are written in float32 would round differently wherever a sum is taken in another order,
so modules of transformers are read anew with float64 in its place (:func:`in_float64`).
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import types
from typing import Any

import torch

ARCHITECTURES: dict[str, str] = {
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "bloom": "BloomForCausalLM",
    "bert": "BertForMaskedLM",
    "opt": "OPTForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "phi3": "Phi3ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "llama": "LlamaForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "falcon": "FalconForCausalLM",
    "t5": "T5ForConditionalGeneration",
    "vit": "ViTForImageClassification",
    "mamba": "MambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "granite": "GraniteForCausalLM",
    "gptj": "GPTJForCausalLM",
    "gpt_bigcode": "GPTBigCodeForCausalLM",
    "mpt": "MptForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "phimoe": "PhimoeForCausalLM",
    "minimax": "MiniMaxForCausalLM",
    "jamba": "JambaForCausalLM",
    "bamba": "BambaForCausalLM",
    "recurrent_gemma": "RecurrentGemmaForCausalLM",
    "rwkv": "RwkvForCausalLM",
    "roberta": "RobertaForMaskedLM",
    "distilbert": "DistilBertForMaskedLM",
    "albert": "AlbertForMaskedLM",
    "deberta_v2": "DebertaV2ForMaskedLM",
    "xlnet": "XLNetLMHeadModel",
    "bart": "BartForConditionalGeneration",
    "whisper": "WhisperForConditionalGeneration",
    "dinov2": "Dinov2ForImageClassification",
    "swin": "SwinForImageClassification",
    "convnext": "ConvNextForImageClassification",
    "clip": "CLIPModel",
    "wav2vec2": "Wav2Vec2ForSequenceClassification",
}
"""Type of the configuration -> class of the model."""

MIXTURES = (
    *("olmoe", "gpt_oss", "qwen2_moe", "deepseek_v3", "qwen3_next", "mixtral"),
    *("qwen3_moe", "granitemoe", "phimoe", "minimax", "jamba"),
)
"""Those that have experts."""

IMAGES, SIZE = ("vit", "dinov2", "swin", "convnext"), 16
MASKED = ("bert", "roberta", "distilbert", "albert", "deberta_v2")
EVALUATED = ("phimoe", "wav2vec2")
"""Those in evaluation mode, which has gradients too: in training one draws experts at random, and Dynamo breaks the
other where it sets ``requires_grad``."""

TOWER = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, projection_dim=16)

OWN: dict[str, dict[str, Any]] = {
    "bert": dict(type_vocab_size=2),
    "gemma3_text": dict(layer_types=["sliding_attention", "full_attention"]),
    "gpt_oss": dict(layer_types=["sliding_attention", "full_attention"]),
    "falcon": dict(alibi=False),
    "mamba2": dict(num_heads=8, head_dim=8, n_groups=2, state_size=8, chunk_size=8),
    "t5": dict(d_model=32, d_kv=8, d_ff=64, decoder_start_token_id=0, dropout_rate=0.0, num_decoder_layers=2),
    "vit": dict(image_size=SIZE, patch_size=4, num_labels=6),
    "qwen3_next": dict(
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    "nemotron": dict(num_key_value_heads=2),
    "granite": dict(embedding_multiplier=2.0, logits_scaling=2.0, residual_multiplier=0.5, attention_multiplier=0.25),
    "granitemoe": dict(embedding_multiplier=2.0, logits_scaling=2.0, residual_multiplier=0.5),
    "mpt": dict(d_model=32, n_heads=4, n_layers=2, max_seq_len=64),
    "phimoe": dict(router_jitter_noise=0.01),
    "minimax": dict(layer_types=["linear_attention", "full_attention"], block_size=8),
    "jamba": dict(
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=8,
        mamba_dt_rank=4,
    ),
    "bamba": dict(
        attn_layer_indices=[1],
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_n_groups=2,
        mamba_d_state=8,
        mamba_chunk_size=8,
    ),
    "recurrent_gemma": dict(block_types=["recurrent", "attention"], lru_width=32, attention_window_size=8),
    "rwkv": dict(attention_hidden_size=32, intermediate_size=64, context_length=32),
    "roberta": dict(type_vocab_size=2),
    "distilbert": dict(dim=32, hidden_dim=64, n_heads=4, n_layers=2),
    "deberta_v2": dict(
        relative_attention=True, pos_att_type=["c2p", "p2c"], max_relative_positions=16, position_buckets=8
    ),
    "xlnet": dict(d_model=32, n_head=4, n_layer=2, d_inner=64, mem_len=None, summary_last_dropout=0.0),
    "bart": dict(d_model=32, encoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64),
    "whisper": dict(
        d_model=32,
        encoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=32,
        decoder_start_token_id=1,
    ),
    "dinov2": dict(image_size=SIZE, patch_size=4, num_labels=6, mlp_ratio=2),
    "swin": dict(
        image_size=SIZE,
        patch_size=2,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        mlp_ratio=2.0,
        drop_path_rate=0.0,
        num_labels=6,
    ),
    "convnext": dict(
        num_stages=2, hidden_sizes=[16, 32], depths=[2, 2], layer_scale_init_value=1.0, image_size=SIZE, num_labels=6
    ),
    "clip": dict(
        text_config=dict(TOWER, vocab_size=64, max_position_embeddings=16, eos_token_id=2),
        vision_config=dict(TOWER, image_size=SIZE, patch_size=4),
        projection_dim=16,
    ),
    "wav2vec2": dict(
        conv_dim=[16, 16],
        conv_stride=[2, 2],
        conv_kernel=[4, 4],
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        classifier_proj_size=16,
        final_dropout=0.0,
        apply_spec_augment=False,
        num_labels=6,
    ),
}
"""What single architectures need besides small sizes."""


def in_float64(module: types.ModuleType) -> types.ModuleType:
    """A copy of a module of transformers in which float64 stands for float32."""
    name = f"{module.__name__}_float64"
    if name not in sys.modules:
        source = re.sub(r"torch\.float32\b|torch\.float\b(?!\()", "torch.float64", inspect.getsource(module)).replace(
            ".float()", ".double()"
        )
        copy = types.ModuleType(name)
        copy.__package__, copy.__file__ = module.__package__, module.__file__
        sys.modules[name] = copy
        exec(compile(source, module.__file__, "exec"), copy.__dict__)
    return sys.modules[name]


def configuration(name: str, **sizes: int) -> Any:
    """The configuration of ``name`` with small sizes, by the names that it has for them, and those given."""
    from transformers import AutoConfig

    from tests.zoo import architectures

    kind = name.replace("deberta_v2", "deberta-v2")
    default = AutoConfig.for_model(kind)
    small = {
        k: v
        for k, v in architectures.SMALL.items()
        if architectures.has(default, k) and not isinstance(getattr(type(default), k, None), property)
    }
    small = {k: v for k, v in small.items() if not (k in architectures.OPTIONAL and getattr(default, k) is None)}
    if "qk_rope_head_dim" in small and "head_dim" in small:
        small.update(head_dim=small["qk_rope_head_dim"], num_key_value_heads=small["num_attention_heads"])
    if name in ("swin", "convnext", "clip"):  # whose parts have sizes of their own
        small = {}
    else:
        small |= dict(hidden_size=32, vocab_size=64)
    return AutoConfig.for_model(kind, **small | OWN.get(name, {}) | sizes)


def build(name: str, **sizes: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A model whose call gives the loss, and the inputs of one step; ``sizes``: of the configuration."""
    config = configuration(name, **sizes)
    family = name.removesuffix("_text")
    module = in_float64(importlib.import_module(f"transformers.models.{family}.modeling_{family}"))
    losses = in_float64(importlib.import_module("transformers.loss.loss_utils"))
    torch.manual_seed(0)
    model = getattr(module, ARCHITECTURES[name])(config).double().train(name not in EVALUATED)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.05)  # biases and sinks begin as zeros
    model.config._experts_implementation = "batched_mm"
    if name in IMAGES:
        model.loss_function = losses.ForSequenceClassificationLoss
    else:
        model.loss_function = losses.ForMaskedLMLoss if name in MASKED else losses.ForCausalLMLoss
    ids = torch.randint(3, 60, (4, 16))
    labels = ids.roll(1, 0).masked_fill(torch.arange(16) < 3, -100)
    if name in IMAGES:
        return LossOfImages(model), dict(pixel_values=_random(4, 3, SIZE, SIZE), labels=torch.arange(4))
    if name == "clip":
        return LossOfPairs(model), dict(input_ids=ids, pixel_values=_random(4, 3, SIZE, SIZE))
    if name == "whisper":
        return LossOfSpectra(model), dict(input_features=_random(4, 8, 32), labels=labels)
    if name == "wav2vec2":
        return LossOfWaves(model), dict(input_values=_random(4, 66), labels=torch.arange(4))
    return Loss(model), dict(input_ids=ids, labels=labels)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class Loss(torch.nn.Module):
    """The loss alone of a model of transformers."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, labels=labels).loss


class LossOfImages(Loss):
    """The same of one that takes images."""

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.model(pixel_values=pixel_values, labels=labels).loss


class LossOfPairs(Loss):
    """Of one that tells which text belongs to which image."""

    def forward(self, input_ids: torch.Tensor, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, pixel_values=pixel_values, return_loss=True).loss


class LossOfSpectra(Loss):
    """Of one that writes down what it hears."""

    def forward(self, input_features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.model(input_features=input_features, labels=labels).loss


class LossOfWaves(Loss):
    """Of one that tells classes of sounds."""

    def forward(self, input_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.model(input_values=input_values, labels=labels).loss
