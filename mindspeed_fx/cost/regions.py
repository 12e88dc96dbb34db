"""Which calls a code generator would run as one kernel, and what such a kernel moves: an approximation of Inductor.

Pointwise operators, copies, gathers, constants and reductions over rows join their producers when no other kind of
operator lies on a way between them. A region reads each value from outside once and writes what is used outside or
returned; what is used inside only never reaches memory. A reduction over other dimensions is a kernel of its own, which
computes what it sums again from the region's inputs unless that is written anyway. Nothing joins a matrix product.

Optimistic: rows of any length are read once, and a region may be of any size.
"""

from __future__ import annotations

from typing import Any

from mindspeed_fx.cost import aten
from mindspeed_fx.cost.operators import Cost, Spec
from mindspeed_fx.cost.read import Call, Calls

FUSIBLE = frozenset(("pointwise", "copy", "gather", "creation", "rows", "reduction"))


def group_kernels(calls: Calls) -> list[tuple[list[Call], Cost | None]]:
    """Kernels in order: the calls of each, and its cost where that is not the cost of its one call."""
    order = calls.calls
    producer = {s.key: i for i, c in enumerate(order) for s in c.writes}
    sources = [
        sorted({producer[s.key] for s in c.reads if s.key in producer and producer[s.key] < i})
        for i, c in enumerate(order)
    ]
    fusible = [c.kind in FUSIBLE and not _columns(c) for c in order]
    level, parent = [0] * len(order), list(range(len(order)))

    def find(i: int) -> int:
        while parent[i] != i:
            parent[i] = i = parent[parent[i]]
        return i

    for i, above in enumerate(sources):
        # Two calls of one level have no barrier between them, whatever the path.
        level[i] = max((level[j] + (not fusible[j]) for j in above), default=0)
        for j in above:
            if fusible[i] and fusible[j] and level[j] == level[i]:
                parent[find(j)] = find(i)
    members: dict[int, list[int]] = {}
    for i in range(len(order)):
        members.setdefault(find(i), []).append(i)
    users: dict[str, set[int]] = {}
    for i, c in enumerate(order):
        for s in c.reads:
            users.setdefault(s.key, set()).add(i)
    written = {
        i: [
            s
            for s in order[i].writes
            if s.key in calls.outputs
            or any(find(u) != find(i) and not (_columns(order[u]) and fusible[i]) for u in users.get(s.key, ()))
        ]
        for i in range(len(order))
        if fusible[i]
    }
    kernels = []
    for group in sorted(members.values(), key=lambda g: g[-1]):
        if not fusible[group[0]]:
            call = order[group[0]]
            kernels.append(
                (
                    [call],
                    _column_cost(call, order, producer, fusible, members, find, written) if _columns(call) else None,
                )
            )
        else:
            kernels.append(([order[i] for i in group], _region(group, order, producer, find, written)))
    return kernels


def _region(
    group: list[int], order: list[Call], producer: dict[str, int], find: Any, written: dict[int, list[Spec]]
) -> Cost:
    write = sum(s.bytes for i in group for s in written[i])
    vector = sum(aten.vector_flops(_name(order[i]), order[i].out, *order[i].reads) for i in group)
    read = _inputs(group, order, producer, find)
    wide = "float64" if any(s.dtype == "float64" for i in group for s in order[i].writes) else "float32"
    if write == 0:  # used by reductions over columns alone, which compute it again
        return Cost(launches=0, wide=wide)
    return Cost(vector=vector, read=read, write=write, wide=wide)


def _inputs(group: list[int], order: list[Call], producer: dict[str, int], find: Any) -> Any:
    """Bytes that a region reads: every view of memory from outside once, of a gather's table the rows taken."""
    root, results = find(group[0]), {}
    for i in group:
        call = order[i]
        for position, s in enumerate(call.reads):
            if s.key in producer and find(producer[s.key]) == root:
                continue
            taken = call.writes[0].bytes if call.kind == "gather" and position == 0 else s.bytes
            results[(s.key, str(s.shape), i if call.kind == "gather" and position == 0 else None)] = taken
    return sum(results.values())


def _columns(call: Call) -> bool:
    """A reduction over other dimensions than the last ones, or over all of a tensor that has several."""
    if call.kind != "reduction" or not call.reads:
        return False
    rank = len(call.reads[0].shape)
    dims = call.kwargs.get("dim", call.args[1] if len(call.args) > 1 else None)
    dims = [dims] if isinstance(dims, int) and not isinstance(dims, bool) else dims
    if not rank or not isinstance(dims, (list, tuple)) or not dims or not all(isinstance(d, int) for d in dims):
        return False
    return sorted(d % rank for d in dims) != list(range(rank - len(dims), rank))


def _column_cost(
    call: Call,
    order: list[Call],
    producer: dict[str, int],
    fusible: list[bool],
    members: dict[int, list[int]],
    find: Any,
    written: dict[int, list[Spec]],
) -> Cost | None:
    source = producer.get(call.reads[0].key)
    if source is None or not fusible[source] or call.reads[0].key in {s.key for s in written[source]}:
        return None
    group = members[find(source)]
    vector = sum(aten.vector_flops(_name(order[i]), order[i].out, *order[i].reads) for i in group)
    return Cost(
        vector=vector + call.reads[0].numel,
        read=_inputs(group, order, producer, find),
        write=sum(s.bytes for s in call.writes),
        wide="float64" if call.reads[0].dtype == "float64" else "float32",
    )


def _name(call: Call) -> str:
    return call.operator.rpartition(".")[2]
