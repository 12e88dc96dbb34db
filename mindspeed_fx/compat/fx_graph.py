"""Copies of fx graphs, graphs put in the place of others, and code that is written when it is called."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Iterator
from unittest import mock

import torch
import torch.fx as fx
from torch.fx._lazy_graph_module import _LazyGraphModule

# --------------------------------------------------------------------------- small helpers


def example_value_of(node: fx.Node) -> Any:
    """The fake value of a node, wherever this torch keeps it."""
    return node.meta["val"] if "val" in node.meta else node.meta.get("example_value")


def copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """An independent copy of the graph and of its nested graphs; tensors are shared. Its code is written when it is
    called.
    """
    memo: dict = {}
    root = torch.nn.Module()
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            value = functools.reduce(getattr, node.target.split("."), gm)
            if "." not in node.target:
                setattr(root, node.target, copy_graph(value) if isinstance(value, fx.GraphModule) else value)
    graph = fx.Graph()
    output = graph.graph_copy(gm.graph, memo)
    graph.output(output)
    return lazy_graph(root, graph)


def lazy_graph(root: torch.nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A module of this graph whose code is written when it is called."""
    return _LazyGraphModule(root, graph)


def recompile_when_called(gm: fx.GraphModule) -> None:
    """The code of ``gm`` is out of date: it is written when it is next called or read, as of what Dynamo hands over.
    (AOTAutograd's backward graphs are not so by themselves; every graph module has a class of its own.)"""
    _made_lazy(gm)
    gm.recompile()


def _made_lazy(gm: fx.GraphModule) -> bool:
    """Whether the class of ``gm`` was torch's usual one, and now is a lazy one."""
    usual = type(gm).__bases__ == (fx.GraphModule,) and type(gm) is not fx.GraphModule
    if usual:
        type(gm).__bases__ = (_LazyGraphModule,)
    return usual


@contextlib.contextmanager
def code_when_called() -> Iterator[None]:
    """Meanwhile every graph module that is made, or changed, is as :func:`recompile_when_called` leaves it."""
    own = fx.GraphModule.recompile

    @functools.wraps(own)
    def recompile(gm: fx.GraphModule) -> Any:
        return gm.recompile() if _made_lazy(gm) else own(gm)

    with mock.patch.object(fx.GraphModule, "recompile", recompile):
        yield


def unused_attribute(gm: fx.GraphModule, stem: str) -> str:
    """A name ``stem_N`` that ``gm`` does not have yet."""
    index = 0
    while hasattr(gm, f"{stem}_{index}"):
        index += 1
    return f"{stem}_{index}"


def _hide_constants(body: torch.nn.Module, known: set[int]) -> None:
    """Tensors that a nested graph was traced to hold become plain attributes: as the buffers that fx makes of them they
    would be inputs, of which Dynamo knows nothing. Those of ``known`` (their ids) stay."""
    for module in body.modules():
        for table in (module._buffers, module._parameters):
            for name in [name for name, tensor in table.items() if id(tensor) not in known]:
                module.__dict__[name] = table.pop(name)


def replace_graph(gm: fx.GraphModule, factor: fx.GraphModule) -> None:
    """Make ``gm`` compute what ``factor`` computes, in place: AOTAutograd holds on to the module it was given.

    A parameter or buffer of ``gm`` keeps its name: AOTAutograd makes inputs of those, and asks Dynamo where each comes
    from.
    """
    names = {id(tensor): name for name, tensor in (*gm.named_buffers(), *gm.named_parameters())}
    for node in factor.graph.nodes:
        if node.op == "get_attr":
            value = functools.reduce(getattr, node.target.split("."), factor)
            if id(value) not in names:
                if isinstance(value, torch.nn.Module):
                    _hide_constants(value, set(names))
                names[id(value)] = unused_attribute(gm, "captured")
                setattr(gm, names[id(value)], value)
            node.target = names[id(value)]
    # The inputs stay: Dynamo hangs their sources on the nodes.
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for node in reversed(list(gm.graph.nodes)):
        if node.op != "placeholder":
            gm.graph.erase_node(node)
    memo = dict(zip([n for n in factor.graph.nodes if n.op == "placeholder"], inputs))
    output = gm.graph.graph_copy(factor.graph, memo)
    gm.graph.output(output)
    gm.recompile()
