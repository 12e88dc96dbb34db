"""A plan that somebody wrote, as a restriction of the search: what it says is kept, what it leaves open is chosen
best.
"""

from __future__ import annotations

from typing import Any

from mindspeed_fx.planning.search.problem import Node, Problem
from mindspeed_fx.planning.search.solve import Allowed
from mindspeed_fx.planning.search.strategy_space import SUMMED, Label, P, R, Strategy
from mindspeed_fx.sharding.patterns import matching, matching_operators, of_operator
from mindspeed_fx.sharding.plan import Placed, Plan, parse_placement, placement_of

ARGUMENTS = {"attention": ("q", "k", "v"), "moe_permute": ("tokens",)}
"""Arguments of operators that a plan places."""

PRODUCT = "mindspeed.grouped_matmul"


def following(plan: Plan, problem: Problem, dim: str = "tp") -> Allowed:
    """The strategies that agree with ``plan`` on mesh dimension ``dim``: parameters at rest, and edges of modules and
    operators.
    """
    wanted: dict[tuple[Node, int], Any] = {}
    for parameter in problem.parameters:
        word = placement_of(plan.parameters, parameter.name, "parameter").get(dim, "R")
        for node, i in parameter.users:
            wanted[node, i] = _of_whole_experts(plan, node.module, dim) if parameter.stacked else word
    for edge in problem.edges:
        result, reader = edge.value.producer, edge.node
        for module in _owners(result):
            if word := _edge(plan, module, "output").get(dim):
                wanted[reader, edge.argument] = word
        for module in _owners(reader):
            if word := _edge(plan, module, "input").get(dim):
                wanted[reader, edge.argument] = word
        known = ARGUMENTS.get(reader.op, ())
        if edge.argument < len(known):
            for pattern in matching_operators(tuple(plan.operators), f"mindspeed.{reader.op}", reader.module):
                for names, placed in plan.operators[pattern].arguments.items():
                    if known[edge.argument] in names.split("|") and dim in placed:
                        wanted[reader, edge.argument] = placed[dim]

    def allowed(node: Node, strategy: Strategy) -> bool:
        return all(
            agrees(strategy.ins[i], wanted[node, i], node.uses[i].dims)
            for i in range(len(node.uses))
            if (node, i) in wanted
        )

    return allowed


def _of_whole_experts(plan: Plan, module: str, dim: str) -> str:
    """Where a product has the whole experts that are made of parts at rest."""
    patterns = matching_operators(tuple(plan.operators), PRODUCT, module)
    weights = {of_operator(p)[1]: plan.operators[p].arguments.get("weight", {}) for p in patterns}
    return placement_of(weights, PRODUCT, "").get(dim, "R")


def placing(problem: Problem, name: str, word: str) -> Allowed | None:
    """The strategies with parameter ``name`` at ``word``; None where no operator of the problem uses it."""
    users = {(n, i) for p in problem.parameters if p.name == name for n, i in p.users}

    def allowed(node: Node, strategy: Strategy) -> bool:
        return all(n is not node or agrees(strategy.ins[i], word, node.uses[i].value.dims) for n, i in users)

    return allowed if users else None


def agrees(label: Label, word: str, dims: list) -> bool:
    """Whether a label is what a plan's word says of a tensor with these dimensions."""
    d = parse_placement(word, "plan")
    if d is None:
        return label in (R, SUMMED)
    return isinstance(label, int) and label != P and label in dims[d % len(dims)][:1]


def _owners(node: Node) -> list[str]:
    return [u.value.parameter.name.rpartition(".")[0] for u in node.uses if u.value.parameter is not None]


def _edge(plan: Plan, module: str, side: str) -> Placed:
    return {
        k: v for pattern, b in plan.modules.items() if matching([pattern], module) for k, v in getattr(b, side).items()
    }
