"""Which memory the values of a graph lie in, and how many bytes it takes, as their fake tensors say.

A view has no bytes of its own: it keeps the whole memory of what it views alive. An expanded dimension is in memory
once. All pieces of a split lie in one memory.
"""

from __future__ import annotations

import operator
from typing import Any, Iterable, Iterator

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from mindspeed_fx.compat import fake, partitioner
from mindspeed_fx.graph import memoize, op_sets
from mindspeed_fx.graph.collectives import is_wait

# --------------------------------------------------------------------------- bytes


def storage_bytes(value: Any) -> int:
    """Bytes of the memory that a fake tensor lies in; 0 for what is no tensor. Views say their base's."""
    if not isinstance(value, torch.Tensor):
        return 0
    if value.layout is not torch.strided:
        return dense_bytes(value)
    return fake.hint(value.untyped_storage().nbytes())


def dense_bytes(value: Any) -> int:
    """Bytes of the elements of a tensor, each once, as a message or a contiguous copy holds them; of several tensors,
    their sum; 0 for what is no tensor.
    """
    total = 0
    for tensor in _tensors(value):
        size = tensor.dtype.itemsize
        for n in tensor.shape:
            size *= fake.hint(n)
        total += size
    return total


def total_bytes(values: Iterable[Any]) -> int:
    """Bytes of the memories behind ``values``, each once."""
    return sum({fake.storage_of(t): storage_bytes(t) for t in _tensors(list(values))}.values())


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors of a value, in the order of tree_leaves."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [v for v in pytree.tree_leaves(value) if isinstance(v, torch.Tensor)]


# --------------------------------------------------------------------------- views, one at a time


def is_view(node: fx.Node) -> bool:
    """Whether a call computes nothing: its result, or every one of its results, lies in the memory of its argument."""
    return node.op == "call_function" and (_gives_view(node) or aliased_input(node) is not None)


