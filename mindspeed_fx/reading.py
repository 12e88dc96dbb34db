"""What is decided and done while Dynamo reads a model for the backend."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator

import torch

from mindspeed_fx.compat import vector_instructions
from mindspeed_fx.errors import OptionError
from mindspeed_fx.garbage import without_collection
from mindspeed_fx.options import Options
from mindspeed_fx.passes.lowering import repeated_layers
from mindspeed_fx.passes.manager import PassError
from mindspeed_fx.passes.runner import Pipeline


@contextlib.contextmanager
def beside_reading(options: dict[str, Any] | None, names: dict[str, Any]) -> Iterator[None]:
    """Within, no garbage is collected, and what Inductor asks the C++ compiler is asked beside.

    Args:
        options: what ``torch.compile`` was given.
        names: variables of the function that is read.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_collection())
        if _generates_for_cpu(options, names):
            stack.enter_context(vector_instructions.asked_early())
        yield


def _generates_for_cpu(options: dict[str, Any] | None, names: dict[str, Any]) -> bool:
    """Whether Inductor writes code for a CPU, by settings that are known already."""
    modules = [value for value in names.values() if isinstance(value, torch.nn.Module)]
    weights = [p for p in (next(module.parameters(), None) for module in modules) if p is not None]
    if not any(t.device.type == "cpu" for t in weights or names.values() if isinstance(t, torch.Tensor)):
        return False
    try:
        resolved = Options.parse(options).resolve("cpu")
    except OptionError:  # which the backend tells
        return False
    return resolved.codegen == "inductor" and not any(name.startswith("cpp") for name in resolved.inductor)


def may_be_read_once(options: dict[str, Any] | None, layer: torch.nn.Module) -> bool:
    """Whether Dynamo may read ``layer`` for others of its class (:mod:`mindspeed_fx.compat.alike_layers`): not where
    its weights are parts of a plan's, of which each is known by its name, nor where layers are not shared at all."""
    parameter = next(layer.parameters(), None)
    if parameter is None or any("_sharded" in vars(module) for module in layer.modules()):
        return False
    try:
        pipeline = Pipeline(Options.parse(options).resolve(parameter.device.type))
    except (OptionError, PassError):  # which the backend tells
        return False
    return any(p.name == repeated_layers.NAME for p in pipeline.passes)
