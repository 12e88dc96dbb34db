"""What a plan can say of where values go: at modules with parameters, at operators of ours and at attention.

A module's edges are at what enters and leaves it; what goes on inside is placed by the operators that are called there.
"""

from __future__ import annotations

from typing import Any, Iterable

from mindspeed_fx.planning.search.problem import Edge, Node, Parameter
from mindspeed_fx.planning.search.strategies import ATTENTIONS, EXPERTS, is_told_by_name
from mindspeed_fx.planning.search.strategy_space import SUMMED, Label, P, R
from mindspeed_fx.sharding.plan_names import module_meant
from mindspeed_fx.sharding.presets import ATTENTION, QKV

PERMUTE, UNPERMUTE = "moe_permute", "moe_unpermute"


def owner(node: Node) -> str:
    """The module whose parameter the operator uses; "" for none."""
    if node.owner is None:  # asked a million times in a search
        own = [p for u in node.uses if (p := u.value.parameter) is not None and not p.stacked]
        node.owner = _of_module(own[0], node) if own else ""
    return node.owner


def _of_module(parameter: Parameter, node: Node) -> str:
    modules = [name.rpartition(".")[0] for name in (parameter.name, *parameter.tied)]
    return module_meant(node, modules, [n for n, _ in parameter.users], _is_inside)


def _is_inside(node: Node, module: str) -> bool:
    return node.module == module or node.module.startswith(f"{module}.")


def is_sayable(move: Any, p: Label, t: Label, edge: Edge) -> bool:
    """Whether a plan can say that the value moves so before this reader, or DTensor does it unasked: it sums what an
    operator needs whole."""
    result = move.value.producer
    if p == t or not move.value.shape:
        return True
    if edge.node.op in EXPERTS and edge.argument:
        return True  # choices, their weights and counts go where the rows are
    if result.op in EXPERTS and result.op != UNPERMUTE:
        return p in (P, R) and t in (
            R,
            SUMMED,
        )  # rows stay where they were sorted until they are back; experts divided inside make sums
    if edge.node.op in EXPERTS and edge.node.op != PERMUTE:
        return False
    before = expressible(edge) and is_dimension(t, edge.node.uses[edge.argument].dims)
    return (p in (P, R) and t in (R, SUMMED)) or leaves(move, t) or before


def comes_out(moves: Iterable[Any]) -> bool:
    """Whether a plan can place a value, of whose moves these are, where it is made: where it leaves a module with
    parameters, or where rows are back."""
    readers = [e for move in moves for e in move.readers]
    producer = readers[0].value.producer
    if producer.op == UNPERMUTE:
        return True
    module = owner(producer)
    return bool(module) and not any(_is_inside(e.node, module) for e in readers)


def leaves(move: Any, t: Any) -> bool:
    """Whether a plan can place the value at ``t`` where it is made."""
    return is_dimension(t, move.value.dims) and comes_out([move])


def is_dimension(t: Any, dims: list) -> bool:
    """Whether a label is one that a plan has a word for: whole, or a dimension from its first factor on."""
    return not isinstance(t, int) or any(t in atoms[:1] for atoms in dims)


def enters(edge: Edge) -> bool:
    """Whether the value enters a module with parameters for this reader, alone."""
    module = owner(edge.node)
    return (
        bool(module)
        and edge.node.op not in ATTENTIONS
        and edge.node.op != PERMUTE
        and sum(u.value.producer is not None for u in edge.node.uses) == 1
        and not _is_inside(edge.value.producer, module)
    )


def expressible(edge: Edge) -> bool:
    """Whether a plan can place the value before this reader: at the input of a module with parameters, of attention, of
    another operator of ours, or where rows are sorted.
    """
    if edge.expressible is None:
        node = edge.node
        edge.expressible = (
            edge.argument < len(QKV)
            if node.op in ATTENTIONS
            else edge.argument == 0
            if node.op == PERMUTE
            else enters(edge) or (is_told_by_name(node) and node.op not in EXPERTS)
        )
    return edge.expressible


def called_as(node: Node) -> tuple[str, list[str]]:
    """An operator, and the arguments that are tensors, as plans name them; of attention those that they place."""
    if node.op in ATTENTIONS:
        return ATTENTION, list(QKV)
    overload = node.call.overload
    places = [next(i for i, a in enumerate(node.args) if a is use) for use in node.uses]
    return str(overload).removesuffix(".default"), [overload._schema.arguments[i].name for i in places]
