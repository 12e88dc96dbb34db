"""What a graph costs on a device: each operator's FLOP, bytes and modelled seconds, and the totals.

    made = estimate(gm, "ascend910b2")
    made.flops, made.bytes, made.seconds             # FLOP and bytes are sympy expressions in a dynamic graph
    made.at(s0=8192).seconds                         # other sizes, nothing is traced again
    made.expression("flops", {"b": 2, "s": 512, "h": 1024, "4*h": 4096})   # 24*b*h**2*s + ...

Assumptions, beside those of :mod:`operators`: one kernel at a time, so times add up, collectives included; views are
free; every result goes to device memory, and every input comes from there, but for what the cache of a device with a
rate for it still has (:mod:`cache`). With ``fused`` pointwise work runs as Inductor would
group it: see :mod:`regions`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from dataclasses import dataclass
from typing import Any, Mapping

import sympy
import torch.fx as fx

from mindspeed_fx.cost.cache import Cache
from mindspeed_fx.cost.collectives import collective
from mindspeed_fx.cost.device import Hardware
from mindspeed_fx.cost.hardware import hardware as device
from mindspeed_fx.cost.naming import naming
from mindspeed_fx.cost.operators import Cost, Spec
from mindspeed_fx.cost.read import Call, Calls, read
from mindspeed_fx.cost.regions import group_kernels

COLLECTIVES = {
    "all_reduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
    "broadcast": "broadcast",
    "isend": "send_recv",
    "irecv": "send_recv",
}


@dataclass(frozen=True)
class NodeCost:
    """One kernel: a node, or the nodes that are fused into one."""

    name: str
    operator: str
    module: str
    cost: Cost
    seconds: float
    """Modelled, at the sizes of the trace."""
    bound: str
    """"matrix", "vector", "memory", "launch", "network", or "" for nothing to do."""
    members: tuple[str, ...] = ()
    """Names of the nodes, when there are several."""
    tier: str = ""
    """Collectives: the level of the network that it crosses."""
    timed: str = ""
    """Products and attention: the measured row that the time was taken from, with its source, or "formula"."""


class Estimate:
    """The modelled cost of a graph.

    Attributes:
        hardware: the device.
        nodes: one :class:`NodeCost` for each kernel, in the order of the graph.
        sizes: symbol -> the value at which times are given.
    """

    def __init__(self, calls: Calls, hw: Hardware, fused: bool, sizes: Mapping[sympy.Symbol, int]):
        self.calls, self.hardware, self.fused, self.sizes = calls, hw, fused, dict(sizes)
        self._notes = list(dict.fromkeys(calls.notes))
        unknown = sorted(
            {
                str(s)
                for c in calls.calls
                for t in c.writes
                for n in t.shape
                if isinstance(n, sympy.Basic)
                for s in n.free_symbols
                if s not in self.sizes
            }
        )
        if unknown:
            self._notes.append(
                f"{', '.join(unknown)}: known only at run time, times count 0; at({unknown[0]}=...) gives a value"
            )
        self._value = functools.cache(self._evaluate)

    @functools.cached_property
    def nodes(self) -> list[NodeCost]:
        groups = group_kernels(self.calls) if self.fused else [([c], None) for c in self.calls.calls]
        cache, known = Cache(self.hardware), {}
        results = []
        for members, cost in groups:
            cached = cache.touch(members, self.value)
            key = (cached, _alike(members[0])) if cost is None and len(members) == 1 else None  # layers repeat
            if key is None or key not in known:
                results.append(self._node(members, cost, cached))
            else:
                results.append(dataclasses.replace(known[key], name=members[0].name, module=members[0].module))
            if key is not None:
                known.setdefault(key, results[-1])
        return results

    def _node(self, members: list[Call], cost: Cost | None, cached: int) -> NodeCost:
        last = members[-1]
        if last.kind == "collective":
            return self._collective(last)
        cost = cost if cost is not None else last.cost(self._note)
        numeric = Cost(
            *(self.value(getattr(cost, k)) for k in ("flops", "matrix", "vector", "read", "write")),
            cost.dtype,
            cost.wide,
            self.value(cost.launches),
        )
        shape = tuple(max(1, self.value(n)) for n in cost.shape)
        numeric = dataclasses.replace(numeric, cached=min(cached, numeric.read), kind=cost.kind, shape=shape)
        for unit, dtype, work in (("matrix", cost.dtype, cost.matrix), ("vector", cost.wide, cost.vector)):
            if work != 0 and self.hardware.substitute(unit, dtype) != dtype:
                self._note(
                    f"{self.hardware.name} has no {unit} rate for {dtype}: that of "
                    f"{self.hardware.substitute(unit, dtype)} is taken"
                )
        names = tuple(m.name for m in members)
        label = (
            last.operator
            if len(members) == 1
            else "fused "
            + ", ".join(f"{m.operator.removeprefix('aten.')}" for m in members[:6])
            + (", ..." if len(members) > 6 else "")
        )
        correction = numeric.correction(self.hardware)
        return NodeCost(
            last.name,
            label,
            last.module,
            cost,
            float(numeric.seconds(self.hardware)),
            numeric.bound(self.hardware),
            names if len(names) > 1 else (),
            timed=str(correction or "formula") if cost.kind else "",
        )

    def _collective(self, call: Call) -> NodeCost:
        name = call.operator.rpartition(".")[2]
        kind = COLLECTIVES.get(name)
        ranks = len(call.ranks) if isinstance(call.ranks, list) else call.ranks
        cost = Cost(read=sum(t.bytes for t in call.reads), write=sum(t.bytes for t in call.writes))
        if kind is None or not ranks:
            self._note(
                f"{call.operator}: {'not known' if kind is None else 'its group is not known here'}, times count 0"
            )
            return NodeCost(call.name, call.operator, call.module, cost, 0.0, "")
        per_node = None
        if isinstance(call.ranks, list):
            inside = max(Counter(r // self.hardware.node for r in call.ranks).values())
            per_node = inside if ranks % inside == 0 else None
        size = max(self.value(cost.read), self.value(cost.write))
        modelled = collective(kind, size, ranks, self.hardware, per_node)
        return NodeCost(
            call.name, call.operator, call.module, cost, float(modelled.seconds), "network", tier=modelled.tier
        )

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)

    @property
    def notes(self) -> list[str]:
        """What was assumed for lack of knowledge, or not counted; [] when everything was."""
        return self._notes if self.nodes is not None else []

    # ---------------------------------------------------------------- totals

    @functools.cached_property
    def flops(self) -> Any:
        """FLOP as torch's counter counts; a sympy expression in a dynamic graph."""
        return sum(n.cost.flops for n in self.nodes)

    @functools.cached_property
    def bytes(self) -> Any:
        """Bytes to and from device memory."""
        return sum(n.cost.bytes for n in self.nodes)

    @functools.cached_property
    def vector(self) -> Any:
        """FLOP of the vector units."""
        return sum(n.cost.vector for n in self.nodes)

    @property
    def seconds(self) -> float:
        """Modelled seconds at the sizes of the trace, collectives included, nothing overlapped."""
        return sum(n.seconds for n in self.nodes)

    @property
    def network_seconds(self) -> float:
        return sum(n.seconds for n in self.nodes if n.bound == "network")

    @property
    def kernels(self) -> Any:
        return sum(n.cost.launches for n in self.nodes)

    def value(self, expression: Any) -> Any:
        """A number at :attr:`sizes`; symbols without a value count 0."""
        return self._value(expression) if isinstance(expression, sympy.Basic) else expression

    def _evaluate(self, expression: sympy.Basic) -> Any:
        result = expression.xreplace({s: sympy.Integer(self.sizes.get(s, 0)) for s in expression.free_symbols}).doit()
        return int(result) if result.is_integer else float(result)

    # ---------------------------------------------------------------- other sizes, other names

    def at(self, **sizes: int) -> "Estimate":
        """The estimate for other sizes, by symbol ("s0", as in the graph's code); nothing is traced again.

        Raises:
            KeyError: the graph has no such symbol.
        """
        symbols = {
            str(s): s
            for c in self.calls.calls
            for t in (*c.reads, *c.writes)
            for n in t.shape
            if isinstance(n, sympy.Basic)
            for s in n.free_symbols
        }
        for name in sizes:
            if name not in symbols:
                raise KeyError(
                    f'the graph has no size "{name}"; it has: '
                    f"{', '.join(sorted(symbols)) or 'none, every size is fixed'}"
                )
        return Estimate(
            self.calls, self.hardware, self.fused, {**self.sizes, **{symbols[k]: v for k, v in sizes.items()}}
        )

    def on(self, hardware: "str | Hardware", fused: bool | None = None) -> "Estimate":
        """The same graph on another device."""
        return Estimate(self.calls, device(hardware), self.fused if fused is None else fused, self.sizes)

    def expression(self, what: str, names: Mapping[str, int]) -> sympy.Expr:
        """A total as an expression in named sizes, such as 24*b*s*h**2.

        Args:
            what: "flops", "bytes" or "vector".
            names: sympy expression -> its value in this graph: {"b": 2, "s": 512, "h": 1024, "4*h": 4096}. A size that
                is none of the values is taken for a product of two or three of the plain names, or stays a number. In a
                dynamic graph the values are those of :attr:`sizes`.

        Raises:
            ValueError: two expressions have one value, a name has a value below 2, or ``what`` is not known.
        """
        if what not in ("flops", "bytes", "vector"):
            raise ValueError(f'{what!r} is no total; valid: "flops", "bytes", "vector"')
        name = naming(names)
        calls = self.calls.sized(lambda n: name(self.value(n)))
        return sympy.expand(getattr(Estimate(calls, self.hardware, self.fused, {}), what))

    def times_from(self) -> list[dict[str, Any]]:
        """Where the times of products and attention come from, slowest first: measured row or "formula", calls,
        seconds.
        """
        rows: dict[str, dict[str, Any]] = {}
        for n in self.nodes:
            if n.timed:
                row = rows.setdefault(n.timed, {"row": n.timed, "calls": 0, "seconds": 0.0})
                row["calls"] += 1
                row["seconds"] += n.seconds
        return sorted(rows.values(), key=lambda r: -r["seconds"])

    def by_operator(self) -> list[dict[str, Any]]:
        """Totals for each operator, slowest first: operator, calls, flops, bytes, seconds; bound and timed (of most of
        the time).
        """
        rows: dict[str, dict[str, Any]] = {}
        for n in self.nodes:
            name = "pointwise" if n.members else n.operator
            row = rows.setdefault(
                name, {"operator": name, **dict.fromkeys(("calls", "flops", "bytes"), 0), "seconds": 0.0}
            )
            most = row.setdefault("bound", Counter()), row.setdefault("timed", Counter())
            row["calls"] += 1
            row["flops"] += self.value(n.cost.flops)
            row["bytes"] += self.value(n.cost.bytes)
            row["seconds"] += n.seconds
            most[0][n.bound] += n.seconds
            most[1][n.timed] += n.seconds
        largest = {name: {k: r[k].most_common(1)[0][0] for k in ("bound", "timed")} for name, r in rows.items()}
        return sorted(({**r, **largest[name]} for name, r in rows.items()), key=lambda r: -r["seconds"])

    def summary(self) -> dict[str, Any]:
        """Plain values for JSON: totals at :attr:`sizes`."""
        return {
            "hardware": self.hardware.name,
            "fused": self.fused,
            "kernels": self.value(self.kernels),
            "flops": self.value(self.flops),
            "bytes": self.value(self.bytes),
            "seconds": self.seconds,
            "network_seconds": self.network_seconds,
            "times_from": self.times_from(),
            "notes": self.notes,
        }

    def __str__(self) -> str:
        rows = [
            f"{r['operator']:<44} {r['calls']:>5} {r['flops'] / 1e9:>12.3f} {r['bytes'] / 1e6:>12.2f} "
            f"{r['seconds'] * 1e6:>12.1f}  {r['bound']:<8} {r['timed']}".rstrip()
            for r in self.by_operator()
        ]
        total = self.summary()
        head = (
            f"modelled on {self.hardware.name}: {total['flops'] / 1e9:.3f} GFLOP, {total['bytes'] / 1e6:.2f} MB, "
            f"{total['seconds'] * 1e6:.1f} us, {total['kernels']} kernels"
        )
        return "\n".join(
            [
                head,
                f"{'operator':<44} {'calls':>5} {'GFLOP':>12} {'MB':>12} {'us':>12}  {'bound':<8} time from",
                *rows,
                *(f"note: {n}" for n in self.notes),
            ]
        )


