"""Models of torchvision. PyPI's wheel is built for another torch, and its compiled operators (nms, roi_align) are not
loaded: models that need none of them run.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.scenarios.steps import train, widen_batch_normed
from tests.scenarios.table import scenario

MODELS: dict[str, dict[str, Any]] = {
    "resnet18": {},
    "squeezenet1_1": dict(dropout=0.0),
    "shufflenet_v2_x0_5": {},
    "mobilenet_v3_small": dict(dropout=0.0),
    "mnasnet0_5": dict(dropout=0.0),
    "VisionTransformer": dict(image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=64),
    "SwinTransformer": dict(
        patch_size=[2, 2], embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=[4, 4], stochastic_depth_prob=0.0
    ),
}


def preload() -> None:
    import torchvision  # noqa: F401


@scenario("torchvision/{}", MODELS)
def run_torchvision(run: Any, name: str) -> Any:
    from torchvision import models

    model = getattr(models, name)(num_classes=6, **MODELS[name]).train()
    size = 32 if name[0].isupper() else 64
    labels = torch.arange(4)
    model, images = widen_batch_normed(model, torch.randn(4, 3, size, size))
    return train(run, model, (images,), lr=0.01, loss=lambda out: torch.nn.functional.cross_entropy(out, labels))


@scenario("torchvision/segmentation")
def run_segmentation(run: Any) -> Any:
    from torchvision import models

    model = models.segmentation.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=3).train()
    labels = torch.randint(0, 3, (2, 64, 64))
    loss = lambda out: torch.nn.functional.cross_entropy(out["out"], labels)
    model, images = widen_batch_normed(model, torch.randn(2, 3, 64, 64))
    return train(run, model, (images,), lr=0.01, steps=1, loss=loss)
