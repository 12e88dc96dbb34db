"""Models of timm: one step of training in small sizes."""

from __future__ import annotations

from typing import Any

import torch

from tests.scenarios.steps import infer, train, widen_batch_normed
from tests.scenarios.table import scenario

SMALL = dict(embed_dim=32, depth=2, num_heads=4, patch_size=8, img_size=32)
MODELS: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": SMALL,
    "deit3_small_patch16_224": SMALL,
    "beit_base_patch16_224": SMALL,
    "eva02_tiny_patch14_224": SMALL,
    "vit_base_patch16_siglip_224": SMALL,
    "resmlp_12_224": dict(embed_dim=32, num_blocks=2, patch_size=8, img_size=32),
    "cait_xxs24_224": dict(SMALL, depth_token_only=1),
    "xcit_nano_12_p16_224": dict(embed_dim=32, depth=2, num_heads=4, img_size=32, patch_size=8),
    "swin_tiny_patch4_window7_224": dict(
        embed_dim=16, depths=(2, 2), num_heads=(2, 4), img_size=32, window_size=4, patch_size=2
    ),
    "convnext_atto": dict(depths=(1, 1, 1, 1), dims=(8, 16, 16, 32)),
    "convnextv2_atto": dict(depths=(1, 1, 1, 1), dims=(8, 16, 16, 32)),
    "poolformer_s12": dict(depths=(1, 1, 1, 1), dims=(8, 16, 16, 32)),
    "resnet10t": {},
    "resnet18": {},
    "mobilenetv3_small_050": {},
    "tinynet_e": {},
    "regnetx_002": {},
    "ghostnet_050": dict(drop_rate=0.0),
    "densenet121": dict(growth_rate=4, block_config=(1, 1, 1, 1)),
    "levit_128s": dict(img_size=64, embed_dim=(32, 48, 64), depth=(1, 1, 1), num_heads=(2, 3, 4), key_dim=8),
    "pvt_v2_b0": dict(depths=(1, 1, 1, 1)),
    "mobilevitv2_050": {},
    "edgenext_xx_small": {},
}


FIXED = ("resmlp_12_224", "poolformer_s12")
"""Names whose sizes timm does not let one choose: their classes are called as the names call them."""


def preload() -> None:
    import timm  # noqa: F401


def small(name: str) -> torch.nn.Module:
    """A model of ``FIXED`` in small sizes."""
    from timm.models import metaformer, mlp_mixer

    if name == "resmlp_12_224":
        how = dict(mlp_ratio=4, block_layer=mlp_mixer.ResBlock, norm_layer=mlp_mixer.Affine)
        return mlp_mixer.MlpMixer(num_classes=6, **how, **MODELS[name])
    how = dict(downsample_norm=None, mlp_act=torch.nn.GELU, mlp_bias=True, norm_layers=metaformer.GroupNorm1)
    how |= dict(layer_scale_init_values=1e-5, res_scale_init_values=None, use_mlp_head=False)
    return metaformer.MetaFormer(num_classes=6, **how, **MODELS[name])


@scenario("timm/{}", MODELS)
def run_timm(run: Any, name: str) -> Any:
    import timm

    how = MODELS[name]
    model = (small(name) if name in FIXED else timm.create_model(name, num_classes=6, **how)).train()
    size = how.get("img_size", 64)
    labels = torch.arange(4)
    model, images = widen_batch_normed(model, torch.randn(4, 3, size, size))
    return train(run, model, (images,), lr=0.01, loss=lambda out: torch.nn.functional.cross_entropy(out, labels))


@scenario("timm/evaluation/{}", ("vit_tiny_patch16_224", "resnet10t"))
def run_timm_evaluation(run: Any, name: str) -> Any:
    import timm

    how = MODELS[name]
    size = how.get("img_size", 64)
    return infer(run, timm.create_model(name, num_classes=6, **how), (torch.randn(2, 3, size, size),))
