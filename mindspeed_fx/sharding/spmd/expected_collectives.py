"""What a plan's edges need to be sent: the fewest collectives that a placement of every value allows, read off the
placements that the values of one rank's program have.

A value that is a sum over ranks and wanted whole needs an all-reduce, wanted in parts a reduce-scatter; parts wanted
whole an all-gather; parts of one dimension wanted as parts of another an all-to-all; whatever is whole, nothing. The
gradient takes the way backwards: it is a sum over ranks where a value that is whole meets something divided. One of
each for a value and all its readers.

:mod:`verify` holds the local program to this.
"""

from __future__ import annotations

import contextlib
import contextvars
from typing import Any, Iterator

import torch
import torch.fx as fx
from torch.distributed.tensor import DTensor, Placement, Shard

from mindspeed_fx.compat import dtensor, tracing, uneven_shards
from mindspeed_fx.compat.fake import hint
from mindspeed_fx.graph.provenance import module_path
from mindspeed_fx.graph.schema import argument
from mindspeed_fx.report.source import source_line
from mindspeed_fx.sharding.constraint import constrain, operands
from mindspeed_fx.sharding.expected import NUMBER, Send, Whole
from mindspeed_fx.sharding.spmd.experts import OwnRows

ops = torch.ops.mindspeed
LOSSES = (ops.cross_entropy.default, ops.linear_cross_entropy.default)
NORMS = (ops.rms_norm.default, ops.add_rms_norm.default)


_LISTENER: contextvars.ContextVar["ExpectedCollectives | None"] = contextvars.ContextVar("traffic", default=None)


def sends_inside(kind: str, dim: int, nbytes: int, backward: bool, why: str) -> None:
    """Said by an operator that sends by itself, while a program runs."""
    if (traffic := _LISTENER.get()) is not None and traffic.node is not None:
        traffic._add(kind, dim, hint(nbytes), backward, traffic.node, why)


