"""Stages of a pipeline whose backward comes in parts: for ``torch.distributed.pipelining``'s zero-bubble schedules.

    part  = mindspeed_fx.split_backward(layers)
    stage = PipelineStage(part, rank, world, device, dw_builder=part.dw_builder)
    ScheduleInterleavedZeroBubble([stage], microbatches, loss_fn=loss).step(x)

torch splits a backward by walking autograd's graph, and refuses compiled stages for that; here the split is one of
graphs (:mod:`mindspeed_fx.partition.split`), taken after fusion, recomputation and lowering.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Callable, Sequence

import torch
import torch.fx as fx
from torch import nn

from mindspeed_fx import arguments, torch_compile
from mindspeed_fx.backend import Compilation
from mindspeed_fx.compat.graph_inputs import device_of
from mindspeed_fx.errors import OptionError
from mindspeed_fx.options import Options
from mindspeed_fx.partition.split import Part, Parts, split


class SplitBackward(nn.Module):
    """``module``, compiled, whose backward makes the gradients of its inputs alone; those of its weights wait for
    :meth:`dw_builder`.

    Args:
        module: its forward must be one graph, with tensors as results.
        options: of the backend; codegen is "eager". See :class:`mindspeed_fx.options.Options`.
        ahead: remember what each forward saves, so that :meth:`recompute` can run before the backward. Every forward
            with gradients then needs its backward.

    Hooks of parameters do not run: gradients are added to ``grad`` as autograd does, but not by autograd.
    """

    def __init__(self, module: nn.Module, options: dict[str, Any] | None = None, ahead: bool = False):
        super().__init__()
        arguments.check_instance("split_backward", "module", module, nn.Module, "a torch.nn.Module is expected")
        arguments.check_options("split_backward", options)
        arguments.check_bool("split_backward", "ahead", ahead)
        asked = {"codegen": "eager", **(options or {})}
        if asked["codegen"] != "eager":
            raise OptionError(f'option "codegen" is {asked["codegen"]!r}; valid for a backward in parts: "eager"')
        self.module, self.ahead = module, ahead
        self.graphs: list[Graphs] = []
        """What was compiled, one entry for each kind of inputs."""
        self._late: Callable[[], None] | None = None
        self.dropped = 0
        """Backwards whose :meth:`dw_builder` nobody asked for before the next: torch's stages infer shapes with one."""
        self._calls: deque[_Call] = deque()
        options_ = Options.parse(asked)

        def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable:
            return _Compilation(options_.resolve(device_of(inputs)), self).compile(gm, inputs)

        # A function: torch's schedules refuse stages that hold a compiled module.
        self._run = [torch_compile.compile_with_backend(module.forward, backend=backend, fullgraph=True)]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run[0](*args, **kwargs)

    def dw_builder(self) -> Callable[[], None]:
        """The rest of the last backward, to be called whenever: adds the gradients of the weights. It is to be asked
        for before the next backward, as torch's stages do.

        Raises:
            RuntimeError: there is none.
        """
        late, self._late = self._late, None
        if late is None:
            raise RuntimeError("dw_builder: no backward has left gradients of weights")
        return late

    def recompute(self) -> bool:
        """Makes again, now, what the oldest waiting backward will need; False when there is nothing to do.

        Raises:
            RuntimeError: without ``ahead=True``.
        """
        if not self.ahead:
            raise RuntimeError("recompute: give split_backward(..., ahead=True)")
        call = next(
            (c for c in self._calls if c.gradients is None and c.graphs.parts and c.graphs.parts.recompute.makes), None
        )
        if call is not None:
            call.gradients = _run(call.graphs.parts.recompute, call.saved)
        return call is not None


class Graphs:
    """Forward and the parts of the backward of one compiled graph."""

    def __init__(self, weights: list[int]):
        self.weights = weights
        """Positions of the parameters among the inputs of ``forward``."""
        self.forward: fx.GraphModule | None = None
        self.parts: Parts | None = None


