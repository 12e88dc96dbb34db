"""Vision models of transformers: two steps of training with labels."""

from __future__ import annotations

from typing import Any

import torch

from tests.scenarios import configs
from tests.scenarios.steps import train
from tests.scenarios.table import scenario

WIDTHS = dict(hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1])
CLASSIFIERS: dict[str, dict[str, Any]] = {
    "vit": {},
    "deit": dict(architectures=["DeiTForImageClassification"]),
    "beit": dict(use_relative_position_bias=True),
    "data2vec-vision": {},
    "dinov2": dict(mlp_ratio=2),
    "dinov2_with_registers": dict(mlp_ratio=2),
    "ijepa": {},
    "vit_msn": {},
    "swin": dict(embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=4, patch_size=2),
    "swinv2": dict(embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=4, patch_size=2),
    "convnext": dict(WIDTHS, num_hidden_layers=4, patch_size=4, layer_scale_init_value=1.0),
    "convnextv2": dict(WIDTHS, num_hidden_layers=4, patch_size=4),
    "resnet": dict(WIDTHS, embedding_size=8, layer_type="basic"),
    "regnet": dict(WIDTHS, embedding_size=8, groups_width=8),
    "bit": dict(hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], embedding_size=8, num_groups=4),
    "mobilenet_v1": dict(depth_multiplier=0.25),
    "mobilenet_v2": dict(depth_multiplier=0.25),
    "poolformer": dict(hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1]),
    "pvt": dict(
        hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 2], patch_sizes=[4, 2, 2, 2]
    ),
    "pvt_v2": dict(hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 2]),
    "segformer": dict(
        hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 2], decoder_hidden_size=16
    ),
    "focalnet": dict(embed_dim=16, depths=[1, 1], focal_levels=[1, 1], focal_windows=[3, 3], patch_size=4),
    "hiera": dict(
        embed_dim=16,
        depths=[1, 1],
        num_heads=[1, 2],
        image_size=[32, 32],
        masked_unit_size=[4, 4],
        query_stride=[2, 2],
        num_query_pool=1,
    ),
    "mobilevit": dict(hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 64]),
    "levit": dict(
        hidden_sizes=[16, 24, 32],
        depths=[1, 1, 1],
        num_attention_heads=[2, 2, 2],
        key_dim=[8, 8, 8],
        image_size=64,
        patch_size=16,
        drop_path_rate=0,
        architectures=["LevitForImageClassification"],
    ),
}
BATCH_NORMED = ("resnet", "regnet", "bit", "mobilenet_v1", "mobilenet_v2", "mobilevit", "levit")
"""In float64: norms over few values make much of rounding; with float32 eager PyTorch itself is 2 % off gradients."""


@scenario("transformers/vision/{}", CLASSIFIERS)
def run_classifier(run: Any, kind: str) -> Any:
    from transformers import AutoModelForImageClassification

    config = configs.small(kind, num_labels=6, **CLASSIFIERS[kind])
    model = AutoModelForImageClassification.from_config(config).train()
    model.config.problem_type = "single_label_classification"  # the first step would set it, the second compile anew
    inputs = dict(pixel_values=torch.randn(2, 3, 32, 32))
    if kind in BATCH_NORMED:
        model, inputs = model.double(), dict(pixel_values=torch.randn(4, 3, 64, 64).double())
    if kind == "levit":
        return train(run, model, inputs, lr=0.01)
    return train(run, model, inputs | dict(labels=torch.arange(len(inputs["pixel_values"]))), lr=0.01)


@scenario("transformers/vision/masked_autoencoder")
def run_mae(run: Any) -> Any:
    from transformers import ViTMAEForPreTraining

    config = configs.small(
        "vit_mae",
        decoder_hidden_size=32,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=4,
        decoder_intermediate_size=64,
        norm_pix_loss=False,
    )
    model = ViTMAEForPreTraining(config).train()
    return train(run, model, dict(pixel_values=torch.randn(2, 3, 32, 32), noise=torch.rand(2, 16)))


@scenario("transformers/vision/segmentation")
def run_segformer(run: Any) -> Any:
    from transformers import SegformerForSemanticSegmentation

    model = SegformerForSemanticSegmentation(
        configs.small("segformer", num_labels=6, **CLASSIFIERS["segformer"])
    ).train()
    labels = torch.randint(0, 6, (2, 32, 32))
    return train(run, model, dict(pixel_values=torch.randn(2, 3, 32, 32), labels=labels), lr=0.01)


@scenario("transformers/vision/yolos")
def run_yolos(run: Any) -> Any:
    from transformers import YolosModel

    model = YolosModel(configs.small("yolos", image_size=[32, 32], num_detection_tokens=4)).train()
    return train(run, model, dict(pixel_values=torch.randn(2, 3, 32, 32)), lr=0.01)
