"""Plans by name, made for a model: which of its layers are what is told by its graph where arguments are at hand
(:mod:`mindspeed_fx.sharding.roles`), else by their names, so the result is a plain plan that can be read and changed.

By name, layers are called as in Hugging Face, Llama and Megatron code (:mod:`mindspeed_fx.sharding.layer_roles`).
Projections that pack several tensors in one (``gate_up``, ``qkv``) are divided tensor by tensor where the graph shows
which, and stay whole by name. A layer whose results the graph needs whole is divided too, and its results are gathered.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from typing import Any, Callable, Mapping, Sequence

from torch import nn

from mindspeed_fx import arguments
from mindspeed_fx.errors import nearest
from mindspeed_fx.sharding.expert_lists import listed_parameters
from mindspeed_fx.sharding.layer_roles import (
    column_and_row_layers,
    divided_word,
    expert_parameters,
    gathered_layers,
    linear_layers,
    result_dim,
    vocabulary_layers,
)
from mindspeed_fx.sharding.plan import Boundary, Plan, ShardingError, parse_placement, placement_of
from mindspeed_fx.sharding.roles import Roles, read_roles

logger = logging.getLogger(__name__)

ATTENTION = "mindspeed.attention|mindspeed.varlen_attention|aten.scaled_dot_product_attention"
QKV = ("q|query", "k|key", "v|value")


def named_plan(
    name: str,
    model: nn.Module,
    strict: bool = False,
    *,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> Plan:
    """The plan ``name`` for ``model``, or several joined by "+", outermost mesh dimension first ("zero3+tp_sp").

    Mesh dimensions are "dp" for zero1, zero2 and zero3, "tp" for tp and tp_sp, "tp_x" and "tp_y" for tp_2d, "cp" for
    ulysses, kv_allgather and ring, "cp_ring" and "cp_ulysses" for hybrid, "ep" for ep and ep_alltoall. "ring:4" and
    "hybrid:4" are rings of inner rings of four neighbours (:mod:`ring`).

    Args:
        strict: what the ranks cannot share evenly is an error; else it stays whole and is named (``Plan.keep_whole``).
        args, kwargs: of the model, on its device, meta included, and not run. With them tp, tp_sp and tp_2d read
            columns, rows, token embeddings and output layers from the graph (:mod:`mindspeed_fx.sharding.roles`), and
            log why others stay whole, and ep and ep_alltoall experts that no name tells; without, all go by names.

    Raises:
        ShardingError: no such plan, or the model has no layers it speaks of.
    """
    arguments.check_text("named_plan", "name", name, f"a name is expected, of {', '.join(NAMED)}")
    arguments.check_module("named_plan", model)
    arguments.check_bool("named_plan", "strict", strict)
    if args is not None or kwargs is not None:
        arguments.check_call("named_plan", () if args is None else args, kwargs, model)
    plan: Plan | None = None
    by_roles = {"tp": tp, "tp_sp": tp_sp, "tp_2d": tp_2d}
    unknown = not expert_parameters(model) and not listed_parameters(model)
    experts = unknown and {"ep", "ep_alltoall"} & set(name.split("+"))
    reads = (experts or set(by_roles) & set(name.split("+"))) and not (args is None and kwargs is None)
    roles = read_roles(model, args or (), kwargs) if reads else None
    for part in reversed(name.split("+")):
        part, colon, number = part.partition(":")
        if colon and (part not in ("ring", "hybrid") or not number.isdigit() or int(number) < 1):
            raise ShardingError(
                f'"{part}:{number}" is no plan: ring:N and hybrid:N name the number of ranks of an inner ring'
            )
        if part not in NAMED:
            raise ShardingError(f'no plan is named "{part}"{nearest(part, NAMED)}; valid: {", ".join(NAMED)}')
        reading = {"roles": roles} if part in (*by_roles, "ep", "ep_alltoall") else {}
        new = NAMED[part](model, plan, **reading)
        if colon:
            new = dataclasses.replace(new, name=f"{part}:{number}", rings={new.mesh[0]: int(number)})
        plan = new if plan is None else new.combine(plan) if part.startswith("ep") else new + plan
    if roles is not None and set(by_roles) & set(name.split("+")):
        for layer in whole_layers(model, plan):
            logger.warning('plan "%s": layer "%s" stays whole', name, layer)
    return dataclasses.replace(plan, keep_whole=not strict)


def tp(
    model: nn.Module,
    other: Plan | None = None,
    dim: str = "tp",
    sequence: bool = False,
    vocabulary: bool = True,
    roles: Roles | None = None,
) -> Plan:
    """Tensor parallelism: columns, then rows; two all-reduces per layer and direction.

    Args:
        sequence: between the pairs of linear layers the sequence is divided (Megatron's sequence parallelism):
            reduce-scatter and all-gather instead of all-reduce.
        vocabulary: divide embedding and output layer too. The vocabulary has to divide evenly.

    Source: Shoeybi et al. 2019; Korthikanti et al. 2022, "Reducing Activation Recomputation".
    """
    columns, rows = column_and_row_layers(model, "tp_sp" if sequence else "tp", roles)
    between = {dim: "S(1)" if sequence else "R"}
    parameters: dict[str, Mapping[str, str]] = {}
    modules: dict[str, Boundary] = {}
    for name, layer in columns.items():
        sizes = roles.packed.get(f"{name}.weight", ()) if roles is not None else ()
        parameters[f"{name}.weight"] = {dim: divided_word(result_dim(layer), sizes)}
        if layer.bias is not None:
            parameters[f"{name}.bias"] = {dim: divided_word(0, sizes)}
        modules[name] = Boundary(input={dim: "R"})
    for name, layer in rows.items():
        parameters[f"{name}.weight"] = {dim: f"S({1 - result_dim(layer)})"}
        modules[name] = Boundary(output=between)
    if roles is not None:  # weights that no linear layer holds have no module whose edge could be placed
        for name, at in {**roles.columns, **roles.rows}.items():
            parameters.setdefault(name, {dim: divided_word(at, roles.packed.get(name, ()))})
        for name, (at, sizes) in roles.companions.items():
            parameters.setdefault(name, {dim: divided_word(at, sizes)})
    embeddings, heads = vocabulary_layers(model, {**columns, **rows}, roles)
    for name, layer in gathered_layers(model, {**columns, **rows, **heads}, roles).items():
        parameters.update(
            {
                f"{name}.{p}": {dim: f"S({result_dim(layer) if p == 'weight' else 0})"}
                for p, _ in layer.named_parameters()
            }
        )
        modules[name] = Boundary(input={dim: "R"}, output={dim: "R"})
    for name in embeddings:
        modules[name] = Boundary(output=between)
        if vocabulary:
            parameters[f"{name}.weight"] = {dim: "S(0)"}
    for name, layer in heads.items():
        modules[name] = Boundary(input={dim: "R"})
        if vocabulary:
            parameters.update({f"{name}.{p}": {dim: "S(0)"} for p, _ in layer.named_parameters(recurse=False)})
    return Plan("tp_sp" if sequence else "tp", (dim,), parameters, modules=modules)


def tp_sp(model: nn.Module, other: Plan | None = None, roles: Roles | None = None) -> Plan:
    """Tensor parallelism with the sequence divided between pairs of linear layers."""
    return tp(model, other, sequence=True, roles=roles)


def tp_2d(
    model: nn.Module, other: Plan | None = None, x: str = "tp_x", y: str = "tp_y", roles: Roles | None = None
) -> Plan:
    """Tensor parallelism over two mesh dimensions: weights divided in both directions, activations by sequence and by
    width.

    Source: MindSpeed's high-dimension tensor parallelism (tp-2d); Xu et al. 2021, "An Efficient 2D Method".
    """
    columns, rows = column_and_row_layers(model, "tp_2d", roles)
    packed = roles.packed if roles is not None else {}
    parameters = {f"{n}.weight": {x: f"S({1 - result_dim(m)})", y: f"S({result_dim(m)})"} for n, m in rows.items()}
    for n, layer in columns.items():
        sizes = packed.get(f"{n}.weight", ())
        parameters[f"{n}.weight"] = {x: divided_word(result_dim(layer), sizes), y: f"S({1 - result_dim(layer)})"}
        if layer.bias is not None:
            parameters[f"{n}.bias"] = {x: divided_word(0, sizes)}
    modules = {n: Boundary(input={x: "R"}, output={y: "S(1)"}) for n in columns} | {
        n: Boundary(input={y: "R"}, output={x: "S(1)"}) for n in rows
    }
    embeddings, heads = vocabulary_layers(model, {**columns, **rows}, roles)
    modules.update({n: Boundary(output={x: "S(1)", y: "S(2)"}) for n in embeddings})
    modules.update({n: Boundary(input={x: "R", y: "R"}) for n in heads})
    parameters.update({f"{n}.weight": {x: "S(0)"} for n in heads})
    for n, layer in gathered_layers(model, {**columns, **rows, **heads}, roles).items():
        parameters.update(
            {f"{n}.{p}": {x: f"S({result_dim(layer) if p == 'weight' else 0})"} for p, _ in layer.named_parameters()}
        )
        modules[n] = Boundary(input={x: "R"}, output={x: "R"})
    # Heads are divided over both dimensions, and gathered over y by the row layer that follows.
    heads_divided = {a: {y: "S(1)"} for a in QKV}
    return Plan("tp_2d", (x, y), parameters, modules=modules, operators={ATTENTION: Boundary(arguments=heads_divided)})


def ulysses(model: nn.Module, other: Plan | None = None, dim: str = "cp") -> Plan:
    """The sequence is divided but for attention, which has its heads divided; four all-to-alls per layer and direction.

    Source: Jacobs et al. 2023, "DeepSpeed Ulysses".
    """
    heads = {a: {dim: "S(1)"} for a in QKV}
    return Plan(
        "ulysses",
        (dim,),
        inputs=_sequence(model, dim),
        operators={ATTENTION: Boundary(arguments=heads, output={dim: "S(2)"})},
    )


def kv_allgather(model: nn.Module, other: Plan | None = None, dim: str = "cp") -> Plan:
    """The sequence is divided, also the queries of attention, which gathers keys and values: any number of heads."""
    placed = {QKV[0]: {dim: "S(2)"}, QKV[1]: {dim: "R"}, QKV[2]: {dim: "R"}}
    return Plan(
        "kv_allgather",
        (dim,),
        inputs=_sequence(model, dim),
        operators={ATTENTION: Boundary(arguments=placed, output={dim: "S(2)"})},
    )


def ring(model: nn.Module, other: Plan | None = None, dim: str = "cp") -> Plan:
    """The sequence is divided everywhere; in attention keys and values pass from rank to rank (:mod:`ring`).

    Source: Liu et al. 2023, "Ring Attention".
    """
    divided = {a: {dim: "S(2)"} for a in QKV}
    return Plan(
        "ring",
        (dim,),
        inputs=_sequence(model, dim),
        operators={ATTENTION: Boundary(arguments=divided, output={dim: "S(2)"})},
    )


def hybrid(model: nn.Module, other: Plan | None = None, outer: str = "cp_ring", inner: str = "cp_ulysses") -> Plan:
    """Ulysses inside a ring: the sequence is divided over both; attention has heads divided over ``inner``, a ring over
    ``outer``.

    Source: Fang and Zhao 2024, "USP"; MindSpeed's hybrid_cp_algo.
    """
    placed = {a: {outer: "S(2)", inner: "S(1)"} for a in QKV}
    return Plan(
        "hybrid",
        (outer, inner),
        inputs=_sequence(model, outer, inner),
        operators={ATTENTION: Boundary(arguments=placed, output={outer: "S(2)", inner: "S(2)"})},
    )


def ep_alltoall(model: nn.Module, other: Plan | None = None, dim: str = "ep", roles: Roles | None = None) -> Plan:
    """As :func:`ep`, with tokens that stay divided and are sent to their experts and back
    (:mod:`mindspeed_fx.sharding.spmd.token_dispatch`): less is sent where a token chooses fewer experts than there are
    ranks, and no rank has all tokens.

    Source: Megatron-core's "alltoall" token dispatcher.
    """
    return ep(model, other, dim, True, roles)


def ep(
    model: nn.Module,
    other: Plan | None = None,
    dim: str = "ep",
    uses_all_to_all: bool = False,
    roles: Roles | None = None,
) -> Plan:
    """The batch is divided, and so are the experts of every mixture; tokens are gathered for the experts and their
    results scattered (:mod:`experts`). Ranks that divide the batch by a zero plan share the rows of the experts that
    they all hold. Beside tensor parallelism the experts are divided over "tp" too, by number and not by width
    (MindSpeed's TP-extends-EP).

    Experts are parameters [experts, ., .] of a module whose name ends in "experts", as in Hugging Face models, or of
    whose products the graph shows it (``roles``).
    Source: Megatron-core's "allgather" token dispatcher.
    """
    held, listed = expert_parameters(model, roles), listed_parameters(model)
    if not held and not listed:
        raise ShardingError(
            'plan "ep" found no experts: parameters of shape [experts, ., .] in a module whose name ends in "experts" '
            "(of other names they are read from the graph: give example arguments, args=...), or a list of modules of "
            "one class that a method loops over, with the tokens that chose each"
        )
    dims = [dim, *(d for d in (other.mesh if other else ()) if d == "tp")]
    # Where the sequence is divided between layers, the sum of the experts' results meets it there.
    whole = (
        {"tp": "R"}
        if "tp" in dims and not any(edge.output.get("tp", "R") != "R" for edge in other.modules.values())
        else {}
    )
    edge = (
        Boundary(dict.fromkeys(dims[1:], "R"), whole)
        if uses_all_to_all
        else Boundary(dict.fromkeys(dims, "R"), {dim: "S(0)", **whole})
    )
    modules = {n.rpartition(".")[0]: edge for n in held} if edge != Boundary() else {}
    parameters = {n: dict.fromkeys(dims, "S(0)") for n in held}
    parameters.update({n: {dim: f"S({_free_dim(n, shape, other)})"} for n, shape in listed.items()})
    return Plan(
        "ep_alltoall" if uses_all_to_all else "ep",
        (dim, *dims[1:]),
        parameters,
        inputs={"*": {dim: "S(0)"}},
        modules=modules,
        operators=_listed_edges(dims, uses_all_to_all) if listed else {},
        experts={"dispatch": "all_to_all"} if uses_all_to_all else {},
    )


def _free_dim(name: str, shape: Sequence[int], other: Plan | None) -> int:
    """The first dimension that ``other`` leaves whole, of parameters of all experts of a list."""
    one = name.replace(".*.", ".0.")
    words = placement_of(other.parameters, one, "parameter").values() if other else ()
    taken = {parse_placement(w, name) for w in words}
    return next((d for d, size in enumerate(shape) if d not in taken and size > 1), 0)


def _listed_edges(dims: Sequence[str], uses_all_to_all: bool) -> dict[str, Boundary]:
    """Where weights of a list of experts become those of whole experts, and tokens meet them: a rank has a part of
    each expert's weights at rest, and brings together those of its own experts by an all-to-all."""
    edges = {"mindspeed.grouped_matmul": Boundary(arguments={"weight": dict.fromkeys(dims, "S(0)")})}
    whole = dict.fromkeys(dims[1:] if uses_all_to_all else dims, "R")
    if whole:
        edges["mindspeed.moe_permute"] = Boundary(arguments={"tokens": whole, "indices": whole})
    if not uses_all_to_all:
        result = {dims[0]: "S(0)", **dict.fromkeys(dims[1:], "R")}
        edges["mindspeed.moe_unpermute"] = Boundary({}, result, {"probs": whole})
    return edges


def zero(stage: str) -> Callable[[nn.Module, Plan | None], Plan]:
    """ZeRO over a data dimension: the batch is divided, and so is every parameter with its gradient and optimizer
    state.

    A parameter is divided along its first dimension that ``other`` leaves whole; one that has none stays whole. The
    optimizer only ever sees its part, in all three stages; the stages differ in what they exchange and keep.
    Source: Rajbhandari et al. 2019, "ZeRO".
    """

    def make(model: nn.Module, other: Plan | None = None, dim: str = "dp") -> Plan:
        parameters = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            taken = (
                {parse_placement(w, name) for w in placement_of(other.parameters, name, "parameter").values()}
                if other
                else set()
            )
            free = [d for d in range(p.ndim) if d not in taken and p.shape[d] > 1]
            if free:
                parameters[name] = {dim: f"S({free[0]})"}
        return Plan(stage, (dim,), parameters, inputs={"*": {dim: "S(0)"}}, gather={dim: stage})

    make.__doc__ = zero.__doc__
    return make


NAMED: dict[str, Callable[..., Plan]] = {
    f.__name__: f for f in (tp, tp_sp, tp_2d, ulysses, kv_allgather, ring, hybrid, ep, ep_alltoall)
} | {stage: zero(stage) for stage in ("zero1", "zero2", "zero3")}


def _sequence(model: nn.Module, *dims: str) -> dict[str, dict[str, str]]:
    """Inputs divided by sequence, their second dimension; masks are whole, since it is another dimension of theirs."""
    masks = [n for n in inspect.signature(model.forward).parameters if "mask" in n]
    return {"*": dict.fromkeys(dims, "S(1)"), **{n: dict.fromkeys(dims, "R") for n in masks}}


def whole_layers(model: nn.Module, plan: Plan) -> list[str]:
    """Linear layers of several results of which ``plan`` divides no weight, by whichever of its names: packed
    projections and those whose names say nothing."""
    several = {n: m.weight for n, m in linear_layers(model).items() if m.weight.shape[result_dim(m)] > 1}
    names = model.named_parameters(remove_duplicate=False)
    divided = {id(p) for n, p in names if {*placement_of(plan.parameters, n, "parameter").values()} - {"R"}}
    return [n for n, w in several.items() if id(w) not in divided]
