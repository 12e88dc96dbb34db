"""Megatron-core's models of images and texts."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from mindspeed_fx.megatron import patches

TARGET = "models.vision.clip_vit_model:CLIPViTModel.__init__"


def parts(model: Any) -> list[torch.nn.Module]:
    """What of a model is compiled by itself: its encoder of images, the projection and the language model of one that
    joins images and texts, for where a text has an image is data; nothing where the whole model is compiled.
    """
    from megatron.core.models.multimodal.llava_model import LLaVAModel

    if not isinstance(model, LLaVAModel):
        return []
    names = ("vision_model", "vision_projection", "language_model")
    return [m for m in (getattr(model, name, None) for name in names) if m is not None]


def clip_vit_init(self: Any, *args: Any, **kwargs: Any) -> None:
    """``CLIPViTModel.__init__``, whose norms without TransformerEngine are torch's, given words that torch's do not
    take: Megatron-core's own wrapper of torch's norms takes them.
    """
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    original = patches.original(TARGET)
    bound = inspect.signature(original).bind(self, *args, **kwargs)
    bound.apply_defaults()
    for name in ("ln_pre_impl", "ln_post_impl"):
        if bound.arguments[name] is torch.nn.LayerNorm:
            bound.arguments[name] = WrappedTorchNorm
    original(*bound.args, **bound.kwargs)