class _Call:
    """One forward whose backward is to come."""

    def __init__(self, graphs: Graphs, saved: dict[str, Any]):
        self.graphs, self.saved, self.gradients = graphs, saved, None
        self.key = _key(saved)


class _Compilation(Compilation):
    """Runs the sides of a graph in parts."""

    def __init__(self, options: Options, owner: SplitBackward):
        super().__init__(options)
        self.owner = owner

    def _compile(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable:
        self.graphs = Graphs([i for i, x in enumerate(inputs) if isinstance(x, nn.Parameter) and x.requires_grad])
        self.owner.graphs.append(self.graphs)
        return super()._compile(gm, inputs)

    def run_eagerly(self, gm: fx.GraphModule, inputs: Sequence[Any], side: str) -> Callable:
        run = super().run_eagerly(gm, inputs, side)
        if side == "forward":
            self.graphs.forward = gm
            return self._forward(gm)
        if side == "backward":
            self.graphs.parts = split(gm, self.graphs.weights)
            return self._backward(gm)
        return run

    def _forward(self, gm: fx.GraphModule) -> Callable:
        owner, graphs = self.owner, self.graphs
        names = [
            n.name if isinstance(n, fx.Node) else ""
            for n in next(n for n in reversed(gm.graph.nodes) if n.op == "output").args[0]
        ]

        def run(*args: Any) -> Any:
            graphs.held = [args[i] for i in graphs.weights]
            outs = gm(*args)
            if owner.ahead and graphs.parts:
                wanted = {
                    n
                    for part in (graphs.parts.recompute, graphs.parts.inputs, graphs.parts.weights)
                    for n in part.reads
                }
                owner._calls.append(_Call(graphs, {n: v for n, v in zip(names, outs) if n in wanted}))
            return outs

        return run

    def _backward(self, gm: fx.GraphModule) -> Callable:
        owner, graphs, parts = self.owner, self.graphs, self.graphs.parts
        names = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
        returned = len(next(n for n in reversed(gm.graph.nodes) if n.op == "output").args[0])
        early = [i for i in range(returned) if i not in set(graphs.weights)]

        def run(*args: Any) -> list[Any]:
            values = dict(zip(names, args))
            key = _key({n: v for n, v in values.items() if "tangents" not in n})
            call = next((c for c in owner._calls if c.graphs is graphs and c.key == key), None) if owner.ahead else None
            if call is not None:
                owner._calls.remove(call)
            values.update(_run(parts.recompute, values) if call is None or call.gradients is None else call.gradients)
            result = parts.inputs.gm(*(values[n] for n in parts.inputs.reads))
            values.update((n, v) for n, v in zip(parts.inputs.makes, result) if n)
            rest, held = [values[n] for n in parts.weights.reads], graphs.held
            owner.dropped += owner._late is not None
            owner._late = lambda: _add(held, parts.weights.gm, rest)
            out: list[Any] = [None] * returned
            for i, value in zip(early, result):
                out[i] = value
            return out

        return run


def _run(part: Part, values: dict[str, Any]) -> dict[str, Any]:
    with torch.no_grad():
        return dict(zip(part.makes, part.gm(*(values[n] for n in part.reads))))


def _key(saved: dict[str, Any]) -> tuple:
    """What tells the saved values of one forward from those of another."""
    return tuple(sorted((n, v.data_ptr()) for n, v in saved.items() if isinstance(v, torch.Tensor)))


@torch.no_grad()
def _add(weights: list[torch.Tensor], run: Callable, values: list[Any]) -> None:
    """Adds the gradients that ``run(*values)`` makes, as autograd's own accumulation does."""
    for weight, gradient in zip(weights, run(*values)):
        if gradient is None:
            continue
        if weight.grad is not None:
            weight.grad += gradient
        elif gradient.stride() == weight.stride():
            weight.grad = gradient
        else:
            weight.grad = torch.empty_like(weight).copy_(gradient)


def split_backward(module: nn.Module, options: dict[str, Any] | None = None, ahead: bool = False) -> SplitBackward:
    """See :class:`SplitBackward`."""
    return SplitBackward(module, options, ahead)
