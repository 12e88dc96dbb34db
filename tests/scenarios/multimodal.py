"""Models of transformers that take text and images."""

from __future__ import annotations

from typing import Any

import torch

from tests.scenarios import configs
from tests.scenarios.steps import train
from tests.scenarios.table import scenario

IDS = dict(vocab_size=128, max_position_embeddings=64)


def tower(**own: Any) -> dict[str, Any]:
    return dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4) | own


def ids(rows: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(3, 100, (rows, length), generator=torch.Generator().manual_seed(1))


@scenario(
    "transformers/pairs/{}",
    ("clip", "siglip", "chinese_clip", "altclip", "blip", "clipseg", "metaclip_2", "siglip2_text"),
)
def run_pairs(run: Any, kind: str) -> Any:
    import transformers

    names = dict(
        clip="CLIP",
        siglip="Siglip",
        chinese_clip="ChineseCLIP",
        altclip="AltCLIP",
        blip="Blip",
        clipseg="CLIPSeg",
        metaclip_2="MetaClip2",
        siglip2_text="Siglip2Text",
    )
    text = tower(
        **IDS,
        projection_dim=16,
        attention_dropout=0.0,
        eos_token_id=2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=1,
        bos_token_id=0,
    )
    if kind == "siglip2_text":
        config = transformers.Siglip2TextConfig(**tower(**IDS))
        return train(run, transformers.Siglip2TextModel(config).train(), dict(input_ids=ids()))
    vision = tower(image_size=32, patch_size=8, projection_dim=16)
    config = getattr(transformers, f"{names[kind]}Config")(text_config=text, vision_config=vision, projection_dim=16)
    model = getattr(transformers, f"{names[kind]}Model")(config).train()
    inputs = dict(input_ids=ids(), pixel_values=torch.randn(2, 3, 32, 32), return_loss=True)
    return train(run, model, inputs)


@scenario(
    "transformers/multimodal/{}", ("llava", "paligemma", "idefics3", "qwen2_vl", "gemma3", "internvl", "git", "vilt")
)
def run_multimodal(run: Any, kind: str) -> Any:
    return train(run, *_build(kind))


def _build(kind: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    import transformers

    text = tower(**IDS, num_key_value_heads=2, head_dim=8, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    vision = tower(image_size=32, patch_size=8)
    tokens, image = ids(), torch.randn(2, 3, 32, 32)
    tokens[:, :] = tokens.clamp(max=99)
    if kind == "git":
        config = transformers.GitConfig(
            vision_config=vision,
            **tower(**IDS),
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            bos_token_id=1,
            eos_token_id=2,
        )
        return transformers.GitForCausalLM(config).train(), dict(input_ids=tokens, pixel_values=image, labels=tokens)
    if kind == "vilt":
        model = transformers.ViltModel(configs.small("vilt", max_image_length=16)).train()
        return model, dict(input_ids=tokens, pixel_values=image)
    if kind == "qwen2_vl":
        config = transformers.Qwen2VLConfig(
            text_config=tower(
                **IDS,
                num_key_value_heads=2,
                rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 2]),
            ),
            vision_config=dict(embed_dim=32, depth=1, num_heads=4, mlp_ratio=2, patch_size=4, hidden_size=32),
            image_token_id=120,
            vision_start_token_id=121,
            vision_end_token_id=122,
        )
        tokens[:, 2:6], tokens[:, 1] = 120, 121
        return transformers.Qwen2VLForConditionalGeneration(config).train(), dict(
            input_ids=tokens,
            pixel_values=torch.randn(32, 3 * 2 * 16),
            image_grid_thw=torch.tensor([[1, 4, 4]] * 2),
            labels=tokens.clamp(max=99),
            attention_mask=torch.ones_like(tokens),
            mm_token_type_ids=(tokens == 120).int(),
        )
    if kind == "idefics3":
        config = transformers.Idefics3Config(
            text_config=dict(text, model_type="llama"), vision_config=vision, image_token_id=120, scale_factor=2
        )
        tokens[:, 2:6] = 120
        return transformers.Idefics3ForConditionalGeneration(config).train(), dict(
            input_ids=tokens, pixel_values=image[:, None], labels=tokens.clamp(max=99)
        )
    inputs = dict(input_ids=tokens, pixel_values=image, labels=tokens.clamp(max=99))
    if kind == "llava":
        tokens[:, 0:4] = 0
        tokens = torch.cat([torch.full((2, 16), 120), tokens], 1)
        config = transformers.LlavaConfig(
            text_config=dict(text, model_type="llama"),
            vision_config=dict(vision, model_type="clip_vision_model"),
            image_token_id=120,
            vision_feature_layer=-1,
        )
        inputs |= dict(input_ids=tokens, labels=tokens.clamp(max=99))
        return transformers.LlavaForConditionalGeneration(config).train(), inputs
    if kind == "internvl":
        config = transformers.InternVLConfig(
            text_config=dict(text, model_type="qwen2"),
            image_token_id=120,
            downsample_ratio=0.5,
            vision_config=tower(
                image_size=[32, 32], patch_size=[8, 8], hidden_dropout_prob=0.0, projection_dropout=0.0
            ),
        )
        tokens = torch.cat([torch.full((2, 4), 120), tokens], 1)
        inputs |= dict(input_ids=tokens, labels=tokens.clamp(max=99))
        return transformers.InternVLForConditionalGeneration(config).train(), inputs
    if kind == "gemma3":
        config = transformers.Gemma3Config(
            text_config=dict(text, sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
            vision_config=dict(vision, model_type="siglip_vision_model"),
            mm_tokens_per_image=4,
            image_token_index=120,
            image_token_id=120,
            boi_token_index=121,
            eoi_token_index=122,
        )
        tokens = torch.cat([torch.full((2, 4), 120), tokens], 1)
        inputs |= dict(input_ids=tokens, labels=tokens.clamp(max=99), token_type_ids=(tokens == 120).long())
        return transformers.Gemma3ForConditionalGeneration(config).train(), inputs
    config = transformers.PaliGemmaConfig(
        text_config=dict(text, model_type="gemma"),
        vision_config=dict(vision, model_type="siglip_vision_model"),
        image_token_index=120,
        image_token_id=120,
        projection_dim=32,
        hidden_size=32,
    )
    tokens = torch.cat([torch.full((2, 16), 120), tokens], 1)
    inputs |= dict(input_ids=tokens, labels=tokens.clamp(max=99), token_type_ids=(tokens != 120).long())
    return transformers.PaliGemmaForConditionalGeneration(config).train(), inputs


@scenario(
    "transformers/documents/{}", ("layoutlmv2_text", "layoutlmv3", "markuplm", "lxmert", "visual_bert", "perceiver")
)
def run_documents(run: Any, kind: str) -> Any:
    import transformers

    tokens = ids()
    boxes = torch.randint(0, 50, (2, 12, 4)).sort(-1).values[..., [0, 1, 2, 3]]
    if kind == "layoutlmv3":
        config = configs.small(
            "layoutlmv3",
            input_size=32,
            visual_embed=False,
            coordinate_size=8,
            shape_size=16,
            max_2d_position_embeddings=64,
        )
        model = transformers.LayoutLMv3Model(config)
        return train(run, model, dict(input_ids=tokens, bbox=boxes))
    if kind == "layoutlmv2_text":
        model = transformers.LayoutLMModel(configs.small("layoutlm", max_2d_position_embeddings=64))
        return train(run, model, dict(input_ids=tokens, bbox=boxes))
    if kind == "markuplm":
        return train(run, transformers.MarkupLMModel(configs.small("markuplm", max_depth=4)), dict(input_ids=tokens))
    if kind == "visual_bert":
        model = transformers.VisualBertModel(configs.small("visual_bert", visual_embedding_dim=16))
        visual = torch.randn(2, 3, 16)
        return train(run, model, dict(input_ids=tokens, visual_embeds=visual, visual_attention_mask=torch.ones(2, 3)))
    if kind == "perceiver":
        config = configs.small(
            "perceiver",
            d_model=32,
            max_position_embeddings=12,
            d_latents=32,
            num_latents=8,
            num_self_attends_per_block=1,
            num_self_attention_heads=4,
            num_cross_attention_heads=4,
        )
        return train(run, transformers.PerceiverForMaskedLM(config), dict(inputs=tokens, labels=tokens))
    config = configs.small("lxmert", l_layers=1, x_layers=1, r_layers=1, visual_feat_dim=16)
    model = transformers.LxmertModel(config)
    visual = dict(visual_feats=torch.randn(2, 3, 16), visual_pos=torch.rand(2, 3, 4))
    return train(run, model, dict(input_ids=tokens, **visual))
