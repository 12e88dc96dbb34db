"""``parallelize(model, mesh, plan)``: parameters become DTensors that the model's own code still sees whole.

A module with parameters gets a class of its own in which each parameter is a property: reading it gives the whole
tensor (:func:`gather`), so that the model, and Dynamo, see ordinary tensors; ``_parameters`` holds the DTensor, so
that names, ``state_dict``, ``torch.distributed.checkpoint``, optimizers and gradient clipping are those of a model of
DTensors. The backend cuts :func:`gather` out of the graph again (``parallelized_graph.py``).
"""

from __future__ import annotations

import fnmatch
import functools
import inspect
import itertools
from typing import Any, Callable, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from mindspeed_fx import arguments
from mindspeed_fx.compat.dtensor import is_strided, whole_of
from mindspeed_fx.errors import nearest
from mindspeed_fx.sharding import initialize, optimizers
from mindspeed_fx.sharding.expert_lists import keep_in_one_graph
from mindspeed_fx.sharding.inputs import show_inputs_whole
from mindspeed_fx.sharding.parallelized_graph import BETWEEN_GRAPHS
from mindspeed_fx.sharding.patterns import of_operator
from mindspeed_fx.sharding.plan import Plan, ShardingError, placement_of
from mindspeed_fx.sharding.plan_names import check_patterns
from mindspeed_fx.sharding.presets import named_plan
from mindspeed_fx.sharding.registry import INPUTS, LOCAL, PARAMETER, SHARDINGS, WHOLE, Sharding, shows_whole
from mindspeed_fx.sharding.spmd.kept_whole import evenly_divided
from mindspeed_fx.sharding.spmd.redistribute import even, even_pieces, placements_of

