"""A graph as a list of calls that the cost model understands: operators with the sizes and types of what they read and
write.

Calls hold no tensors and no nodes, so they outlive the graph and are evaluated again for other sizes without tracing.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from dataclasses import dataclass, field
from typing import Any, Callable

import sympy
import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from mindspeed_fx.compat import auto_functionalized, distributed, symbols
from mindspeed_fx.cost import aten
from mindspeed_fx.cost.operators import Cost, Spec, once, spec, tensors
from mindspeed_fx.graph import memoize
from mindspeed_fx.graph.annotate import written_nodes
from mindspeed_fx.graph.liveness import live_nodes
from mindspeed_fx.graph.op_sets import OVERWRITES, may_write
from mindspeed_fx.graph.provenance import origin_path
from mindspeed_fx.graph.storage import is_view


@dataclass
class Call:
    """One operator call."""

    name: str
    """Name of the node; nested graphs as "outer/inner"."""
    operator: str
    """"aten.mm", "mindspeed.rms_norm" ..."""
    kind: str
    """As :func:`aten.kind`; "collective", "operator" for ``mindspeed::``, "region" for a nested graph that is not
    looked into.
    """
    out: Any
    args: tuple
    kwargs: dict
    overload: Any = None
    module: str = ""
    ranks: list[int] | int | None = None
    """Collectives: the ranks, or how many."""

    @property
    def reads(self) -> list[Spec]:
        return tensors(*self.args, *self.kwargs.values())

    @property
    def writes(self) -> list[Spec]:
        return tensors(self.out)

    def cost(self, note: Callable[[str], None] = lambda text: None) -> Cost:
        """Cost of a call that is not a collective; ``note`` is told what had to be assumed."""
        try:
            if self.kind == "other" and not self.operator.startswith(("aten.", "prims.")):
                note(
                    f"{self.operator} is not known: counted as one pass over its tensors, its FLOP as one for each "
                    "element"
                )
            if self.kind != "operator":
                return aten.cost(self.operator.rpartition(".")[2], self.out, self.args, self.kwargs)
            known = _find_operator(self.overload)
            if known is not None and known.cost is not None:
                return known.cost(self.out, *self.args, **self.kwargs)
            note(f"{self.operator} has no cost: counted as one pass over its tensors")
        except (
            TypeError,
            ValueError,
            IndexError,
            AttributeError,
        ) as e:  # an overload that the formula was not written for
            note(f"{self.operator}: its formula does not take this call ({e}): counted as one pass over its tensors")
        return once(self.out, *self.args, *self.kwargs.values())


def _find_operator(overload: Any) -> Any:
    return next((result for find in _LOOKUPS if (result := find(overload)) is not None), None)


_LOOKUPS: list[Callable[[Any], Any]] = []


def register_operators(find: Callable[[Any], Any]) -> None:
    """Let ``find(overload)`` say which operators have a cost of their own: an object with ``cost``, or None."""
    _LOOKUPS.append(find)


@dataclass
class Calls:
    """The calls of a graph in order."""

    calls: list[Call] = field(default_factory=list)
    outputs: set[str] = field(default_factory=set)
    """Keys of the memory that the graph returns, or changes of what it was given."""
    returned: dict[str, str] = field(default_factory=dict)
    """Name of a node that the graph returns -> key of its memory; under that name a backward takes what is saved."""
    hints: dict[sympy.Symbol, int] = field(default_factory=dict)
    """Values the symbols had while tracing."""
    notes: list[str] = field(default_factory=list)
    """What could not be read, in plain words."""
    waits: list[tuple[int, str]] = field(default_factory=list)
    """(How many calls stand before it, key of the memory waited for) of every wait for a collective."""

    def sized(self, size: Callable[[Any], Any]) -> "Calls":
        """The same calls with every size replaced by ``size(size)``."""
        memo: dict[int, Spec] = {}

        def replaced(value: Any) -> Any:
            if isinstance(value, Spec):
                if id(value) not in memo:
                    memo[id(value)] = dataclasses.replace(value, shape=tuple(size(n) for n in value.shape))
                return memo[id(value)]
            if isinstance(value, (list, tuple)):
                return (
                    type(value)(map(replaced, value)) if type(value) in (list, tuple) else [replaced(v) for v in value]
                )
            return size(value) if isinstance(value, sympy.Basic) else value

        results = [
            dataclasses.replace(
                c, out=replaced(c.out), args=replaced(c.args), kwargs={k: replaced(v) for k, v in c.kwargs.items()}
            )
            for c in self.calls
        ]
        return Calls(results, self.outputs, self.returned, self.hints, self.notes, self.waits)


def read(gm: fx.GraphModule, prefix: str = "") -> Calls:
    """The calls of ``gm``; views, sizes and placeholders are none.

    Args:
        gm: graph of operators (ATen before or after decomposition, ``mindspeed::``, torch_npu) whose nodes have fake
            values in ``meta["val"]``.
    """
    return _Reader(prefix).read(gm)


def call_of(target: Any, out: Any, args: tuple, kwargs: dict) -> Call:
    """A call that was made, by its tensors."""
    space, name, kind = _call_name(target)
    out, args, kwargs = pytree.tree_map(lambda x: spec(x) if isinstance(x, torch.Tensor) else x, (out, args, kwargs))
    return Call(name, f"{space}.{name}", kind, out, args, kwargs, target)


class _Reader:
    def __init__(self, prefix: str):
        self.prefix, self.result = prefix, Calls()
        self.values: dict[Any, Any] = {}
        self.groups: dict[Any, Any] = {}
        self.input_keys: set[str] = set()  # keys of the memory that the graph is given

    def read(self, gm: fx.GraphModule) -> Calls:
        missing, live = 0, live_nodes(gm.graph)
        for node in gm.graph.nodes:
            if node not in live and node.op != "placeholder":
                continue
            if node.op == "output":
                for result in node.all_input_nodes:
                    keys = {s.key for s in tensors(self.values.get(result))}
                    self.result.outputs |= keys
                    self.result.returned |= dict.fromkeys([result.name], next(iter(keys))) if len(keys) == 1 else {}
            elif node.op in ("placeholder", "get_attr"):
                value = node.meta.get("val", node.meta.get("example_value"))
                self.values[node] = self._specs(
                    value
                    if value is not None
                    else getattr(gm, str(node.target), None)
                    if node.op == "get_attr"
                    else None,
                    node.name,
                )
                self.input_keys |= {s.key for s in tensors(self.values[node])}
            elif node.op == "call_function":
                if isinstance(node.target, torch._ops.HigherOrderOperator):
                    if not self._writing_call(node):
                        self._nested(gm, node)
                elif "val" not in node.meta:
                    missing += 1
                else:
                    self._call(node)
            else:
                missing += 1
        if missing:
            self.result.notes.append(f"{missing} nodes without fake values are not counted")
        return self.result

    def _size(self, n: Any) -> Any:
        if isinstance(n, torch.SymInt):
            self.result.hints.update(symbols.symbol_hints(n))
        return symbols.size_expression(n)

    def _specs(self, value: Any, key: str) -> Any:
        if isinstance(value, torch.Tensor):
            key = self.prefix + key
            plain = (
                all(type(n) is int for n in (*value.shape, *value.stride())) if value.layout is torch.strided else False
            )
            return (
                Spec(*_layout(value.shape, value.stride(), value.dtype), key) if plain else spec(value, self._size, key)
            )
        if isinstance(value, (list, tuple)):
            return tuple(self._specs(v, f"{key}[{i}]") for i, v in enumerate(value))
        return (
            self._size(value)
            if isinstance(value, torch.SymInt)
            else None
            if isinstance(value, (fx.GraphModule, torch.nn.Module))
            else value
        )

    def _arguments(self, node: fx.Node) -> tuple[tuple, dict]:
        args = tuple(self._value_of(a) for a in node.args)
        kwargs = {k: self._value_of(a) for k, a in node.kwargs.items()} if node.kwargs else {}
        if not kwargs and isinstance(node.target, torch._ops.OpOverload):
            args += _defaults(node.target, len(args))
        return args, kwargs

    def _value_of(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return self.values.get(value)
        if isinstance(value, (list, tuple)):
            return tuple(map(self._value_of, value)) if isinstance(value, tuple) else [self._value_of(v) for v in value]
        return fx.map_arg(value, self.values.get) if isinstance(value, (dict, slice)) else value

    def _call(self, node: fx.Node) -> None:
        value, target = node.meta["val"], node.target
        if target is operator.getitem:
            whole = self.values.get(node.args[0])
            self.values[node] = (
                whole[node.args[1]]
                if isinstance(whole, tuple) and isinstance(node.args[1], int)
                else self._specs(value, node.name)
            )
            return
        if (
            not isinstance(value, torch.Tensor)
            and not any(isinstance(t, torch.Tensor) for t in pytree.tree_leaves(value))
            and not may_write(target)
        ):
            self.values[node] = self._specs(value, node.name)
            return
        space, name, kind = _call_name(target)
        if kind == "free" and not is_view(node):
            self.values[node] = self._specs(value, node.name)
            return
        if is_view(node):
            base = next((s for s in tensors(*map(self._value_of, node.args))), None)
            result = self._specs(value, node.name)
            same = lambda s: (
                Spec(s.shape, s.dtype, s.itemsize, s.expanded, base.key) if isinstance(s, Spec) and base else s
            )
            self.values[node] = same(result) if isinstance(result, Spec) else pytree.tree_map(same, result)
            return
        out = self.values[node] = self._specs(value, node.name)
        if not self.input_keys.isdisjoint(s.key for s in tensors(*map(self._value_of, written_nodes(node)))):
            self.result.outputs |= {s.key for s in tensors(out)}
        args, kwargs = self._arguments(node)
        if target in OVERWRITES:
            args = (None, *args[1:])
        call = Call(
            self.prefix + node.name,
            f"{space}.{name}" if space else name,
            kind,
            out,
            args,
            kwargs,
            target,
            origin_path(node),
        )
        if kind == "collective":
            if name == "wait_tensor":
                self.values[node] = call.reads[0] if call.reads else out
                self.result.waits += [(len(self.result.calls), s.key) for s in call.reads[:1]]
                return
            call.ranks = _ranks(args, kwargs, self.groups)
        elif not isinstance(target, torch._ops.OpOverload):
            self.result.notes.append(
                f"{call.name} calls {name}, which is no operator: counted as one pass over its tensors"
            )
        self.result.calls.append(call)

    def _writing_call(self, node: fx.Node) -> bool:
        """The call behind an ``auto_functionalized`` node, whose results 1, 2 ... are the tensors it writes."""
        target = auto_functionalized.mutable_operator(node)
        if target is None:
            return False
        arguments = auto_functionalized.argument_nodes(node) or {}  # none where it writes to views
        self.values[node] = self._specs(node.meta.get("val"), node.name)
        space, name, kind = _call_name(target)
        kwargs = {k: self._value_of(a) for k, a in arguments.items()}
        self.result.calls.append(
            Call(self.prefix + node.name, f"{space}.{name}", kind, None, (), kwargs, target, origin_path(node))
        )
        return True

    def _nested(self, gm: fx.GraphModule, node: fx.Node) -> None:
        """A higher-order operator: the first graph it is given counts (a branch of cond stands for both)."""
        inner = [
            getattr(gm, str(a.target), None)
            for a in pytree.tree_leaves((node.args, node.kwargs))
            if isinstance(a, fx.Node) and a.op == "get_attr"
        ]
        inner = [g for g in inner if isinstance(g, fx.GraphModule)]
        self.values[node] = self._specs(node.meta.get("val"), node.name)
        if not inner:
            self.result.notes.append(f"{node.name} ({node.target}) is not looked into: not counted")
            return
        result = read(inner[0], f"{self.prefix}{node.name}/")
        self.result.waits += [(len(self.result.calls) + at, key) for at, key in result.waits]
        self.result.calls += result.calls
        self.result.hints.update(result.hints)
        self.result.notes += result.notes
        self.result.outputs |= result.outputs
        if len(inner) > 1:
            self.result.notes.append(
                f"{node.name} ({node.target}): only the first of its {len(inner)} graphs is counted"
            )


@functools.lru_cache(4096)
def _layout(
    shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype
) -> tuple[tuple[int, ...], str, int, tuple[bool, ...]]:
    """The first arguments of a Spec of fixed sizes; :func:`spec`, once for each layout."""
    return tuple(shape), str(dtype).removeprefix("torch."), dtype.itemsize, tuple(s == 0 for s in strides)


@memoize.by_target
def _call_name(target: Any) -> tuple[str, str, str]:
    """Namespace, name without overload, and kind of what a node calls."""
    space, _, name = str(getattr(target, "overloadpacket", getattr(target, "__name__", target))).rpartition(".")
    name = name.removesuffix("_") if name.removesuffix("_") and not name.startswith("__") else name
    return (
        space,
        name,
        "operator"
        if space == "mindspeed"
        else "collective"
        if space in ("_c10d_functional", "_dtensor")
        else aten.kind(name, target),
    )


@memoize.by_target
def _defaults(target: torch._ops.OpOverload, arg: int) -> tuple:
    """Values of the positional arguments after the first ``arg``."""
    return tuple(a.default_value for a in target._schema.arguments[arg:] if not a.kwarg_only and a.has_default_value())


def _ranks(args: tuple, kwargs: dict, known: dict[str, list[int] | None]) -> list[int] | int | None:
    """Who takes part: by the group's name where the group exists, else the size among the arguments."""
    values = [*args, *kwargs.values()]
    for name in (v for v in values if isinstance(v, str)):
        if name not in known:
            known[name] = distributed.group_ranks(name)
        if known[name]:
            return known[name]
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool)), None)
