"""Weights of experts that are a list of modules, as the search sees them: one parameter [experts, ...].

Each expert has parameters of its own, which the graph stacks for one product of all experts
(:mod:`mindspeed_fx.passes.canonicalize.expert_loop`). At rest a rank has a part of each expert's parameter; before the
product the ranks bring whole experts together by an all-to-all.
"""

from __future__ import annotations

import math
from typing import Mapping

import torch
import torch.fx as fx

from mindspeed_fx.graph.op_sets import REARRANGEMENTS
from mindspeed_fx.planning.search.layouts import Layout
from mindspeed_fx.planning.search.problem import Parameter

aten, ops = torch.ops.aten, torch.ops.mindspeed


def name_of_all(node: fx.Node, names: Mapping[fx.Node, str | None]) -> str | None:
    """The name for the parameters of all experts that ``node`` stacks ("mlp.experts.*.w1"), in the order of their
    numbers; None where it stacks something else, or where something else than a product of all experts reads it.

    Args:
        names: of each input of the graph, the parameter that it is.
    """
    if node.target is not aten.stack.default or (len(node.args) > 1 and node.args[1] != 0) or not _is_weight(node):
        return None
    parts = [(names.get(n) or "").split(".") for n in node.args[0]]
    first = parts[0]
    for place, number in enumerate(first):
        if number == "0" and parts == [[*first[:place], str(i), *first[place + 1 :]] for i in range(len(parts))]:
            return ".".join([*first[:place], "*", *first[place + 1 :]])
    return None


def _is_weight(node: fx.Node) -> bool:
    """Whether all that reads ``node``, or views of it, are products that take it for the weights of all experts."""

    def takes_weight(user: fx.Node) -> bool:
        if user.target is ops.grouped_matmul.default:
            return user.args[1] is node
        return user.target in REARRANGEMENTS and _is_weight(user)

    return bool(node.users) and all(map(takes_weight, node.users))


def at_rest(parameter: Parameter, layout: Layout, by_tp: bool) -> dict[str, int]:
    """Mesh dimension -> the dimension of each expert's parameter along which its ranks have parts, while no product is
    computed. What is gathered before use (dp, cp) leaves the first alone: parts along it are taken for experts.

    Args:
        by_tp: whether the experts are divided over tp too.
    """
    left, results = list(parameter.shape[1:]), {}
    gathered = [d for d in ("dp", "cp") if layout.zero != "never"]
    for name in ("ep", *["tp"] * by_tp, *gathered):
        ranks = getattr(layout, name)
        taken = {0, *([results["tp"]] if "tp" in results else [])} if name in gathered else set(results.values())
        dims = [0] if name == "ep" else [d for d in range(len(left)) if d not in taken]
        free = next((d for d in dims if ranks > 1 and left[d] > 1 and left[d] % ranks == 0), None)
        if free is not None:
            results[name] = free
            left[free] //= ranks
    return results


def bytes_at_rest(parameter: Parameter, layout: Layout, by_tp: bool) -> float:
    """Bytes that one rank has of the parameters of all experts of a list, while no product is computed."""
    return parameter.bytes / math.prod(getattr(layout, name) for name in at_rest(parameter, layout, by_tp))
