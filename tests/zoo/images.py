"""Models of transformers that read images among their words, every part tiny and with random weights, and what they
read: images of one size, in tiles, or as patches of grids of several sizes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from tests.zoo.architectures import SMALL, as_wide, has, known_sizes

SIZE, PATCH, MERGED = 16, 4, 2
TOKEN = 101
"""The word that stands for a part of an image; texts are of words below 100."""
GRIDS = ((1, 4, 4), (1, 4, 8))
"""Frames, rows and columns of patches of an image of each text."""

VISION: dict[str, Any] = dict(
    depth=2,
    encoder_layers=2,
    encoder_attention_heads=4,
    encoder_ffn_dim=96,
    embed_dim=64,
    hidden_dim=64,
    out_hidden_size=64,
    projection_dim=64,
    mm_hidden_size=64,
    projector_hidden_size=64,
    mlp_ratio=2,
    num_channels=3,
    in_channels=3,
    in_chans=3,
    image_size=SIZE,
    patch_size=PATCH,
    spatial_merge_size=MERGED,
    window_size=8,
    num_position_embeddings=16,
)
LISTS = dict(fullatt_block_indexes=[1], deepstack_visual_indexes=[0], intermediate_layers_indices=[0, 1])
"""Which blocks, where a configuration says so."""

_SECTIONS = dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 3, 3])
_TILES: dict[str, dict[str, Any]] = {"": dict(image_grid_pinpoints=[[2 * SIZE, 2 * SIZE]])}
OWN: dict[str, dict[str, dict[str, Any]]] = {
    "aria": {"": dict(projector_patch_to_query_dict={16: 4})},
    "exaone4_5": {},
    "glm4v": {"text_config": dict(rope_parameters=_SECTIONS)},
    "janus": {},
    "llama4": {
        "vision_config": dict(
            projector_input_dim=64, projector_output_dim=64, vision_output_dim=64, intermediate_size=256
        )
    },
    "llava_next": _TILES,
    "llava_onevision": _TILES,
    "mistral3": {},
    "mllama": {"vision_config": dict(vision_output_dim=192), "text_config": dict(cross_attention_layers=[1])},
    "ovis2": {},
    "paddleocr_vl": {"text_config": dict(rope_parameters=_SECTIONS)},
    "qwen2_vl": {"text_config": dict(rope_parameters=_SECTIONS)},
    "qwen2_5_vl": {"text_config": dict(rope_parameters=_SECTIONS)},
    "qwen3_vl": {"text_config": dict(rope_parameters=_SECTIONS)},
    "qwen3_vl_moe": {"text_config": dict(rope_parameters=_SECTIONS)},
    "video_llama_3": {},
}
"""What each kind needs besides, by the part of its configuration ("" is the whole)."""


def build(kind: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model in training mode, in float64 where its operators have it, and inputs of one step."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    default = AutoConfig.for_model(kind)
    config = type(default)(**_sizes(default, OWN[kind], ""))
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").double().train()
    with torch.no_grad():
        for p in model.parameters():
            if not p.any():  # gates that let nothing through
                p.normal_()
        return as_wide(model, _inputs(kind, model, config))


def _sizes(default: Any, own: dict[str, dict[str, Any]], part: str) -> dict[str, Any]:
    """What a configuration, and each part of it, is to be made with."""
    sizes = {k: v for k, v in {**SMALL, **VISION}.items() if part in ("", "text_config") or k != "vocab_size"}
    known = known_sizes(default, sizes)
    known = {k: v for k, v in known.items() if not isinstance(getattr(default, k), (list, tuple))}
    known |= {k: float(v) for k, v in known.items() if isinstance(getattr(default, k), float)}
    if part == "vision_config" and "num_key_value_heads" in known:
        known["num_key_value_heads"] = SMALL["num_attention_heads"]
    if "layer_types" in vars(default) and default.layer_types:
        kinds = list(dict.fromkeys(default.layer_types))
        known["layer_types"] = [kinds[i % len(kinds)] for i in range(SMALL["num_hidden_layers"])]
    known |= {k: v for k, v in LISTS.items() if has(default, k)}
    known |= {k: TOKEN + i for i, k in enumerate(sorted(vars(default))) if _is_special(k, default)}
    parts = {p: getattr(default, p) for p in default.sub_configs if has(default, p)}
    inner = {p: {**_sizes(c, own, p), "model_type": c.model_type} for p, c in parts.items() if c is not None}
    return known | inner | own.get(part, {})


def _is_special(name: str, config: Any) -> bool:
    return name.endswith(("_token_id", "_token_index")) and name not in SMALL and type(getattr(config, name)) is int


def _inputs(kind: str, model: torch.nn.Module, config: Any) -> dict[str, Any]:
    """Two texts, each with an image behind its third word."""
    images, counts = _images(kind, config), [2, 1]
    names = ("image_token_id", "image_token_index")
    token = next(getattr(config, n) for n in names if getattr(config, n, None) is not None)
    if kind != "mllama":  # reads images beside the words
        parts = getattr(model, "model", model).get_image_features(**images)
        parts = parts if getattr(parts, "pooler_output", None) is None else parts.pooler_output
        width = config.get_text_config().hidden_size
        rows = [x.numel() // width for x in pytree.tree_leaves(parts) if torch.is_tensor(x) and x.shape[-1] == width]
        total = sum(rows)
        counts = [total // 3, total - total // 3] if "image_grid_thw" in images else [total // 2] * 2
    words, texts = torch.randint(3, 100, (2, 12)), []
    for text, count in zip(words, counts):
        end = torch.full((max(counts) - count,), 4)
        texts.append(torch.cat([text[:3], torch.full((count,), token), text[3:], end]))
    ids = torch.stack(texts)
    inputs = dict(input_ids=ids, labels=ids.masked_fill(ids == token, -100), attention_mask=torch.ones_like(ids))
    kinds = {"mm_token_type_ids": (ids == token).long()} if kind in NUMBERED else {}
    return inputs | images | kinds


NUMBERED = ("glm4v", "paddleocr_vl", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Told of each word whether it is of an image."""


def _images(kind: str, config: Any) -> dict[str, torch.Tensor]:
    vision = getattr(config, "vision_config", config)
    if kind in (*NUMBERED, "exaone4_5", "video_llama_3"):
        rows = sum(t * h * w for t, h, w in GRIDS)
        shape: tuple[int, ...] = (3 * getattr(vision, "temporal_patch_size", 1) * PATCH**2,)
        shape = (3, PATCH, PATCH) if kind == "paddleocr_vl" else shape
        more = {"image_merge_sizes": torch.tensor([MERGED] * 2)} if kind == "video_llama_3" else {}
        return dict(pixel_values=torch.randn(rows, *shape).double(), image_grid_thw=torch.tensor(GRIDS)) | more
    tiles = {"llava_next": (5,), "llava_onevision": (5,), "mllama": (1, 4)}.get(kind, ())
    images = dict(pixel_values=torch.randn(2, *tiles, 3, SIZE, SIZE).double())
    if kind == "mllama":
        return images | dict(aspect_ratio_ids=torch.full((2, 1), 6), aspect_ratio_mask=torch.ones(2, 1, 4).long())
    if kind in ("llava_next", "llava_onevision"):
        return images | dict(image_sizes=torch.full((2, 2), 2 * SIZE))
    return images | (dict(image_sizes=torch.full((2, 2), SIZE)) if kind == "mistral3" else {})
