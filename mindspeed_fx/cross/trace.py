"""A model's graphs as an NPU would run them: compiled and run once, forward and backward, on fake ``npu:0`` tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Sequence

import torch
import torch.fx as fx

from mindspeed_fx import compat
from mindspeed_fx.backend import Compilation, device_of
from mindspeed_fx.cross import ship
from mindspeed_fx.options import Options
from mindspeed_fx.report import recorder
from mindspeed_fx.report.explain import loss_of
from mindspeed_fx.report.records import GraphRecord

DEVICE = "npu:0"


@dataclass
class Traced:
    """What one model became."""

    records: list[GraphRecord]
    """One for each Dynamo graph."""
    sides: list[tuple[int, str, fx.GraphModule]]
    """(graph, "forward" | "backward" | "inference", graph module with fake values) in the order they were compiled."""
    breaks: list[str]
    parameters: int = 0
    parameter_bytes: int = 0
    without_gradient: list[str] = field(default_factory=list)
    """Trainable parameters that the backward gave no gradient: unused ones, or ones whose gradient was lost."""


class _Kept(Compilation):
    """A compilation whose finished graphs are kept."""

    def __init__(self, options: Options, sides: list):
        super().__init__(options)
        self.sides = sides

    def finish_side(self, gm: fx.GraphModule, side: str) -> None:
        super().finish_side(gm, side)
        self.sides.append((self.record, side, gm))


def trace(model: Any, args: tuple, kwargs: dict, options: Options, device: str = DEVICE) -> Traced:
    """Compile ``model``, changed in place to hold fake tensors, with ``options`` and run it once on fake tensors.

    Args:
        model: module or function; tensors of any device, meta included.
        device: where the fake tensors claim to be; "npu:0" needs torch_npu in this process.
    """
    mode = compat.new_fake_mode()
    model, args, kwargs = ship.to_fake(mode, device, model, args, kwargs)
    sides: list = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return _Kept(options.resolve(device_of(inputs)), sides).compile(gm, inputs)

    with recorder.collecting() as records, compat.collecting_graph_breaks() as breaks, mode:
        outputs = compat.compile_with_backend(compat.fresh_callable(model), backend=backend)(*args, **kwargs)
        loss = loss_of(outputs)
        if loss is not None:
            loss.backward()
    traced = Traced(list(records), [(records.index(r), side, gm) for r, side, gm in sides if r in records], list(breaks))
    if isinstance(model, torch.nn.Module):
        named = dict(model.named_parameters())
        traced.parameters = sum(p.numel() for p in named.values())
        traced.parameter_bytes = sum(p.numel() * p.element_size() for p in named.values())
        traced.without_gradient = [n for n, p in named.items() if loss is not None and p.requires_grad and p.grad is None]
    return traced