class ExpectedCollectives:
    """What one program needs, and what became whole in it unasked; filled while the program runs on DTensors."""

    def __init__(self, mesh: Any):
        self.mesh = mesh
        self.messages: list[Send] = []
        self.wholes: list[Whole] = []
        self.values: dict[fx.Node, Any] = {}
        """What every node became, nodes of checkpointed regions among them; empty again once it was read."""
        self.node: fx.Node | None = None
        """The one that is running."""
        self.backward = ""
        """Module, line and operator whose gradient is being computed."""
        self.uneven = False
        """Whether something is sent in parts of unequal sizes, so that graphs differ from rank to rank."""
        self._padded = uneven_shards.padded_so_far()
        self._summed: set[tuple[fx.Node, int]] = set()
        self._sums: set[fx.Node] = set()
        """See :meth:`_read_sums`; of the mesh dimension that is being read."""

    @contextlib.contextmanager
    def listening(self) -> Iterator["ExpectedCollectives"]:
        """Operators that send by themselves say so to this object within (:func:`sends_inside`)."""
        token = _LISTENER.set(self)
        try:
            yield self
        finally:
            _LISTENER.reset(token)

    def traced(self) -> None:
        """The program, and its gradient where it has one, is traced: what fails from here on is no gradient."""
        self.backward, self.uneven = "", uneven_shards.padded_so_far() > self._padded

    def read(self, graph: fx.GraphModule, parameters: dict[fx.Node, tuple[str, DTensor, dict[int, str]]]) -> None:
        """Read the values of all nodes.

        Args:
            graph: captured, with ``constrain`` calls.
            parameters: placeholder -> name, value at rest, and for mesh dimensions over which it is made whole "zero1",
                "zero2" or "zero3".
        """
        for i in (i for i in range(self.mesh.ndim) if self.mesh.size(i) > 1):
            self._read_sums(i)
            for node in self.values:
                self._node(node, i)
            for node, (name, p, stages) in parameters.items():
                self._parameter(name, node, p, stages.get(i, ""), i)
            for a in next(n for n in graph.graph.nodes if n.op == "output").all_input_nodes:
                self._leaves(a, i)
        self.values = {}

    def _node(self, node: fx.Node, i: int) -> None:
        if node.op == "call_function" and node.target is constrain:
            self._edge(node, node.args[0], i)
        elif node.op == "call_function" and not tracing.is_higher_order(node.target):
            self._operator(node, i)

    # ---------------------------------------------------------------- edges

    def _edge(self, node: fx.Node, source: fx.Node, i: int) -> None:
        x, y = self.values.get(source), self.values.get(node)
        if not isinstance(x, DTensor) or not isinstance(y, DTensor):
            return
        p, t = x.placements[i], y.placements[i]
        for word in _messages(p, t):
            self._add(
                word,
                i,
                self._padded_bytes(x, y) * self._gathered_before(x.placements, y.placements, i),
                False,
                node,
                "edge of the plan",
            )
        if x.requires_grad:
            back = p if p.is_shard() else None
            if t.is_shard():
                size = self._padded_bytes(y, x) * self._gathered_before(y.placements, x.placements, i)
                for word in ["all_gather"] if back is None else ["all_to_all"] if back != t else []:
                    self._add(word, i, size, True, node, "gradient of an edge of the plan")
            elif node in self._sums:
                self._add(
                    "all_reduce" if back is None else "reduce_scatter",
                    i,
                    self._padded_bytes(y, x),
                    True,
                    node,
                    "gradient of an edge of the plan",
                )

    def _gathered_before(self, old: Any, new: Any, i: int) -> int:
        """How many times as large a value is when mesh dimension ``i`` has its turn: DTensor gathers over inner
        dimensions first.
        """
        times = 1
        for j in range(i + 1, self.mesh.ndim):
            times *= self.mesh.size(j) if old[j].is_shard() and not new[j].is_shard() else 1
        return times

    def _read_sums(self, i: int) -> None:
        """Find the values whose gradient, of a value that is whole along mesh dimension ``i``, is a sum over the ranks:
        something divided meets them. Readers come before what they read, each once: ways through a graph of residuals
        or of a recurrence are more than can be walked.
        """
        self._sums = set()
        for node in reversed(self.values):
            if self._meets_parts(node, i):
                self._sums.add(node)

    def _meets_parts(self, node: fx.Node, i: int) -> bool:
        for user in node.users:
            if user.op != "call_function" or user.target is constrain:
                continue
            value = self.values.get(user)
            if isinstance(value, OwnRows):
                return True
            if isinstance(value, tuple) and any(getattr(v, "is_sum", lambda _: False)(i) for v in value):
                return True  # tokens on their way to experts
            if tracing.is_higher_order(user.target):
                if any(
                    p in self._sums
                    for body, arg in operands(user.graph.owning_module, user)
                    for p, a in arg.items()
                    if a is node
                ):
                    return True
                continue
            results = [
                v
                for v in (value if isinstance(value, (tuple, list)) else (value,))
                if isinstance(v, DTensor) and v.requires_grad
            ]
            if (
                any(not v.placements[i].is_replicate() for v in results)
                or (results and self._divided_inside(user, i))
                or (results and user in self._sums)
            ):
                return True
        return False

    def _divided_inside(self, node: fx.Node, i: int) -> bool:
        """A loss by class: divided inside, and whole before and after."""
        if node.target not in LOSSES:
            return False
        x, dim = (self.values.get(node.args[0]), 1) if node.target is LOSSES[0] else (self.values.get(node.args[1]), 0)
        return isinstance(x, DTensor) and x.placements[i] == Shard(dim)

    def _leaves(self, node: fx.Node, i: int) -> None:
        x = self.values.get(node)
        if isinstance(x, DTensor):
            for word in _messages(x.placements[i], None):
                self._add(word, i, self._bytes(x), False, node, "results are whole")

    # ---------------------------------------------------------------- operators

    def _operator(self, node: fx.Node, i: int) -> None:
        value = self.values.get(node)
        results = [v for v in (value if isinstance(value, (tuple, list)) else (value,)) if isinstance(v, DTensor)]
        read = [(a, x) for a in node.all_input_nodes if isinstance(x := self.values.get(a), DTensor)]
        if not results or not read:
            return
        if node.target in LOSSES and self._divided_inside(node, i):
            return self._loss(node, read[0][1], i)
        if node.target in NORMS and read[0][1].placements[i] == Shard(read[0][1].ndim - 1):
            return self._norm(node, read[0][1], i)
        whole = all(v.placements[i].is_replicate() for v in results)
        for a, x in read:
            p = x.placements[i]
            if p.is_partial() and not any(v.placements[i].is_partial() for v in results) and (a, i) not in self._summed:
                self._summed.add((a, i))
                self._add("all_reduce", i, self._bytes(x), False, node, f"{node.target} needs its argument summed")
            elif p.is_shard() and whole:
                self.wholes.append(
                    Whole(str(node.target), self.mesh.mesh_dim_names[i], module_path(node), source_line(node))
                )

    def _loss(self, node: fx.Node, logits: DTensor, i: int) -> None:
        tokens = (
            dtensor.local_numel(logits)
            // logits.shape[-1]
            * (self.mesh.size(i) if logits.placements[i] == Shard(logits.ndim - 1) else 1)
        )
        wide = max(4, logits.dtype.itemsize)
        smoothing = argument(node, "label_smoothing", 0.0)
        for numbers in (1, 3 if smoothing else 2):
            self._add("all_reduce", i, numbers * tokens * wide, False, node, "a loss whose classes are divided")

    def _norm(self, node: fx.Node, x: DTensor, i: int) -> None:
        size = dtensor.local_numel(x) * self.mesh.size(i) // hint(x.shape[-1]) * max(4, x.dtype.itemsize)
        self._add("all_reduce", i, size, False, node, "a norm over divided rows")
        if x.requires_grad:
            self._add("all_reduce", i, size, True, node, "gradient of a norm over divided rows")

    def _parameter(self, name: str, node: fx.Node, p: DTensor, stage: str, i: int) -> None:
        whole, dim = self.values.get(node), self.mesh.mesh_dim_names[i]
        if not isinstance(whole, DTensor) or not whole.placements[i].is_replicate():
            return
        results, gathered = [], p.placements[i].is_shard()
        if gathered:
            results.append(Send("all_gather", dim, self._bytes(p), False, name, "a divided parameter is made whole"))
        if p.requires_grad and node in self._sums:
            results.append(
                Send(
                    "reduce_scatter" if gathered and stage != "zero1" else "all_reduce",
                    dim,
                    self._bytes(whole),
                    True,
                    name,
                    "gradient of a parameter that every rank uses",
                )
            )
        self.messages += [s for s in results if s.bytes > NUMBER]

    # ---------------------------------------------------------------- small things

    def _add(self, kind: str, i: int, size: int, backward: bool, node: fx.Node, why: str) -> None:
        if size > NUMBER:
            self.messages.append(Send(kind, self.mesh.mesh_dim_names[i], size, backward, module_path(node), why))

    def _padded_bytes(self, x: DTensor, other: DTensor) -> int:
        """Of ``x`` with the padding that the same value has as ``other``."""
        own, larger = hint(x.numel()), max(hint(x.numel()), hint(other.numel()))
        return self._bytes(x) * larger // max(own, 1)

    @staticmethod
    def _bytes(x: DTensor) -> int:
        return dtensor.local_numel(x) * x.dtype.itemsize


def _messages(p: Placement, t: Placement | None) -> Iterator[str]:
    """From ``p`` to ``t``; None: whole."""
    t = None if t is None or t.is_replicate() else t
    if p.is_partial():
        yield "all_reduce" if t is None else "reduce_scatter"
    elif p.is_shard() and t != p:
        yield "all_gather" if t is None else "all_to_all"
