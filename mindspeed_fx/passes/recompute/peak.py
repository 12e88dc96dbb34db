"""Peak memory of a training step for a choice of what the forward saves: exact liveness, in the order the graphs run.

The forward runs in the order of the joint graph; the backward too, and what it makes again comes right before its first
reader, as torch's partitioner orders it. Views share memory, a value dies with its last reader, what the forward returns
and gradients live on. With generated code, pointwise results that only fused code reads are never in memory. What an
operator of ours fills and frees within its call is found by tracing it; workspaces of other libraries' calls and the
allocator's rounding are not counted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from mindspeed_fx import compat, compat_partition
from mindspeed_fx.kernels import REGISTRY
from mindspeed_fx.partition.memory import peak
from mindspeed_fx.passes.recompute.tape import in_memory


class Peak(NamedTuple):
    bytes: int
    """Beyond the inputs of the forward."""
    node: fx.Node
    """Where it is reached."""
    again: list[fx.Node]
    """What the backward runs again, in order."""


class Step:
    """One training step of a joint graph.

    Args:
        info: torch's classification of the nodes.
        fused: code is generated for what is not a kernel.
        target: "cpu", "cuda" or "npu".
    """

    def __init__(self, graph: fx.Graph, info: Any, fused: bool, target: str):
        self.order = {n: i for i, n in enumerate(graph.nodes)}
        closure = compat_partition.backward_nodes(info)
        self.backward = [n for n in graph.nodes if n in closure and n.op != "output"]
        self.output = next(n for n in reversed(graph.nodes) if n.op == "output")
        self.returned = [n for n in self.output.all_input_nodes if n not in closure]
        self.needed = compat_partition.needed_by_backward(info)
        self.root = {n: compat_partition.owner(n) for n in graph.nodes}
        self.full = {n: _size(n) if self.root[n] is n and not compat_partition.is_input(n) else 0 for n in graph.nodes}
        self.size = {n: size if not fused or (size and (not compat_partition.is_fusible(n) or compat_partition.read_from_memory(n))) else 0 for n, size in self.full.items()}
        traced: dict[Any, int] = {}
        self.workspace = {n: _workspace(n, target, fused, traced) for n in graph.nodes if n.target in REGISTRY}

    def peak(self, saved: set[fx.Node]) -> Peak | None:
        """The peak when the forward saves ``saved``; None when the backward could then not have all it needs."""
        forward = self._ancestors([*self.returned, *saved])
        first = [n for n in self.order if n in forward]
        second, again = self._second(saved)
        if any(not compat_partition.is_pure(n) and not compat_partition.must_recompute(n) for n in again):
            return None
        kept = {self.root[n] for n in (*self.returned, *saved)}
        size = {**self.size, **{n: self.full[n] for n in kept}}  # what is kept is written out, fused or not
        best, alive = self._walk(first, kept, {}, size)
        ends = {self.root[n] for n in (*self.returned, *self.output.all_input_nodes)}
        later, _ = self._walk(second, ends, alive, size)
        top = max(best, later, key=lambda found: found[0])
        return Peak(top[0], top[1], again)

    def _second(self, saved: set[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
        """The backward in the order it runs, and what in it was run by the forward."""
        done, run, again, backward = set(saved), [], [], set(self.backward)
        for node in [*self.backward, *sorted((n for n in self.needed if n in self.output.all_input_nodes), key=self.order.__getitem__)]:
            found = self._ancestors([node], done)
            for n in sorted(found, key=self.order.__getitem__):
                done.add(n)
                run.append(n)
                if n is not node and n not in backward and n.op == "call_function":
                    again.append(n)
        return run, again

    def _ancestors(self, nodes: list[fx.Node], stop: Any = ()) -> set[fx.Node]:
        found, todo = set(), [n for n in nodes if n not in stop]
        while todo:
            n = todo.pop()
            if n not in found:
                found.add(n)
                todo += [a for a in n.all_input_nodes if a not in stop and a not in found]
        return found

    def _walk(self, run: list[fx.Node], kept: set[fx.Node], alive: dict[fx.Node, int], size: dict[fx.Node, int]) -> tuple[tuple[int, fx.Node], dict[fx.Node, int]]:
        """((largest sum of bytes alive, where), what is alive at the end)."""
        last: dict[fx.Node, int] = {}
        for i, n in enumerate(run):
            for used in (n, *n.all_input_nodes):
                last[self.root[used]] = i
        dies: dict[int, list[fx.Node]] = {}
        alive = dict(alive)
        for value in {*alive, *last}:
            if value not in kept:
                dies.setdefault(last.get(value, 0), []).append(value)
        total = sum(alive.values())
        best = (total, run[0] if run else self.output)
        for i, n in enumerate(run):
            value = self.root[n]
            if value not in alive and size[value]:
                alive[value] = size[value]
                total += alive[value]
            if total + self.workspace.get(n, 0) > best[0]:
                best = (total + self.workspace.get(n, 0), n)
            for value in dies.get(i, ()):
                total -= alive.pop(value, 0)
        return best, alive


def _size(node: fx.Node) -> int:
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)) and not compat_partition.is_view(node):
        return 0  # its results are nodes of their own
    return sum(in_memory(v) for v in pytree.tree_leaves(value))


def _workspace(node: fx.Node, target: str, fused: bool, traced: dict[Any, int]) -> int:
    """Bytes that the kernel of ``node`` has alive at most beside its operands and results; 0 when it cannot be traced."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    lowering, _ = REGISTRY[node.target].choose(target, args, kwargs, codegen=fused)
    run = lowering.build if lowering else REGISTRY[node.target].reference
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    key = (run, repr([x for x in leaves if not isinstance(x, torch.Tensor)]), tuple(compat.layout_key(x) for x in tensors))
    if key not in traced:

        def call(*given: torch.Tensor) -> Any:
            left = iter(given)
            a, k = pytree.tree_unflatten([next(left) if isinstance(x, torch.Tensor) else x for x in leaves], spec)
            return run(*a, **k)

        try:
            found = peak(compat.make_fx_decomposed(call, tensors, None))
            traced[key] = max(0, found["peak"] - found["inputs"] - found["outputs"])
        except Exception:  # kernels that look at values choose their own buffers
            traced[key] = 0
    return traced[key]
