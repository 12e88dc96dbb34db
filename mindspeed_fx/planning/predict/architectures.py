"""Published architectures by name; sizes from each model's configuration file on its publisher's page."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Sequence

from mindspeed_fx import arguments
from mindspeed_fx.errors import OptionError, nearest
from mindspeed_fx.planning.predict.architecture import Architecture, from_flags


def _dense(layers: int, hidden: int, heads: int, kv: int, ffn: int, vocab: int, **more: Any) -> Architecture:
    return Architecture(layers, hidden, heads, vocab, ffn, kv, **more)


def _gpt(layers: int, hidden: int, heads: int, vocab: int = 50257, **more: Any) -> Architecture:
    values = {"gated": False, "tied": True, "norm": "layer", "positions": "learned", "max_positions": 2048, **more}
    return Architecture(layers, hidden, heads, vocab, 4 * hidden, **values)


def _experts(layers: int, hidden: int, heads: int, kv: int, vocab: int, experts: tuple, **more: Any) -> Architecture:
    """``experts``: how many, of each token, width."""
    count, top_k, width = experts
    values = {"ffn": width, "experts": count, "top_k": top_k, "expert_ffn": width, **more}
    return Architecture(layers, hidden, heads, vocab, kv_heads=kv, **values)


_MLA = {"q_lora": 1536, "kv_lora": 512, "head_dim": 128}
_MPT = {"vocab": 50368}
PUBLISHED: dict[str, Architecture] = {
    "llama-7b": _dense(32, 4096, 32, 32, 11008, 32000),
    "llama-13b": _dense(40, 5120, 40, 40, 13824, 32000),
    "llama-33b": _dense(60, 6656, 52, 52, 17920, 32000),
    "llama-65b": _dense(80, 8192, 64, 64, 22016, 32000),
    "llama2-70b": _dense(80, 8192, 64, 8, 28672, 32000),
    "llama3-8b": _dense(32, 4096, 32, 8, 14336, 128256),
    "llama3-70b": _dense(80, 8192, 64, 8, 28672, 128256),
    "llama3-405b": _dense(126, 16384, 128, 8, 53248, 128256),
    "llama3.2-1b": _dense(16, 2048, 32, 8, 8192, 128256, tied=True),
    "llama3.2-3b": _dense(28, 3072, 24, 8, 8192, 128256, tied=True, head_dim=128),
    "mistral-7b": _dense(32, 4096, 32, 8, 14336, 32000),
    "qwen2.5-0.5b": _dense(24, 896, 14, 2, 4864, 151936, tied=True),
    "qwen2.5-1.5b": _dense(28, 1536, 12, 2, 8960, 151936, tied=True),
    "qwen2.5-3b": _dense(36, 2048, 16, 2, 11008, 151936, tied=True),
    "qwen2.5-7b": _dense(28, 3584, 28, 4, 18944, 152064),
    "qwen2.5-14b": _dense(48, 5120, 40, 8, 13824, 152064),
    "qwen2.5-32b": _dense(64, 5120, 40, 8, 27648, 152064),
    "qwen2.5-72b": _dense(80, 8192, 64, 8, 29568, 152064),
    "qwen3-4b": _dense(36, 2560, 32, 8, 9728, 151936, head_dim=128, tied=True),
    "qwen3-8b": _dense(36, 4096, 32, 8, 12288, 151936, head_dim=128),
    "qwen3-14b": _dense(40, 5120, 40, 8, 17408, 151936, head_dim=128),
    "qwen3-32b": _dense(64, 5120, 64, 8, 25600, 151936, head_dim=128),
    "chatglm3-6b": _dense(28, 4096, 32, 2, 13696, 65024),
    "glm4-9b": _dense(40, 4096, 32, 2, 13696, 151552),
    "gemma-2b": _dense(18, 2048, 8, 1, 16384, 256000, head_dim=256, tied=True),
    "gemma-7b": _dense(28, 3072, 16, 16, 24576, 256000, head_dim=256, tied=True),
    "gpt3-5b": _gpt(24, 4096, 32),
    "gpt3-20b": _gpt(44, 6144, 48),
    "gpt3-175b": _gpt(96, 12288, 96),
    "nemotron4-15b": _dense(32, 6144, 48, 8, 24576, 256000, gated=False, norm="layer"),
    "nemotron4-340b": _dense(96, 18432, 96, 8, 73728, 256000, gated=False, norm="layer"),
    "mpt-125m": _gpt(12, 768, 12, **_MPT),
    "mpt-350m": _gpt(24, 1024, 16, **_MPT),
    "mpt-760m": _gpt(24, 1536, 12, **_MPT),
    "mpt-1b": _gpt(24, 2048, 16, **_MPT),
    "mpt-3b": _gpt(32, 2560, 20, **_MPT),
    "mpt-7b": _gpt(32, 4096, 32, **_MPT),
    "mpt-13b": _gpt(40, 5120, 40, **_MPT),
    "mpt-30b": _gpt(48, 7168, 56, **_MPT),
    "mpt-70b": _gpt(80, 8192, 64, **_MPT),
    "mixtral-8x7b": _experts(32, 4096, 32, 8, 32000, (8, 2, 14336)),
    "mixtral-8x22b": _experts(56, 6144, 48, 8, 32768, (8, 2, 16384)),
    "gpt-oss-20b": _experts(24, 2880, 64, 8, 201088, (32, 4, 2880), head_dim=64, window=128, window_share=0.5),
    "gpt-oss-120b": _experts(36, 2880, 64, 8, 201088, (128, 4, 2880), head_dim=64, window=128, window_share=0.5),
    "qwen2-57b-a14b": _experts(28, 3584, 28, 4, 151936, (64, 8, 2560), shared_ffn=20480),
    "qwen3-30b-a3b": _experts(48, 2048, 32, 4, 151936, (128, 8, 768), head_dim=128),
    "qwen3-235b-a22b": _experts(94, 4096, 64, 4, 151936, (128, 8, 1536), head_dim=128),
    "deepseek-v2-lite": _experts(
        27, 2048, 16, 16, 102400, (64, 6, 1408), ffn=10944, shared_ffn=2816, dense_layers=1, kv_lora=512, head_dim=128
    ),
    "deepseek-v2": _experts(
        60, 5120, 128, 128, 102400, (160, 6, 1536), ffn=12288, shared_ffn=3072, dense_layers=1, **_MLA
    ),
    "deepseek-v3": _experts(
        61, 7168, 128, 128, 129280, (256, 8, 2048), ffn=18432, shared_ffn=2048, dense_layers=3, **_MLA
    ),
    "kimi-k2": _experts(61, 7168, 64, 64, 163840, (384, 8, 2048), ffn=18432, shared_ffn=2048, dense_layers=1, **_MLA),
}
ALIASES = {
    "llama2-7b": "llama-7b",
    "llama2-13b": "llama-13b",
    "llama3.1-8b": "llama3-8b",
    "llama3.1-70b": "llama3-70b",
    "llama3.1-405b": "llama3-405b",
    "qwen3-moe-30b": "qwen3-30b-a3b",
}


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower())


def find_published(name: str) -> Architecture:
    """The architecture called ``name``, whatever its case, blanks and dashes.

    Raises:
        OptionError: no table has it; the message has the nearest one.
    """
    keys = {_key(n): n for n in (*PUBLISHED, *ALIASES)}
    if (known := keys.get(_key(name))) is None:
        raise OptionError(
            f"model {name!r} is none of the published architectures: {', '.join(PUBLISHED)}"
            f"{nearest(name.lower(), tuple(PUBLISHED))}"
        )
    return PUBLISHED[ALIASES.get(known, known)]


def architecture(model: "Architecture | str | Sequence[str] | dict[str, Any]", **changes: Any) -> Architecture:
    """The model that ``model`` describes: an :class:`Architecture`, its fields, a published name or Megatron's flags.

    Args:
        changes: fields that differ.

    Raises:
        OptionError: unknown name or field, missing sizes.
    """
    if isinstance(model, Architecture):
        result = model
    elif isinstance(model, str):
        result = find_published(model)
    elif isinstance(model, dict):
        arguments.check_names("architecture", model, Architecture)
        result = Architecture(**model)
    elif isinstance(model, Sequence):
        result = from_flags(model)
    else:
        raise OptionError(
            f"the model is {arguments.format_value(model)}; an architecture is expected: a published name, the flags "
            "of a launch, or the fields of Architecture"
        )
    arguments.check_names("architecture", {**dataclasses.asdict(result), **changes}, Architecture)
    return dataclasses.replace(result, **changes) if changes else result
