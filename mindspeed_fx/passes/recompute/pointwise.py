"""Without a budget: what the backward makes again because keeping it costs more.

On cpu a saved activation costs page faults when it is made and cache misses when it is read, while pointwise work is
fused into what reads it. Measured in benchmarks/results. Elsewhere, and where no code is generated, torch's own min-cut
decides, which never makes again what the backward would have to write out.
"""

from __future__ import annotations

import math
from typing import Callable

import torch.fx as fx

from mindspeed_fx import compat_partition
from mindspeed_fx.passes.base import Context, PassReport, register, site, skip
from mindspeed_fx.passes.fusion.match import aten
from mindspeed_fx.passes.recompute.cut import cheapest
from mindspeed_fx.passes.recompute.policy import fixed
from mindspeed_fx.passes.recompute.tape import Operation, Tape, Value, record, saved_names

NAME = "recompute.pointwise"

KEEP = 4.0
"""Price of a saved byte, in bytes read or written. Anything from 2 to 8 gives the same plan for a transformer layer."""

FUSED = 0.15
"""Price of a byte that fused code holds in registers between two pointwise operations: its arithmetic."""


@register(NAME, stage="cut", level=2, exact=True)
def pointwise(gm: fx.GraphModule, context: Context) -> PassReport:
    """On cpu the backward makes pointwise results again rather than keeping them."""
    report = PassReport(NAME)
    options, wishes = context.options, context.options.recompute
    policy = wishes if isinstance(wishes, str) else (wishes or {}).get("policy", "auto")
    if options.memory_budget is not None or policy != "auto":
        return report.because("memory_budget decides" if options.memory_budget is not None else f'the policy "{policy}" of option "recompute" decides')
    if (options.target, options.codegen) != ("cpu", "inductor"):
        return report.because(f'torch\'s min-cut decides for target "{options.target}" with codegen "{options.codegen}"')
    tape = record(gm.graph, context.nodes)
    if isinstance(tape, str):
        report.skipped.append(skip("", next(iter(gm.graph.nodes)), f"{tape}; torch's min-cut decides"))
        return report
    if all(o.fusible for o in tape.operations):
        # No buffer of another call is there to be used again: what is not kept is allocated once more, for a gradient.
        return report.because("all of it is generated code; torch's min-cut decides")
    again, keep, written = prices(tape)
    decided = fixed(tape, wishes or {}, context.options.strict, report)
    kept = {v.made_by for v in decided.keep}
    saved = cheapest(tape, lambda o: math.inf if o in kept else again(o) if not any(v in decided.again for v in o.outputs) else min(again(o), 1.0), lambda v: math.inf if v in decided.again else keep(v))
    report.saved = saved_names(gm.graph, context.nodes, {v.node for v in saved})
    report.rewrites = [site("recomputed", v.node) for v in _made_again(tape, saved) if written[v]]
    return report


def prices(tape: Tape) -> tuple[Callable[[Operation], float], Callable[[Value], float], dict[Value, bool]]:
    """What running an operation again and keeping a value cost under generated code, in bytes moved; which values are written out."""
    written = {v: compat_partition.read_from_memory(v.node) for v in tape.values}
    far = _read_far_apart(tape)
    return lambda o: _again(o, written, far), _kept, written


def _kept(v: Value) -> float:
    """A value that its maker writes out anyhow is kept for less than one that stays in registers until then."""
    return 0.0 if v.returned else (KEEP + v.made_by.fusible) * v.bytes + 1


def _read_far_apart(tape: Tape) -> set[Value]:
    """Values that pointwise work reads both before and after the next product, as it does a residual stream: made again for
    the later reader, whose backward comes first, they would stay until the backward of the earlier one."""
    depth: dict[Operation, int] = {}
    for o in tape.operations:
        depth[o] = max((depth[v.made_by] + (not v.made_by.fusible) for v in o.inputs), default=0)
    readers = {v: [o for view in v.views for o in tape.readers.get(view, ()) if o.fusible] for v in tape.values}
    return {v for v, found in readers.items() if len({depth[o] for o in found}) > 1}


def _again(operation: Operation, written: dict[Value, bool], far: set[Value]) -> float:
    node = operation.node
    tensors = any(v.bytes for v in operation.outputs)
    fusible = operation.fusible or node.target == aten.cat.default  # its operands fuse into it, it into nothing
    if (tensors and node.op == "call_function" and not fusible) or compat_partition.must_save(node) or not compat_partition.is_pure(node):
        return math.inf
    read, made = (sum(v.bytes for v in values) for values in (operation.inputs, operation.outputs))
    if read > 4 * made:  # a reduction or a lookup, which is done once its inputs have gone by
        return float(read)
    return sum(v.bytes * (1.0 if written[v] else FUSED) + v.bytes * KEEP * (v in far) for v in operation.outputs)


def _made_again(tape: Tape, saved: list[Value]) -> list[Value]:
    """The values that the backward makes, in order."""
    keep, todo, found = set(saved), [v for v in tape.values if v.needed], set()
    while todo:
        v = todo.pop()
        if v not in keep and v not in found:
            found.add(v)
            todo += v.made_by.inputs
    return [v for v in tape.values if v in found]
