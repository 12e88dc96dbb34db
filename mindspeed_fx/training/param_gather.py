"""Parameters that a collective still fills are waited for inside the forward graph, each group before its first use.

A listener (:func:`listen`) stands for a group of parameters, Megatron's bucket: it waits for the bucket's all-gather
and starts the next one, which runs beside the layers up to its own first use. Hooks on modules, by which Megatron does
this, do not run inside a compiled model.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence

import torch
import torch.fx as fx
from torch import Tensor

from mindspeed_fx.compat import partitioner
from mindspeed_fx.graph.op_sets import is_view
from mindspeed_fx.graph.recompile import recompile
from mindspeed_fx.training import data_parallel

KEY = "_mindspeed_fx_gather_key"
_listeners: list[Callable[[], None]] = []
"""By key."""


def listen(parameters: Sequence[Tensor], listener: Callable[[], None]) -> None:
    """Call ``listener`` in every forward of a graph, before the first use of any of ``parameters``."""
    for parameter in parameters:
        setattr(parameter, KEY, len(_listeners))
    _listeners.append(listener)


@torch.library.custom_op("mindspeed::await_parameters", mutates_args={"parameters"})
def await_parameters(parameters: list[Tensor], key: int) -> None:
    """Call the listener of ``key``, after which ``parameters`` have their values."""
    _listeners[key]()


@await_parameters.register_fake
def _(parameters: list[Tensor], key: int) -> None:
    return None


class Gathers:
    """The groups of one graph's parameters that are waited for.

    Args:
        inputs: of Dynamo's graph.
    """

    def __init__(self, inputs: Sequence[Any]) -> None:
        self.groups: dict[int, list[int]] = {}
        for i in data_parallel.parameters(inputs):
            if (key := getattr(inputs[i], KEY, None)) is not None:
                self.groups.setdefault(key, []).append(i)

    def __bool__(self) -> bool:
        return bool(self.groups)

    @property
    def identity(self) -> str:
        """What compile caches must know of it."""
        return f"-{self.groups}" if self.groups else ""

    def _parameters(self, graph: fx.Graph, key: int) -> list[fx.Node]:
        names = {f"primals_{i + 1}" for i in self.groups[key]}
        return [n for n in graph.find_nodes(op="placeholder") if n.target in names and n.users]

    def mark(self, joint: fx.GraphModule) -> None:
        """Have autograd keep the parameters without its check of versions: waiting for them counts as a write."""
        for key in self.groups:
            for node in self._parameters(joint.graph, key):
                partitioner.keep_unchecked(node)

    def insert(self, gm: fx.GraphModule) -> None:
        """Wait for each group before its first use in a forward graph, in place."""
        for key in self.groups:
            parameters = self._parameters(gm.graph, key)
            place = {n: k for k, n in enumerate(gm.graph.nodes)}
            views, readers = _views_and_readers(parameters)
            if not readers:
                continue
            first = min(readers, key=place.__getitem__)
            with gm.graph.inserting_before(first):
                wait = gm.graph.call_function(torch.ops.mindspeed.await_parameters.default, (parameters, key))
            wait.meta["val"] = None
            last = wait
            for view in sorted(views, key=place.__getitem__):  # torch makes them at the head of the graph
                if place[view] < place[first]:
                    last.append(view)
                    last = view
        recompile(gm)


def _views_and_readers(parameters: Sequence[fx.Node]) -> tuple[set[fx.Node], set[fx.Node]]:
    """What looks at the parameters' memory, and what reads it; the results of the graph are neither."""
    views: set[fx.Node] = set()
    readers: set[fx.Node] = set()
    waiting = [user for p in parameters for user in p.users]
    while waiting:
        node = waiting.pop()
        if is_view(node.target):
            views.add(node)
            waiting += node.users
        elif node.op != "output":
            readers.add(node)
    return views, readers
