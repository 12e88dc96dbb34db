"""What running an operation again and keeping a value cost under generated code, in bytes moved."""

from __future__ import annotations

import math
from typing import Callable

from mindspeed_fx.compat import partitioner
from mindspeed_fx.graph.match import aten
from mindspeed_fx.graph.storage import read_from_memory
from mindspeed_fx.passes.recompute.problem.dataflow import Dataflow, Operation, Value

KEEP = 4.0
"""Price of a saved byte, in bytes read or written. Anything from 2 to 8 gives the same plan for a transformer layer."""


FUSED = 0.15
"""Price of a byte that fused code holds in registers between two pointwise operations: its arithmetic."""


def prices(tape: Dataflow) -> tuple[Callable[[Operation], float], Callable[[Value], float], dict[Value, bool]]:
    """What running an operation again and keeping a value cost under generated code, in bytes moved; which values are
    written out.
    """
    written = {v: read_from_memory(v.node) for v in tape.values}
    far = _read_far_apart(tape)
    return lambda o: _again(o, written, far), _saved_cost, written


def _saved_cost(v: Value) -> float:
    """A value that its maker writes out anyhow is kept for less than one that stays in registers until then."""
    return 0.0 if v.returned else (KEEP + v.made_by.fusible) * v.bytes + 1


def _read_far_apart(tape: Dataflow) -> set[Value]:
    """Values that pointwise work reads both before and after the next product, as it does a residual stream: recomputed
    for the later reader, whose backward comes first, they would stay until the backward of the earlier one."""
    depth: dict[Operation, int] = {}
    for o in tape.operations:
        depth[o] = max((depth[v.made_by] + (not v.made_by.fusible) for v in o.inputs), default=0)
    readers = {v: [o for view in v.views for o in tape.readers.get(view, ()) if o.fusible] for v in tape.values}
    return {v for v, result in readers.items() if len({depth[o] for o in result}) > 1}


def _again(operation: Operation, written: dict[Value, bool], far: set[Value]) -> float:
    node = operation.node
    tensors = any(v.bytes for v in operation.outputs)
    fusible = operation.fusible or node.target == aten.cat.default  # its operands fuse into it, it into nothing
    if (
        (tensors and node.op == "call_function" and not fusible)
        or partitioner.must_save(node)
        or not partitioner.is_pure(node)
    ):
        return math.inf
    read, results = (sum(v.bytes for v in values) for values in (operation.inputs, operation.outputs))
    if read > 4 * results:  # a reduction or a lookup, which is done once its inputs have gone by
        return float(read)
    return sum(v.bytes * (1.0 if written[v] else FUSED) + v.bytes * KEEP * (v in far) for v in operation.outputs)
