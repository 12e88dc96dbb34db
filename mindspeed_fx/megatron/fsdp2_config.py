"""The file of ``--fsdp2-config-path``: what torch's FSDP2 is told, under MindSpeed's names, in YAML.

    reshard_after_forward: true
    param_dtype: bf16
    reduce_dtype: fp32
    num_to_forward_prefetch: 2
    recompute_modules: [megatron.core.transformer.transformer_layer.TransformerLayer]

MindSpeed passes over names that it does not know; here they are an error, as are values of another kind.
"""

from __future__ import annotations

import dataclasses
import importlib
from dataclasses import dataclass
from typing import Any, Collection

import torch

from mindspeed_fx.errors import OptionError, nearest
from mindspeed_fx.sharding.plan_file import read_yaml

FLAG = "--fsdp2-config-path"
TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def _setting(default: Any, kind: str) -> Any:
    return dataclasses.field(default=default, metadata={"kind": kind})


@dataclass(frozen=True)
class Settings:
    """What the file says.

    Args:
        sharding_size: ranks that share one copy of the weights; None: all data-parallel ranks.
        sub_modules_to_wrap: classes whose weights are gathered together; None: Megatron's choice, layers and embedding.
        reshard_after_forward: whether gathered weights are freed after the forward, or the ranks they are divided over
            until the backward.
        param_dtype: of the gathered weights; None: as they are stored.
        reduce_dtype: of the gradients on their way; None: that of the weights.
        output_dtype: of what a wrapped module returns.
        cast_forward_inputs: whether what a wrapped module is given gets ``param_dtype``.
        offload_to_cpu: whether shards, gradients and states of the optimizer lie on the host.
        pin_memory: whether they are pinned there.
        num_to_forward_prefetch: wrapped modules whose weights are gathered ahead.
        ignored_modules: classes whose weights stay whole.
        recompute_modules: classes that keep their inputs alone for the backward.
    """

    sharding_size: int | None = _setting(None, "size")
    sub_modules_to_wrap: tuple[str, ...] | None = _setting(None, "classes")
    reshard_after_forward: bool | int = _setting(True, "switch or size")
    param_dtype: str | None = _setting(None, "type")
    reduce_dtype: str | None = _setting(None, "type")
    output_dtype: str | None = _setting(None, "type")
    cast_forward_inputs: bool = _setting(True, "switch")
    offload_to_cpu: bool = _setting(False, "switch")
    pin_memory: bool = _setting(True, "switch")
    num_to_forward_prefetch: int = _setting(0, "count")
    ignored_modules: tuple[str, ...] | None = _setting(None, "classes")
    recompute_modules: tuple[str, ...] | None = _setting(None, "classes")

    def __str__(self) -> str:
        """What differs from torch's defaults, as the file has it."""
        pairs = ((f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self))
        return ", ".join(f"{name} = {value}" for name, value, default in pairs if value != default) or "its defaults"

    def classes(self, name: str) -> tuple[type, ...]:
        """The classes of a setting that names some.

        Raises:
            OptionError: one cannot be imported, or is no class of modules.
        """
        return tuple(_import(name, text) for text in getattr(self, name) or ())


KINDS = {
    "size": ("a whole number from 1 on", lambda x: _is_whole(x) and x >= 1),
    "count": ("a whole number from 0 on", lambda x: _is_whole(x) and x >= 0),
    "switch": ("true or false", lambda x: isinstance(x, bool)),
    "switch or size": ("true, false, or a number of ranks from 2 on", lambda x: isinstance(x, bool) or x > 1),
    "type": (f"one of {', '.join(TYPES)}", lambda x: x in TYPES),
    "classes": ("a list of classes with their modules, as in [package.module.Class]", lambda x: _are_names(x)),
}
"""Kind -> what is valid, and whether a value is; a value of another type may raise TypeError."""


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(x, str) and "." in x for x in value)


def read(path: str) -> Settings:
    """The settings of a file.

    Raises:
        OptionError: the file cannot be read, is no mapping, or has a name twice, or a name or value that is not known.
    """
    kinds = _kinds()
    values = read_settings(f"{FLAG} {path}", path, kinds, "param_dtype: bf16")
    for name, value in values.items():
        refuse_unknown(f"{FLAG} {path}", name, kinds)
        check(f"{FLAG} {path}: {name}", name, value)
    arguments = {name: tuple(x) if isinstance(x, list) else x for name, x in values.items() if x is not None}
    return Settings(**arguments)


def read_settings(place: str, path: str, known: Collection[str], example: str) -> dict[Any, Any]:
    """Names and values of a YAML file; none of an empty one.

    Args:
        place: flag and path, for errors.
        known: the settings that there are, for the error.
        example: a line.

    Raises:
        OptionError: the file cannot be read, or is no mapping.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise OptionError(f"{place}: {why}; expected a YAML file of settings") from None
    values = read_yaml(place, text, f"expected lines as in {example}")
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise OptionError(f"{place} holds {values!r}; expected names with values, of {', '.join(known)}")
    return values


def refuse_unknown(place: str, name: Any, known: Collection[str]) -> None:
    """
    Raises:
        OptionError: ``name`` is none of ``known``.
    """
    if name not in known:
        raise OptionError(f"{place}: unknown setting {name!r}{nearest(str(name), known)}; valid: {', '.join(known)}")


def _kinds() -> dict[str, str]:
    return {f.name: f.metadata["kind"] for f in dataclasses.fields(Settings)}


def check(place: str, name: str, value: Any) -> None:
    """Of a value for the setting ``name``; None is valid for each.

    Args:
        place: where it stands, for the error.

    Raises:
        OptionError: it is of another kind.
    """
    expected, is_valid = KINDS[_kinds()[name]]
    if value is not None and not _check(is_valid, value):
        raise OptionError(f"{place} is {value!r}; expected {expected}")


def _check(is_valid: Any, value: Any) -> bool:
    try:
        return bool(is_valid(value))
    except TypeError:
        return False


def _import(setting: str, text: str) -> type:
    module, _, name = text.rpartition(".")
    try:
        loaded = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise OptionError(f"{FLAG}: {setting} names {text}, and {module} cannot be imported: {error}") from None
    if not (isinstance(loaded, type) and issubclass(loaded, torch.nn.Module)):
        raise OptionError(
            f"{FLAG}: {setting} names {text}, which is no class of modules; expected package.module.Class"
        )
    return loaded