_numbers = itertools.count()


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Plan | str,
    *,
    inputs: str = WHOLE,
    check_inputs: bool = True,
    init: Callable[[nn.Module], None] | None = None,
    seed: int = 0,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Divide ``model`` over ``mesh`` by ``plan``, in place; ``torch.compile(model, backend="mindspeed")`` does the
    rest.

    Every rank calls the compiled model with the same whole inputs (or its part of them) and gets the same whole
    results; gradients arrive on the parameters as DTensors. Without compilation the model runs too, whole on every
    rank.

    Args:
        model: whole parameters (rank 0's are used) or parameters on the meta device, which are initialized module by
            module: no rank ever holds more than one module whole, and the values do not depend on the mesh.
        mesh: with named dimensions, those of the plan.
        plan: a plan, or the name of one (see :func:`mindspeed_fx.sharding.presets.named_plan`).
        inputs: "whole": every rank passes the same tensors, and takes its part of those that the plan divides. "local":
            every rank passes that part alone, e.g. [batch / dp, sequence / cp], parts of one size; the batch is that of
            all ranks, and so is its loss.
        check_inputs: compare the arguments of all ranks in the first step with new shapes (two small all-reduces per
            mesh dimension); False: nothing is compared, and a rank that passes something else gets something else.
        init: for parameters on the meta device: called with each module that owns some, on real memory; default: the
            module's ``reset_parameters``.
        seed: of the initialization.
        args, kwargs: example arguments of the model, on its device, meta included, and not run: tp, tp_sp and
            tp_2d read from the model's graph which layers are columns and rows, whatever they are called. A plan of
            your own takes none.

    Returns:
        ``model``.

    Raises:
        ShardingError: the plan does not fit the model or the mesh; the message names the pattern, parameter or size.
    """
    arguments.check_module("parallelize", model)
    arguments.check_device_mesh("parallelize", mesh)
    arguments.check_callable("parallelize", "init", init, optional=True)
    arguments.check_whole("parallelize", "seed", seed, least=0)
    arguments.check_bool("parallelize", "check_inputs", check_inputs)
    if inputs not in INPUTS:
        raise ShardingError(f"inputs is {inputs!r}{nearest(str(inputs), INPUTS)}; valid: {', '.join(INPUTS)}")
    if isinstance(plan, str):
        plan = named_plan(plan, model, args=args, kwargs=kwargs)
    elif args is not None or kwargs is not None:
        raise ShardingError("parallelize: args and kwargs are for plans by name; this plan says what is divided")
    plan = plan_for("parallelize", plan, model)
    check_mesh(plan, mesh.mesh_dim_names or ())
    if hasattr(model, "_sharding"):
        raise ShardingError(f'the model is divided already, by plan "{model._sharding.plan.name}"')
    unmatched_patterns(model, plan)
    placements = {
        name: parameter_placements(plan, mesh, name, p) for name, p in model.named_parameters(remove_duplicate=False)
    }

    def divide(name: str, p: nn.Parameter, everywhere: bool) -> nn.Parameter:
        whole = distribute_tensor(p.detach(), mesh, placements[name], src_data_rank=None if everywhere else 0)
        return nn.Parameter(whole, requires_grad=p.requires_grad)

    initialize.materialize(model, mesh, init, seed, lambda name, p: divide(name, p, True))
    sharding = Sharding(plan, mesh, [n for n, _ in model.named_modules()], inputs, check_inputs)
    show_whole(model, sharding, lambda name, p: p if isinstance(p, DTensor) else divide(name, p, False))
    optimizers.mark(model.parameters(), plan.name)
    return model


def plan_for(function: str, plan: Any, model: nn.Module) -> Plan:
    """``plan`` itself, or the plan of that name for ``model``.

    Raises:
        ShardingError: it is neither.
    """
    if isinstance(plan, str):
        return named_plan(plan, model)
    if not isinstance(plan, Plan):
        raise ShardingError(
            f"{function}: plan is {arguments.format_value(plan)} of type {type(plan).__name__}; a Plan or the name "
            "of one is expected"
        )
    return plan


def parameter_placements(plan: Plan, mesh: DeviceMesh, name: str, p: torch.Tensor) -> tuple:
    """DTensor placements at rest of one parameter.

    Raises:
        ShardingError: a dimension it does not have or that does not divide evenly.
    """
    where = f'plan "{plan.name}", parameter "{name}" of shape {tuple(p.shape)}'
    result = placements_of(placement_of(plan.parameters, name, "parameter"), mesh, p.ndim, where)
    try:
        even(p.shape, result, mesh, where)
        even_pieces(p.shape, result, mesh, where)
    except ShardingError:
        if not plan.keep_whole:
            raise
        return _placements_kept_whole(plan, mesh, result, p)
    return result


def _placements_kept_whole(plan: Plan, mesh: DeviceMesh, wanted: tuple, p: torch.Tensor) -> tuple:
    """As evenly as it goes: what is gathered before use may be divided along any dimension; of the rest the first ranks
    have more, and pieces that ranks cannot share evenly stay whole."""
    result = list(evenly_divided(p.shape, wanted, mesh))
    for i, name in enumerate(mesh.mesh_dim_names or ()):
        if plan.gather.get(name, "never") != "never" and result[i] != wanted[i]:
            taken = {q.dim for q in result if q.is_shard()}
            free = [d for d in range(p.ndim) if d not in taken and p.shape[d] and p.shape[d] % mesh.size(i) == 0]
            result[i] = Shard(free[0]) if free else result[i]
    for i, w in enumerate(wanted):
        alone = isinstance(w, Shard) and not is_strided(w) and not any(q.is_shard(w.dim) for q in result)
        if result[i] != w and result[i].is_replicate() and alone and p.shape[w.dim] > 1:
            result[i] = w
    return tuple(result)


def show_whole(model: nn.Module, sharding: Sharding, replace: Callable[[str, nn.Parameter], nn.Parameter]) -> nn.Module:
    """Make every parameter of ``model`` a property that shows ``replace(name, parameter)`` whole; tied ones stay
    tied.
    """
    number = next(_numbers)
    SHARDINGS[number] = sharding
    sharding.number = number
    keep_in_one_graph(model, sharding)
    if sharding.inputs == LOCAL:
        show_inputs_whole(model, number)
    model.__dict__["_sharding"] = sharding  # keeps it alive as long as the model
    replaced: dict[nn.Parameter, nn.Parameter] = {}  # keeps the old ones alive, so that none takes another's identity
    for path, module in list(model.named_modules()):
        own = {n: p for n, p in module._parameters.items() if p is not None}
        if not own:
            continue
        for name, p in own.items():
            if p not in replaced:
                replaced[p] = replace(f"{path}.{name}".lstrip("."), p)
            module._parameters[name] = replaced[p]
        module.__dict__["_sharded"] = {n: f"{number}:{path}.{n}" for n in own}
        kind: Any = type(module)
        module.__class__ = showing(kind, tuple(own))
    return model


@functools.cache
def showing(cls: type, names: tuple[str, ...]) -> type:
    """``cls`` with properties for these parameters; ``_shown_from`` of it are these two."""

    def show(name: str) -> property:
        def get(self: nn.Module) -> torch.Tensor:
            return gather(self._parameters[name], self._sharded[name])

        def put(self: nn.Module, value: Any) -> None:
            self._parameters[name] = value

        return property(get, put)

    own = {"__module__": cls.__module__, "__doc__": cls.__doc__, "_shown_from": (cls, names)}
    return type(cls.__name__, (cls,), {**own, **{n: show(n) for n in names}})


@shows_whole(PARAMETER)
def gather(parameter: torch.Tensor, key: str) -> torch.Tensor:
    """A parameter, whole. ``key`` is "number of the sharding:name"; the backend knows the call by it."""
    return whole_of(parameter) if isinstance(parameter, DTensor) else parameter


def check_mesh(plan: Plan, have: tuple[str, ...]) -> None:
    """Refuse a mesh without a dimension of the plan.

    Raises:
        ShardingError: with the nearest name; a searched plan that no program is made for yet; stages of a pipeline.
    """
    if unsupported := getattr(plan, "unsupported", None):
        raise ShardingError(f'plan "{plan.name}" cannot be executed: {"; ".join(unsupported)}')
    if "pp" in plan.mesh:
        raise ShardingError(
            f'plan "{plan.name}" has stages of a pipeline (pp); mindspeed_fx.pipeline_stage(model, mesh, plan, args) '
            "makes them"
        )
    for dim in plan.mesh:
        if dim not in have:
            raise ShardingError(
                f'plan "{plan.name}" needs mesh dimension "{dim}"{nearest(dim, have)}; the mesh has '
                f"{', '.join(have) or 'no names: give init_device_mesh mesh_dim_names'}"
            )


def unmatched_patterns(model: nn.Module, plan: Plan) -> None:
    """Refuse a plan whose patterns name nothing in the model.

    Raises:
        ShardingError: with the nearest name.
    """
    check_patterns(
        plan.parameters, [n for n, _ in model.named_parameters(remove_duplicate=False)], "parameter", plan.name
    )
    check_patterns(
        plan.experts.get("parameters", ()),
        [n for n, _ in model.named_parameters(remove_duplicate=False)],
        "parameter",
        plan.name,
    )
    calling = dict.fromkeys(m for m, _ in map(of_operator, plan.operators) if m)
    check_patterns([*plan.modules, *calling], [n for n, _ in model.named_modules()], "module", plan.name)
    _check_arguments(model, plan)
    _check_operators(plan)


def _check_arguments(model: nn.Module, plan: Plan) -> None:
    """Refuse inputs that are no argument of the model; those inside containers ("batch_ids") begin with one's name.

    What hooks and ``**kwargs`` hand on, and patterns that begin with a wildcard, are known when the graph is.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    if model._forward_pre_hooks or any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    names = [p.name.lower() for p in parameters]
    between = (*BETWEEN_GRAPHS, "args_", *(f"{name}_" for name in names))
    for pattern in plan.inputs:
        if not pattern.startswith(("*", "?", "[", *between)) and not fnmatch.filter(names, pattern):
            raise ShardingError(
                f'plan "{plan.name}" names no argument: "{pattern}"{nearest(pattern, names)}; {type(model).__name__} '
                f"takes {', '.join(names) or 'none'}"
            )


def _check_operators(plan: Plan) -> None:
    """Refuse names of operators that neither the package nor torch has; other namespaces may register theirs later."""
    from mindspeed_fx.kernels import REGISTRY

    own = sorted(o.name for o in REGISTRY.values())
    for word in (
        w for pattern in plan.operators for w in of_operator(pattern)[1].split("|") if not set("*?[") & set(w)
    ):
        namespace, _, name = word.partition(".")
        if namespace in ("mindspeed", "aten") and not hasattr(getattr(torch.ops, namespace), name.partition(".")[0]):
            raise ShardingError(f'plan "{plan.name}" names no operator: "{word}"{nearest(word, own)}')