def aliased_input(node: fx.Node) -> fx.Node | None:
    """The tensor whose memory the tensor ``node`` is a view of; None when it has its own, or several results."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    if node.target is operator.getitem:
        return aliased_input(node.args[0]) if _gives_view(node.args[0]) else None
    return node.args[0] if _gives_view(node) else None


def owner(node: fx.Node) -> fx.Node:
    """The node whose memory ``node`` is a view of, over any number of views; itself when it has its own."""
    while (source := aliased_input(node)) is not None:
        node = source
    return node


def views_of(node: fx.Node) -> dict[fx.Node, None]:
    """``node`` and every view of it, in order."""
    results: dict[fx.Node, None] = {}
    todo, base = [node], owner(node)
    while todo:
        n = todo.pop()
        results[n] = None
        todo += [u for u in n.users if is_view(u) and owner(u) is base]
    return results


def read_from_memory(node: fx.Node) -> bool:
    """True when something that generated code cannot fuse ``node`` into reads it, or a view of it: another call, or the
    caller.
    """
    todo = [node]
    while todo:
        for user in todo.pop().users:
            if is_view(user):
                todo.append(user)
            elif user.op == "output" or not partitioner.is_fusible(user):
                return True
    return False


def _gives_view(node: fx.Node) -> bool:
    """Whether the operator of ``node`` computes nothing in this call."""
    if op_sets.may_copy(node.target):
        return bool(node.args) and _shares_storage(node, node.args[0])
    return op_sets.is_view(node.target)


def _shares_storage(node: fx.Node, source: Any) -> bool:
    """Whether the fake values of two nodes lie in one memory; without fake values, as the schema says."""
    if not isinstance(source, fx.Node):
        return False
    if "val" not in node.meta or "val" not in source.meta:
        return op_sets.is_view(node.target)
    result = {fake.storage_of(t) for t in _tensors(node.meta["val"]) if t.layout is torch.strided}
    return bool(result) and result <= {
        fake.storage_of(t) for t in _tensors(source.meta["val"]) if t.layout is torch.strided
    }


# --------------------------------------------------------------------------- the memories of a graph


class Memories:
    """The blocks of memory that the values of a graph lie in, numbered; nodes are added in the order of the graph.

    Fake tensors alone do not tell: what is traced once for equal layers shares its fake memory. So a result lies in the
    memory of the argument that its schema names, or that the operator may return without saying (there fake memory
    decides, between this call and its own arguments); every other result has memory of its own. What a graph is given
    shares memory where the fake values do. A collective's wait gives what the collective made.

    Attributes:
        of: node -> the memory of each of its tensors, in the order of tree_leaves.
        bytes: of each memory.
        maker: of each memory, the node that allocates it, or the first that was given it.
    """

    def __init__(self, graph: fx.Graph | None = None):
        self.of: dict[fx.Node, list[int]] = {}
        self.bytes: list[int] = []
        self.maker: list[fx.Node] = []
        self._given: dict[int, int] = {}  # storage -> its memory
        for node in graph.nodes if graph is not None else ():
            if node.op != "output":
                self.add(node)

    def add(self, node: fx.Node) -> list[int]:
        """Notes the next node of the graph; returns its memories."""
        result = self.of[node] = self._find(node)
        return result

    def behind(self, nodes: Iterable[fx.Node]) -> set[int]:
        """The memories of these nodes."""
        return {m for n in nodes for m in self.of.get(n, ())}

    def is_given(self, memory: int) -> bool:
        """Whether the graph gets it from outside."""
        return self.maker[memory].op in ("placeholder", "get_attr")

    def made_by(self, node: fx.Node) -> set[int]:
        """The memories that a node allocates."""
        return {m for m in self.of.get(node, ()) if self.maker[m] is node}

    def _find(self, node: fx.Node) -> list[int]:
        value = node.meta.get("val")
        tensors = _tensors(value)
        if node.op in ("placeholder", "get_attr"):
            return [self._block(self._given, node, t) for t in tensors]
        if is_wait(node):
            return list(self.of.get(node.args[0], ()))
        if node.target is operator.getitem:
            return self._item(node)
        own: dict[int, int] = {}  # storage -> memory: several results may lie in one
        if not op_sets.may_alias(node.target) or not isinstance(node.target, torch._ops.OpOverload):
            return [self._block(own, node, t) for t in tensors]
        if op_sets.may_copy(node.target):
            return [m for t in tensors for m in self._of_input(node, t) or [self._block(own, node, t)]]
        results = []
        for i, part in _results(node.target, value):
            aliased = [m for source in _sources(node, i) for m in self.of.get(source, ())]
            result = _tensors(part)
            results += (
                (aliased * len(result))[: len(result)] if aliased else [self._block(own, node, t) for t in result]
            )
        return results

    def _of_input(self, node: fx.Node, value: torch.Tensor) -> list[int]:
        """The memory of the argument whose fake memory ``value`` has; [] where it has its own."""
        storage = _storage(value)
        for source in node.all_input_nodes:
            for t, memory in zip(_tensors(source.meta.get("val")), self.of.get(source, ())):
                if _storage(t) == storage:
                    return [memory]
        return []

    def _item(self, node: fx.Node) -> list[int]:
        """One of several results."""
        source, index = node.args
        result = self.of.get(source, [])
        whole = source.meta.get("val") if isinstance(source, fx.Node) else None
        if not (
            isinstance(whole, (list, tuple))
            and all(isinstance(v, torch.Tensor) or v is None for v in whole)
            and isinstance(index, int)
        ):
            return list(result)
        at = sum(isinstance(v, torch.Tensor) for v in whole[: index % len(whole)])
        return result[at : at + 1]

    def _block(self, known: dict[int, int], node: fx.Node, value: torch.Tensor) -> int:
        """The memory of ``value``, new where its storage is not ``known``."""
        memory = known.setdefault(_storage(value), len(self.bytes))
        if memory == len(self.bytes):
            self.bytes.append(storage_bytes(value))
            self.maker.append(node)
        return memory


def _storage(value: torch.Tensor) -> int:
    return fake.storage_of(value) if value.layout is torch.strided else id(value)


def _results(target: torch._ops.OpOverload, value: Any) -> Iterator[tuple[int, Any]]:
    """(number in the schema, value) of each result."""
    if len(target._schema.returns) == 1:
        yield 0, value
    else:
        yield from enumerate(value if isinstance(value, (list, tuple)) else ())


def _sources(node: fx.Node, result: int) -> list[fx.Node]:
    """The arguments whose memory the schema says that a result lies in."""
    results = []
    for i, name in _aliased(node.target, result):
        arg = node.args[i] if i < len(node.args) else node.kwargs.get(name)
        results += [n for n in pytree.tree_leaves(arg) if isinstance(n, fx.Node)]
    return results


@memoize.by_target
def _aliased(target: torch._ops.OpOverload, result: int) -> list[tuple[int, str]]:
    """(position, name) of the arguments that a result is an alias of."""
    arguments, returns = target._schema.arguments, target._schema.returns
    if all(r.alias_info is None for r in returns):  # a view that does not say so
        return [(0, arguments[0].name)]
    alias = returns[result].alias_info
    if alias is None:
        return []
    of_any = not alias.before_set  # a list of views names no set
    return [
        (i, a.name)
        for i, a in enumerate(arguments)
        if a.alias_info is not None and (of_any or a.alias_info.before_set & alias.before_set)
    ]
