"""FLOP of matrix products, counted by the graphs that run: those of the model, and all that the hardware does.

    with mindspeed_fx.FlopCount() as count:
        step(batch).backward()              # compiled with options={"count_flops": True}
    count.model, count.hardware

``model`` counts every product once; ``hardware`` also what the backward computes again: what the partition recomputes,
checkpointed regions, and the scores or logits that a gradient's kernel makes again. Two for each multiply-add, a causal
mask counts as none (as ``torch.utils.flop_counter`` counts). A graph adds its number at the end of each of its runs,
from the sizes of that run. Modules that are not compiled are counted with ``FlopCount(eager=True)``, in which nothing
may be compiled.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import sympy
import torch
import torch.fx as fx
from torch import Tensor

from mindspeed_fx import arguments
from mindspeed_fx.compat import dispatcher
from mindspeed_fx.cost.arithmetic import evaluate
from mindspeed_fx.cost.read import Call, call_of, read

_totals = {"model": 0, "hardware": 0}
_uncounted: dict[str, None] = {}
"""Operators that ran and have no formula."""


class Work(NamedTuple):
    """FLOP of one graph, in numbers or in the symbols of its sizes."""

    model: Any
    """Each product once."""
    hardware: Any
    """All that is computed."""
    uncounted: tuple[str, ...] = ()
    """Operators without a formula."""


def count(gm: fx.GraphModule) -> Work:
    """The work of a graph of operators."""
    calls = [call for call in read(gm).calls if call.kind != "collective"]
    costs = [call.cost() for call in calls]
    hardware = sum(cost.flops for cost in costs)
    return Work(
        hardware - sum(cost.again for cost in costs),
        hardware,
        tuple(sorted({call.operator for call in calls if _is_unknown(call)})),
    )


def behind(joint: Work, forward: Work, backward: Work) -> Work:
    """The work of ``backward``, of whose products those that ``joint`` has beside the forward's are the model's."""
    return backward._replace(model=joint.model - forward.model)


def _is_unknown(call: Call) -> bool:
    return call.kind == "other" and not call.operator.startswith(KNOWN)


KNOWN = ("aten.", "prims.", "_operator.", "mindspeed.", "c10d.", "profiler.", "higher_order.auto_functionalized")
"""Beginnings of operators that have a formula, or no products."""


@torch.library.custom_op("mindspeed::count_flops", mutates_args=())
def count_flops(reads: list[Tensor], sizes: list[int], symbols: str, model: str, hardware: str, uncounted: str) -> None:
    """Adds the work of a graph to the totals.

    Args:
        reads: a result of the graph: Inductor wants a call to have a device.
        sizes: values of the symbols.
        symbols: their names, joined by commas.
        model, hardware: numbers, or expressions in the symbols.
        uncounted: names of operators, joined by commas.
    """
    for name, text in (("model", model), ("hardware", hardware)):
        _totals[name] += int(evaluate(text, dict(zip(symbols.split(","), sizes)) if symbols else {}))
    _uncounted.update(dict.fromkeys(uncounted.split(",") if uncounted else ()))


@count_flops.register_fake
def _(reads: list[Tensor], sizes: list[int], symbols: str, model: str, hardware: str, uncounted: str) -> None:
    return None


fx.node.has_side_effect(torch.ops.mindspeed.count_flops.default)


def insert(gm: fx.GraphModule, work: Work) -> None:
    """Let ``gm`` add ``work`` when it has run, in place."""
    if not (work.hardware or work.uncounted):
        return
    output = gm.graph.output_node()
    symbols = sorted({s for w in (work.model, work.hardware) for s in getattr(w, "free_symbols", ())}, key=str)
    tensors = [n for n in gm.graph.nodes if isinstance(n.meta.get("val"), Tensor)]
    with gm.graph.inserting_before(output):
        sizes = [_size(gm, symbol, tensors) for symbol in symbols]
        names = ",".join(map(str, symbols))
        results = [n for n in output.all_input_nodes if isinstance(n.meta.get("val"), Tensor)][:1]
        args = (results, sizes, names, str(work.model), str(work.hardware), ",".join(work.uncounted))
        node = gm.graph.call_function(torch.ops.mindspeed.count_flops.default, args)
        node.meta["val"] = None
    gm.recompile()


def _size(gm: fx.GraphModule, symbol: sympy.Symbol, tensors: list[fx.Node]) -> fx.Node:
    """A node whose value is the symbol's; of a tensor's size where no number is it."""
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and value.node.expr == symbol:
            return node
    for node in tensors:
        for dim, size in enumerate(node.meta["val"].shape):
            if isinstance(size, torch.SymInt) and size.node.expr == symbol:
                result = gm.graph.call_function(torch.ops.aten.sym_size.int, (node, dim))
                result.meta["val"] = size
                return result
    raise RuntimeError(f"no value of the graph has the size {symbol}, in which its FLOP are counted")


class FlopCount:
    """FLOP since ``with`` was entered, of this process.

    Args:
        eager: count what runs operator by operator, by ``torch.utils.flop_counter``; nothing is compiled meanwhile.

    Attributes:
        model, hardware: FLOP.
        uncounted: operators that ran and have no formula.
    """

    def __init__(self, eager: bool = False) -> None:
        arguments.check_bool("FlopCount", "eager", eager)
        self.model = self.hardware = 0
        self.uncounted: list[str] = []
        self._eager, self._open = eager, contextlib.ExitStack()

    def __enter__(self) -> FlopCount:
        self._before = dict(_totals)
        _uncounted.clear()
        if self._eager:
            self._open.enter_context(dispatcher.Watch(_count_call))
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()
        self.model += _totals["model"] - self._before["model"]
        self.hardware += _totals["hardware"] - self._before["hardware"]
        self.uncounted = list(_uncounted)


def _count_call(function: Any, args: tuple, kwargs: dict, out: Any) -> None:
    """Adds what ran to the totals. Inside a backward autograd records nothing but what is computed again."""
    call = call_of(function, out, args, kwargs)
    if call.kind == "collective":
        return
    cost = call.cost()
    _totals["hardware"] += cost.flops
    _totals["model"] += 0 if dispatcher.is_computing_again() else cost.flops - cost.again
    if _is_unknown(call):
        _uncounted[call.operator] = None
