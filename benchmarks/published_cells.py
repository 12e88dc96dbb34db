"""Cells of the tables of published runs, and what no row says and has to be known by the model's name."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from mindspeed_fx.planning.predict import Architecture, Settings, architecture

VOCABULARIES = {
    "aquila": 100008,
    "baichuan2": 125696,
    "baichuan": 64000,
    "bloom": 250880,
    "chatglm": 65024,
    "codeqwen": 92416,
    "codellama": 32016,
    "deepseek": 102400,
    "gemma": 256000,
    "glm-4": 151552,
    "glm4": 151552,
    "glm": 65024,
    "gpt": 50304,
    "grok": 131072,
    "hunyuan": 128512,
    "internlm2": 92544,
    "internlm3": 128512,
    "internlm": 103168,
    "llama3": 128256,
    "llama-3": 128256,
    "llama": 32000,
    "minimax": 200064,
    "mixtral": 32000,
    "mistral": 32000,
    "minicpm": 122753,
    "phi": 32064,
    "qwen": 151936,
    "seed": 155136,
    "yi": 64000,
    "telechat": 131072,
}
"""Words of a tokenizer by the model's name, where the row has none; first match."""
NAMED = {
    "gptoss120b": "gpt-oss-120b",
    "gptoss20b": "gpt-oss-20b",
    "qwen330ba3b": "qwen3-30b-a3b",
    "qwen3235ba22b": "qwen3-235b-a22b",
    "qwen3moe30b": "qwen3-30b-a3b",
    "deepseekv3": "deepseek-v3",
}


@dataclass
class Case:
    """One row."""

    what: str
    kind: str
    """"time", "lora time", "ci time" or "memory"."""
    family: str
    hardware: str = ""
    model: Architecture | None = None
    run: Settings | None = None
    published: float = 0.0
    """Seconds of a step, or bytes of the fullest rank."""
    stages: tuple[float, ...] = ()
    """Bytes of each pipeline stage, of a list by rank."""
    reason: str = ""
    """Why it is not predicted."""
    doubtful: bool = False
    low_precision: bool = False
    config: str = ""
    source: str = ""
    source_device: str = ""
    """As the row has it."""
    unit: str = ""
    first_seen: str = "9"
    """Month in which a list of peaks by rank was first published."""

    @property
    def size(self) -> str:
        """Class of size by parameters."""
        if self.model is None:
            return ""
        n = self.model.parameters / 1e9
        return next((name for top, name in ((3, "<3B"), (9, "3-9B"), (22, "9-22B"), (50, "22-50B")) if n < top), ">50B")


class Unreadable(Exception):
    """Why a row is not predicted."""


def config_of(line: dict[str, str]) -> dict[str, str]:
    return dict(p.partition("=")[::2] for p in split(line["shape_or_config"]))


def number(config: dict[str, str], name: str, default: int = 0) -> int:
    """A whole number of a row; no default: it has to be stated."""
    text = config.get(name, "")
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    if text and not default:
        raise Unreadable(f"{name} is {text!r}")
    return default


def truth(config: dict[str, str], name: str) -> bool:
    return config.get(name) in ("True", "1", "true")


def vocabulary(what: str, config: dict[str, str]) -> int:
    if number(config, "vocab"):
        return number(config, "vocab")
    name = what.lower().replace("llama_3", "llama3")
    return next((n for key, n in VOCABULARIES.items() if key in name), 64000)


def pad(model: Architecture, tp: int) -> Architecture:
    """Megatron pads the vocabulary to whole parts of 128."""
    part = 128 * tp
    return dataclasses.replace(model, vocab=-(-model.vocab // part) * part)


def named(what: str) -> Any:
    """A published architecture by a table's name."""
    text = re.sub(r"\(.*?\)|2-node|DeepCompile.*", "", what).strip().replace("_", " ")
    key = re.sub(r"[^a-z0-9.]", "", text.lower())
    return architecture(NAMED.get(key, key))


def split(text: str) -> list[str]:
    """The parts between semicolons, but for those in brackets or quotes."""
    return re.split(r";(?![^\[]*\])", text)
