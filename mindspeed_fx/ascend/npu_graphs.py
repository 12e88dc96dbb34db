"""A model's graphs as an NPU would run them: compiled and run once, forward and backward, on fake ``npu:0`` tensors."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Sequence

import torch
import torch.fx as fx

from mindspeed_fx import torch_compile
from mindspeed_fx.ascend import kernels, ship
from mindspeed_fx.backend import Compilation
from mindspeed_fx.compat import dynamo, tracing
from mindspeed_fx.compat.graph_inputs import device_of
from mindspeed_fx.graph.schema import all_arguments
from mindspeed_fx.kernels import REGISTRY
from mindspeed_fx.options import Options
from mindspeed_fx.partition.regions import regions
from mindspeed_fx.planning.explain import loss_of
from mindspeed_fx.report import recorder
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
    triton_calls: list[dict[str, Any]] = field(default_factory=list)
    """Each different call of an operator that has a Triton kernel, as :func:`mindspeed_fx.ascend.kernels.call`
    describes it, with ``in_graph``: the npu graph calls that kernel, and no operator of torch_npu in its place."""


SMALLEST = 3
"""Operators of a region for which a kernel is generated: of fewer, half of what it moves is moved anyway."""


class _Kept(Compilation):
    """A compilation whose finished graphs are kept."""

    def __init__(self, options: Options, sides: list, calls: dict[str, dict[str, Any]]):
        super().__init__(options)
        self.sides, self.calls = sides, calls

    def finish_side(self, gm: fx.GraphModule, side: str) -> None:
        self._note(gm, lowered=False)
        super().finish_side(gm, side)
        self._note(gm, lowered=True)
        self.sides.append((self.record, side, gm))

    def _note(self, gm: fx.GraphModule, lowered: bool) -> None:
        """The calls of operators that have a Triton kernel, before they are lowered, and of the kernels, after."""
        for node in gm.graph.nodes:
            fused = REGISTRY.get(node.target) if node.op == "call_function" else None
            if fused is None:
                continue
            name = fused.name.split(".")[1]
            if name.endswith("_triton") == lowered and kernels.has_triton(name.removesuffix("_triton")):
                self._called(kernels.call(name.removesuffix("_triton"), *_arguments(node)), lowered)
            for part, arguments in fused.parts(*_arguments(node)) if lowered and fused.parts else ():
                self._called(kernels.call(part, *arguments), lowered)

        for region in regions(gm, SMALLEST) if lowered else ():
            try:
                self._called(kernels.region_call(region), False)
            except NotImplementedError:  # an operator that has no translation: the region stays Inductor's own
                continue

    def _called(self, call: dict[str, Any], in_graph: bool) -> None:
        known = self.calls.setdefault(json.dumps(call), {**call, "in_graph": False})
        known["in_graph"] |= in_graph


def _arguments(node: fx.Node) -> list[Any]:
    """The call's arguments in the order of the schema, defaults filled in, with fake tensors for nodes."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return all_arguments(node.target, args, kwargs)


def trace_on_npu(
    model: Any, args: tuple, kwargs: dict, options: Options, device: str = DEVICE, mode: Any = None
) -> Traced:
    """Compile ``model``, changed in place to hold fake tensors, with ``options`` and run it once on fake tensors.

    Args:
        model: module or function; tensors of any device, meta included.
        device: where the fake tensors claim to be; "npu:0" needs torch_npu in this process.
        mode: a FakeTensorMode in which the model was built, whose fake tensors are taken as they are; None makes one.
    """
    mode = tracing.new_fake_mode() if mode is None else mode
    model, args, kwargs = ship.to_fake(mode, device, model, args, kwargs)
    sides: list = []
    calls: dict[str, dict[str, Any]] = {}

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return _Kept(options.resolve(device_of(inputs)), sides, calls).compile(gm, inputs)

    with recorder.collecting() as records, dynamo.collecting_graph_breaks() as breaks, mode:
        outputs = torch_compile.compile_with_backend(dynamo.fresh_callable(model), backend=backend)(*args, **kwargs)
        loss = loss_of(outputs)
        if loss is not None:
            loss.backward()
    traced = Traced(
        list(records),
        [(records.index(r), side, gm) for r, side, gm in sides if r in records],
        list(breaks),
        triton_calls=list(calls.values()),
    )
    if isinstance(model, torch.nn.Module):
        named = dict(model.named_parameters())
        traced.parameters = sum(p.numel() for p in named.values())
        traced.parameter_bytes = sum(p.numel() * p.element_size() for p in named.values())
        traced.without_gradient = [
            n for n, p in named.items() if loss is not None and p.requires_grad and p.grad is None
        ]
    return traced