def _alike(call: Call) -> Any:
    """Equal for calls that cost the same: the operator, its numbers, layouts of its tensors, and which of these are
    one.
    """
    seen: dict[int, int] = {}

    def key(value: Any) -> Any:
        if isinstance(value, Spec):
            return seen.setdefault(id(value), len(seen)), value.shape, value.dtype, value.expanded
        if isinstance(value, (list, tuple)):
            return tuple(map(key, value))
        return value if isinstance(value, (int, float, str, type(None))) else str(value)

    return (
        call.operator,
        call.overload,
        tuple(call.ranks) if isinstance(call.ranks, list) else call.ranks,
        key(call.out),
        key(call.args),
        tuple((k, key(v)) for k, v in call.kwargs.items()),
    )


def estimate(gm: fx.GraphModule, hardware: "str | Hardware", fused: bool = False) -> Estimate:
    """The modelled cost of a graph: forward, backward, joint or captured.

    Args:
        gm: its nodes have fake values in ``meta["val"]``; those that have none are named in ``notes``.
        hardware: name or :class:`Hardware`.
        fused: group pointwise work as Inductor would; False: a kernel for each operator.

    Raises:
        OptionError: no such hardware.
    """
    calls = read(gm)
    return Estimate(calls, device(hardware), fused, calls.hints)
