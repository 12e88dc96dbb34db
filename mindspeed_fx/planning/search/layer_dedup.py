"""Layers that repeat, told from the module tree, so that two of each kind are traced however deep the model is.

Neighbours in a ``ModuleList`` are of one kind when class, code, settings, submodules and the shapes and types of
parameters and buffers are equal. A setting that is the layer's own number counts as equal and is noted: code that asked
it something else than "which layer am I" would not be seen. The trace is the proof of the rest: both traced layers must
have become the same operators on the same sizes, the second fed by the first (``graph.py``); else the whole model is
traced.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from mindspeed_fx.sharding.expert_lists import listed_parameters

TRACED = 2
"""Layers of a run that are traced: two show what is between two."""


@dataclass
class Repetition:
    """Runs of equal layers, and a model with :data:`TRACED` of each."""

    model: nn.Module
    names: dict[str, str] = field(default_factory=dict)
    """Prefix in the shortened model -> prefix in the whole one ("layers.2" -> "layers.3")."""
    runs: list[tuple[list[str], list[str]]] = field(default_factory=list)
    """For each run: names of all layers, and of the traced ones (both in the whole model)."""
    notes: list[str] = field(default_factory=list)
    module_names: list[str] = field(default_factory=list)
    """Of the whole model."""

    def whole_name(self, name: str) -> str:
        """The name that ``name`` of the shortened model has in the whole one."""
        parts = name.split(".")
        for end in range(len(parts), 0, -1):
            if (result := self.names.get(".".join(parts[:end]))) is not None:
                return ".".join([result, *parts[end:]])
        return name


def repetition(model: nn.Module) -> Repetition:
    """Find the runs of ``model``; the model itself stays as it is, and parameters are shared, not copied."""
    result = Repetition(model, module_names=[n for n, _ in model.named_modules()])
    owners: dict[int, int] = {}
    for _, p in model.named_parameters(remove_duplicate=False):
        owners[id(p)] = owners.get(id(p), 0) + 1
    kept: dict[str, list[int]] = {}
    experts = {name.partition(".*.")[0] for name in listed_parameters(model)}
    lists = [
        (n, m)
        for n, m in model.named_modules()
        if isinstance(m, (nn.ModuleList, nn.Sequential)) and len(m) > TRACED and n not in experts
    ]
    for path, layers in lists:
        if any(path.startswith(f"{outer}.") for outer in kept) or any(owners[id(p)] > 1 for p in layers.parameters()):
            continue
        signs = [_signature(layer, i, result.notes) for i, layer in enumerate(layers)]
        chosen, start = [], 0
        for i in range(1, len(signs) + 1):
            if i == len(signs) or signs[i] != signs[start]:
                members = list(range(start, i))
                if len(members) > TRACED:
                    result.runs.append(([f"{path}.{j}" for j in members], [f"{path}.{j}" for j in members[:TRACED]]))
                chosen += members[:TRACED]
                start = i
        if len(chosen) < len(layers):
            kept[path] = chosen
            result.names.update({f"{path}.{new}": f"{path}.{old}" for new, old in enumerate(chosen)})
    result.notes = sorted(set(result.notes))
    if kept:
        result.model = _shorten(model, "", kept)
    return result


def _shorten(module: nn.Module, path: str, kept: dict[str, list[int]]) -> nn.Module:
    """A shallow copy of ``module`` whose lists have the kept layers; modules without such a list inside are shared."""
    result = copy.copy(module)
    result._modules = dict(module._modules)
    if path in kept:
        layers = list(module._modules.values())
        result._modules = {str(new): layers[old] for new, old in enumerate(kept[path])}
        return result
    for name, child in module._modules.items():
        inner = f"{path}.{name}".lstrip(".")
        if child is not None and any(k == inner or k.startswith(f"{inner}.") for k in kept):
            result._modules[name] = _shorten(child, inner, kept)
            if inner in kept:
                _shorten_tables(result, len(child._modules), kept[inner])
    return result


def _shorten_tables(module: nn.Module, layers: int, chosen: list[int]) -> None:
    """Lists with an entry for each layer, of ``module`` and of its configuration, of which ``module`` gets a copy: a
    model that asks ``config.layer_types[i]`` which mask layer i gets must find the kinds of the layers that it has."""

    def picked(x: Any) -> Any:
        is_table = isinstance(x, (list, tuple)) and len(x) == layers and all(isinstance(v, _PLAIN) for v in x)
        return type(x)(x[i] for i in chosen) if is_table else x

    for key, value in list(vars(module).items()):
        if key in _SKIPPED:
            continue
        if isinstance(value, (list, tuple)):
            module.__dict__[key] = picked(value)
        elif key in CONFIGURATIONS and hasattr(value, "__dict__"):
            module.__dict__[key] = copied = copy.copy(value)
            copied.__dict__.update((k, picked(v)) for k, v in vars(value).items())


CONFIGURATIONS = ("config", "cfg", "args", "model_args", "params")
"""What models call the object that says how they are built."""
_PLAIN = (str, int, float, bool, type(None), torch.dtype, torch.device)
"""What a list with an entry for each layer says of it."""
_SKIPPED = frozenset(("_parameters", "_buffers", "_modules"))


def _signature(module: nn.Module, number: int, notes: list[str]) -> Any:
    """What two modules must agree in; ``number`` is that of the layer that they are in."""
    settings = []
    for key, value in sorted(vars(module).items()):
        if key in _SKIPPED:
            continue
        if (
            type(value) is int
            and value in (number, number + 1)
            and key.strip("_").endswith(("idx", "index", "number", "layer_id", "layer"))
        ):
            notes.append(f"layers are taken as alike though each knows its own number ({key})")
            value = "its own number"
        settings.append((key, _plain(value)))
    tensors = [
        (n, tuple(t.shape), t.dtype, t.requires_grad)
        for held in (module._parameters, module._buffers)
        for n, t in held.items()
        if t is not None
    ]
    return (
        type(module),
        tuple(settings),
        tuple(tensors),
        tuple((n, _signature(m, number, notes)) for n, m in module._modules.items() if m is not None),
    )


def _plain(value: Any) -> Any:
    if isinstance(value, (*_PLAIN, torch.Size)):
        return value
    if isinstance(value, (tuple, list)):
        return type(value).__name__, tuple(map(_plain, value))
    if isinstance(value, dict):
        return tuple((str(k), _plain(v)) for k, v in value.items())
    if isinstance(value, (set, frozenset)):
        return tuple(sorted(map(str, value)))
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    return id(value)  # an object that two layers share is equal, two objects are not
