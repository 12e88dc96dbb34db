"""What was traced, as plain values for a report: operators, kernels, near misses, memory and modelled cost of each
graph.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.fx as fx

from mindspeed_fx.ascend.npu_graphs import Traced
from mindspeed_fx.cost.graph import estimate
from mindspeed_fx.graph import live_memory
from mindspeed_fx.report.code import readable


def describe(traced: Traced, hardware: str, code: bool = True) -> dict[str, Any]:
    """The values that :class:`mindspeed_fx.ascend.report.CrossReport` shows.

    Of each operator of a side: calls, flops, bytes read and written, bytes ``made`` for its results, modelled seconds
        and what bounds it.

    Args:
        hardware: device of the cost model, such as "Ascend910B2".
        code: with the text of every graph.
    """
    graphs = []
    for index, record in enumerate(traced.records):
        sides = [
            {"side": side, **_side(gm, hardware), **({"code": readable(gm, side)} if code else {})}
            for g, side, gm in traced.sides
            if g == index
        ]
        by_side = {side: gm for g, side, gm in traced.sides if g == index}
        saved = (
            live_memory.saved_bytes(by_side["forward"], by_side["backward"])
            if {"forward", "backward"} <= by_side.keys()
            else 0
        )
        graphs.append(
            {
                "counts": record.counts,
                "skipped": [
                    {"pass": r.report.name, "reason": s.reason, "module": s.module, "source": s.source}
                    for r in record.runs
                    for s in r.report.skipped
                ],
                "lowered": [
                    {"operator": o, "side": s, "kernel": k, "reason": w, "calls": n}
                    for (o, s, k, w), n in Counter(
                        (r["operator"], r["side"], r["kernel"], r["reason"]) for r in record.lowered
                    ).items()
                ],
                "sides": sides,
                "saved": saved,
            }
        )
    return {
        "graphs": graphs,
        "breaks": traced.breaks,
        "parameters": traced.parameters,
        "parameter_bytes": traced.parameter_bytes,
        "without_gradient": traced.without_gradient,
        "triton_calls": traced.triton_calls,
    }


def _side(gm: fx.GraphModule, hardware: str) -> dict[str, Any]:
    result = estimate(gm, hardware)
    rows = {r["operator"]: {**r, "made": 0} for r in result.by_operator()}
    allocated = live_memory.allocated_bytes(gm)
    for node in gm.graph.nodes:  # views move nothing and cost nothing, but are there
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            name = str(node.target.overloadpacket)
            none = {"calls": 0, "flops": 0, "bytes": 0, "seconds": 0.0, "bound": "", "timed": "", "made": 0}
            row = rows.setdefault(name, {"operator": name, **none})
            row["calls"] += not row["seconds"]
            row["made"] += allocated[node]
    return {
        "nodes": len(gm.graph.nodes),
        "operators": list(rows.values()),
        "cost": result.summary(),
        "memory": live_memory.peak(gm),
    }
