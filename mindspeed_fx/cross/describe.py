"""What was traced, as plain values for a report: operators, kernels, near misses, memory and modelled cost of each graph."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from mindspeed_fx import compat
from mindspeed_fx.cross import memory
from mindspeed_fx.cross.trace import Traced
from mindspeed_fx.report.code import readable


def describe(traced: Traced, hardware: str, code: bool = True) -> dict[str, Any]:
    """The values that :class:`mindspeed_fx.cross.report.CrossReport` shows.

    Args:
        hardware: device of the cost model.
        code: with the text of every graph.
    """
    graphs = []
    for index, record in enumerate(traced.records):
        sides = [{"side": side, **_side(gm, hardware), **({"code": readable(gm, side)} if code else {})} for g, side, gm in traced.sides if g == index]
        by_side = {side: gm for g, side, gm in traced.sides if g == index}
        saved = memory.saved(by_side["forward"], by_side["backward"]) if {"forward", "backward"} <= by_side.keys() else 0
        graphs.append({
            "counts": record.counts,
            "skipped": [{"pass": r.report.name, "reason": s.reason, "module": s.module, "source": s.source} for r in record.runs for s in r.report.skipped],
            "lowered": [{"operator": o, "side": s, "kernel": k, "reason": w, "calls": n} for (o, s, k, w), n in Counter((r["operator"], r["side"], r["kernel"], r["reason"]) for r in record.lowered).items()],
            "sides": sides,
            "saved": saved,
        })  # fmt: skip
    return {"graphs": graphs, "breaks": traced.breaks, "parameters": traced.parameters, "parameter_bytes": traced.parameter_bytes, "without_gradient": traced.without_gradient, "triton_calls": traced.triton_calls}


def _side(gm: fx.GraphModule, hardware: str) -> dict[str, Any]:
    calls: dict[str, dict[str, Any]] = {}
    for node in gm.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        name = str(node.target).removesuffix(".default")
        row = calls.setdefault(name, {"operator": name, "calls": 0, "bytes": 0})
        row["calls"] += 1
        row["bytes"] += 0 if is_view(node) else _touched(node)
    return {"nodes": len(gm.graph.nodes), "operators": sorted(calls.values(), key=lambda r: (-r["bytes"], r["operator"])), "memory": memory.peak(gm)}


def is_view(node: fx.Node) -> bool:
    """True for a call that moves no data: its result shares the memory of an input."""
    value = node.meta.get("val")
    inputs = {compat.storage_of(v) for n in node.all_input_nodes for v in pytree.tree_leaves(n.meta.get("val")) if isinstance(v, torch.Tensor)}
    return isinstance(value, torch.Tensor) and compat.storage_of(value) in inputs and not node.target._schema.is_mutable


def _touched(node: fx.Node) -> int:
    """Bytes of the call's inputs and results, each read or written once."""
    values = [n.meta.get("val") for n in node.all_input_nodes] + [node.meta.get("val")]
    return sum(compat.hint(v.numel()) * v.element_size() for v in pytree.tree_leaves(values) if isinstance(v, torch.Tensor))
