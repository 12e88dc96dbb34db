"""Rewrites of Inductor's own that give wrong values: part of :mod:`mindspeed_fx.compat`."""

from __future__ import annotations

import functools
from typing import Any

import torch

from mindspeed_fx.compat import fake


@functools.cache
def keep_dtype_of_running_sums() -> None:
    """Inductor (2.11, 2.13) counts in place of a running sum of a constant, in the constant's dtype, or in int64
    where that is an integer's, whatever dtype the sum was asked for. What reads it in the same graph rounds as if
    nothing were wrong; a caller gets another dtype, and a backward that was compiled for float32 reads the bits of
    integers. Then the sum stays a sum.
    """
    from torch._inductor.fx_passes import post_grad

    for stage in post_grad.pass_patterns:
        for entry in stage.patterns.get(("call_function", torch.ops.aten.cumsum.default), ()):
            if getattr(getattr(entry, "handler", None), "__name__", "") == "pointless_cumsum_replacement":
                entry.extra_check = _gives_its_dtype


def _gives_its_dtype(match: Any) -> bool:
    constant = match.kwargs["dtype"]
    counted = constant if constant.is_floating_point or constant.is_complex else torch.int64
    return match.output_node().meta["val"].dtype == counted


PLAIN = {"alpha": 1, "beta": 1, "rounding_mode": None, "approximate": "none"}
"""Keywords that change values, and what they are where a call does not name them."""


@functools.cache
def read_every_keyword() -> None:
    """Inductor (2.11 to 2.14) matches a call against a pattern without looking at keywords that the pattern does not
    name: ``x.add(a @ b, alpha=0.1)`` became ``addmm(x, a, b)``, which is ``x + a @ b``. Such a call matches no more.
    """
    from torch._inductor.pattern_matcher import FailedMatch, _TargetArgsExpr

    match = _TargetArgsExpr._match

    @functools.wraps(match)
    def match_with_keywords(self: Any, node: Any, *args: Any) -> Any:
        for name, value in (node.kwargs if isinstance(node, torch.fx.Node) else {}).items():
            if name in PLAIN and name not in self.kwargs and value != PLAIN[name]:
                return FailedMatch("{} of {} is not in the pattern", name, node)
        return match(self, node, *args)

    _TargetArgsExpr._match = match_with_keywords


@functools.cache
def keep_results_apart() -> None:
    """Inductor (2.11 to 2.14) leaves out what adds zeros or multiplies by ones, since 2.14 numbers too, also where that
    makes a result of the graph: ``return x * 1.0`` gives ``x`` itself, and ``return y, y + 0.0`` one tensor twice. What
    a caller writes into the one is then in the other, and where the one has no gradient, the other one loses its own.
    Such a result is copied. A gradient that is the gradient of the output stays so, as in eager mode.
    """
    from torch._inductor.fx_passes import joint_graph

    remove = joint_graph.remove_no_ops

    @functools.wraps(remove)
    def remove_and_copy(gm: torch.fx.GraphModule, *args: Any) -> None:
        before = _results(gm)
        remove(gm, *args)
        after, output, copies = _results(gm), gm.graph.output_node(), {}
        changed = {old: new for old, new in zip(before, after, strict=True) if new is not old}
        for old, new in changed.items():
            if _is_input(new) or any(n is new and o is not old for o, n in zip(before, after)):
                with gm.graph.inserting_before(output):
                    copies[old] = gm.graph.call_function(torch.ops.aten.clone.default, (new,))
                value = new.meta["val"]
                with fake.fake_like(value), torch.no_grad():
                    copies[old].meta = {**new.meta, "val": value.clone()}
        if copies:
            results = tuple(copies.get(old, new) for old, new in zip(before, after))
            output.args = (results if isinstance(output.args[0], (list, tuple)) else results[0],)

    joint_graph.remove_no_ops = remove_and_copy


def _results(gm: torch.fx.GraphModule) -> list[Any]:
    results = gm.graph.output_node().args[0]
    return list(results) if isinstance(results, (list, tuple)) else [results]


def _is_input(node: Any) -> bool:
    return isinstance(node, torch.fx.Node) and node.op == "placeholder" and "tangents" not in node.name
