"""Gradients that are added to a buffer inside the backward graph, where they are made, and announced there.

A parameter with a ``main_grad`` (a float32 buffer, Megatron's word) and a listener (:func:`listen`) is read through a
function that is the identity forward; backward an operator adds the gradient to the buffer and calls the listener. So
a collective of the buffer's bucket starts beside the rest of the graph, where hooks on the parameter would be called
when the whole backward is over. What the listener does is decided when the operator runs: the graph stays the same for
micro-batches that start no collective. The parameter's ``.grad`` stays None.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence

import torch
import torch.fx as fx
from torch import Tensor

from mindspeed_fx.compat import auto_functionalized, graph_inputs, partitioner
from mindspeed_fx.training import data_parallel

KEY = "_mindspeed_fx_gradient_key"
NOBODY = -1
ADD_BY_THEMSELVES = ("mindspeed.linear_main_grad.default", "mindspeed.grouped_linear_main_grad.default")
"""Products whose backward adds to their weights' ``main_grad`` (megatron/main_grad.py, megatron/experts.py)."""
_listeners: list[Callable[[], None]] = []
"""By key."""


def listen(parameter: Tensor, listener: Callable[[], None]) -> None:
    """Call ``listener`` in every backward of a graph that adds a gradient of ``parameter`` to its ``main_grad``."""
    setattr(parameter, KEY, len(_listeners))
    _listeners.append(listener)


def key_of(parameter: Tensor) -> int:
    """The key of a parameter; ``NOBODY`` where nobody listens."""
    return getattr(parameter, KEY, NOBODY)


def announce(key: int) -> None:
    """Call the listener of ``key``; ``NOBODY`` is none."""
    if key != NOBODY:
        _listeners[key]()


@torch.library.custom_op("mindspeed::announce_gradient", mutates_args={"main_grad"})
def announce_gradient(main_grad: Tensor, key: int) -> None:
    """Call the listener of ``key``, after what wrote to ``main_grad`` before."""
    announce(key)


@torch.library.custom_op("mindspeed::accumulate_main_grad", mutates_args={"main_grad"})
def accumulate_main_grad(main_grad: Tensor, grad: Tensor, key: int) -> None:
    """main_grad += grad, of the same shape, and the listener of ``key`` is called."""
    main_grad.add_(grad)
    announce(key)


@announce_gradient.register_fake
def _(main_grad: Tensor, key: int) -> None:
    return None


@accumulate_main_grad.register_fake
def _(main_grad: Tensor, grad: Tensor, key: int) -> None:
    return None


ARGUMENTS = {
    "mindspeed.add_to_main_grad.default": ("grad", "x", "key"),
    "mindspeed.accumulate_main_grad.default": ("grad", "key"),
}
"""Operators that add to a main_grad, and their arguments behind it."""


def mark(joint: fx.GraphModule) -> None:
    """Have autograd keep buffers that the backward adds to without its check of versions: with several micro-batches in
    flight, as in a pipeline, each one's backward adds between another's forward and backward, and each wants the sum of
    its own time.
    """
    for node in joint.graph.nodes:
        if str(auto_functionalized.mutable_operator(node)) in ARGUMENTS:
            for base in auto_functionalized.bases_of(node) or ():
                if base.op == "placeholder":
                    partitioner.keep_unchecked(base)


def has_listeners(inputs: Sequence[Any]) -> bool:
    """Whether gradients of any trained parameter among the inputs of a graph are announced."""
    return any(key_of(inputs[i]) != NOBODY for i in data_parallel.parameters(inputs))


class Announcements:
    """The parameters of one graph whose gradients are announced in its backward, and the inputs that this adds.

    Args:
        gm: a copy of Dynamo's graph, which gets further inputs in place.
        inputs: its inputs.

    Attributes:
        inputs: what it is traced with.
    """

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self.positions = [i for i in data_parallel.parameters(inputs) if key_of(inputs[i]) != NOBODY]
        self.keys = [key_of(inputs[i]) for i in self.positions]
        state = self.state([inputs[i] for i in self.positions])
        self.inputs = [*inputs, *graph_inputs.add_inputs(gm, state, "main_grad")]

    def state(self, parameters: Sequence[Any]) -> list[Tensor]:
        """The buffers of the gradients."""
        return [p.main_grad for p in parameters]

    def read(self, gm: fx.GraphModule) -> None:
        """Read the parameters through :func:`read_announced`, in place; but where a linear layer adds its own."""
        added = gm.graph.find_nodes(op="placeholder")[len(self.inputs) - len(self.positions) :]
        inputs = dict(zip(self.positions, zip(added, self.keys, strict=True), strict=True))
        graph_inputs.read_through(gm, inputs, read_announced, lambda user: str(user.target) in ADD_BY_THEMSELVES)

    def wrap(self, compiled: Any) -> Any:
        """``compiled`` as a function of the graph's own inputs."""

        return graph_inputs.with_state(compiled, self.positions, self.state)


def read_announced(parameter: Tensor, main_grad: Tensor, key: int) -> Tensor:
    """``parameter``, whose gradient is added to ``main_grad`` and announced when it comes."""
    return _Announced.apply(parameter, main_grad, key)


class _Announced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, main_grad: Tensor, key: int) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.main_grad, ctx.key = main_grad, key  # not saved: autograd would refuse the change
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None, None]:
        if grad is not None:
            torch.ops.mindspeed.accumulate_main_grad(ctx.main_grad, grad, ctx.key)
        return None, None, None
