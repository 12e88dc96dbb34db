"""The search for the fastest plan under the cost model. One idea per file:

* ``layer_dedup.py``: layers that repeat, so that two of each kind are traced; ``model_graph.py``: from model to
  captured graph
* ``axes.py``: which dimensions of which tensors are the same thing; ``strategies.py``: how an operator is computed in
  parts
* ``problem.py``: one of each kind of layer, operators, values and the edges between them; ``problem_builder.py``: one
  of a captured graph
* ``layouts.py``: how the world is factored; ``strategy_space.py``: the strategies of every operator in a layout;
  ``costs.py``: seconds and bytes of each; ``recomputation.py``: what is kept for the backward
* ``lp_structure.py``: which combinations there are, shared by layouts; ``highs.py``: linear programs; ``solve.py``: the
  integer program of one layout; ``lower_bounds.py``: what a layout takes at least; ``branch_and_bound.py``: over all
  layouts, with the bound
* ``schedules.py``: idle time and kept microbatches of a pipeline's schedules; ``stage_loads.py``: what each rank of a
  pipeline does and holds; ``stage_step.py``: the modelled step of one choice (``solution.py``);
  ``schedule_reasons.py``: why this schedule
* ``to_plan.py``: a solution as a plan; ``traced_plan.py``, ``tried_plans.py``: which of them trace;
  ``constraints.py``: a plan as a restriction; ``searched_plan.py``: the plan with its numbers and reasons;
  ``plan_table.py``, ``search_svg.py``: as text and as a picture
"""

from __future__ import annotations

import math
from typing import Any, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from mindspeed_fx import arguments
from mindspeed_fx.errors import nearest
from mindspeed_fx.garbage import without_collection
from mindspeed_fx.report import progress
from mindspeed_fx.sharding.plan import ShardingError

DIMENSIONS = ("pp", "dp", "cp", "ep", "tp")


def plan(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    devices: int | None = None,
    mesh: Any = None,
    hardware: str | None = None,
    memory: Any = None,
    keep: int = 5,
    optimizer: str = "adam",
    pipeline: bool = True,
    microbatches: int | None = None,
    zero: str | None = None,
    recompute: str | None = None,
    trace: bool = True,
) -> Any:
    """The plan with the least modelled step time that fits in memory, over placements of every operator and over
    meshes.

    Nothing runs: parameters and arguments may be on the meta device, and no process group is needed. The space, and
    what is assumed: docs/sharding.md.

    Args:
        model: a training step: returns the loss, or something whose sum is differentiated.
        args, kwargs: of the model, with the whole batch of a step.
        devices: how many; or
        mesh: their mesh, a ``DeviceMesh`` or dimension -> ranks, with names among "pp", "dp", "cp", "ep", "tp": its
            sizes are kept.
        hardware: name of a device of the cost model; default: the one at hand.
        memory: of one device, "60GiB" or bytes; default: nine tenths of what it has.
        keep: how many meshes are reported.
        optimizer: "adam", "momentum" or "sgd": what it stores for each parameter.
        pipeline: whether pipeline stages are considered (:func:`mindspeed_fx.pipeline_stage` runs them).
        microbatches: how many; None: searched.
        zero: "never", "zero2" or "zero3"; None: searched.
        recompute: "none", "norm+activation_function" or "full"; None: searched.
        trace: whether the program of a rank is made on fake tensors before a plan is returned or listed, of two layers
            of each kind: a plan that fails there is neither, and :attr:`SearchedPlan.refused` says why. Not done where
            a process group exists (torchrun's); such plans are listed as "not tried". Of stages the layers alone.

    Returns:
        :class:`~mindspeed_fx.planning.search.searched_plan.SearchedPlan`: a :class:`~mindspeed_fx.Plan` with
        ``seconds``, ``memory``, ``gap``, ``alternatives``, ``explain(...)``, ``diff(...)``; printed, a table.

    Raises:
        ShardingError, OptionError: nothing fits; a wrong name or size; scipy or highspy is missing.
    """
    from mindspeed_fx.planning.search.branch_and_bound import branch_and_bound, memory_of
    from mindspeed_fx.planning.search.costs import OPTIMIZERS, Prices
    from mindspeed_fx.planning.search.highs import milp
    from mindspeed_fx.planning.search.model_graph import trace_model
    from mindspeed_fx.planning.search.searched_plan import Searched

    arguments.check_module("plan", model)
    arguments.check_call("plan", args, kwargs, model)
    arguments.check_word("plan", "optimizer", optimizer, tuple(OPTIMIZERS))
    arguments.check_whole("plan", "keep", keep)
    arguments.check_bool("plan", "pipeline", pipeline)
    arguments.check_bool("plan", "trace", trace)
    settings = {"optimizer": optimizer, "pipeline": pipeline, **_fixed_settings(microbatches, zero, recompute)}
    fixed, devices = _fixed_sizes(mesh, devices)
    milp()
    hw = _hardware(hardware, model)
    limit = memory_of(memory, hw)
    settings["fixed"] = fixed
    # each collection walks over all objects of torch, a quarter of a second, and a search makes little garbage
    with without_collection(), progress.task("plan", ("model", "layouts", "programs", "integers")):
        progress.enter("model")
        problem = trace_model(model, args, kwargs or {}, fixed.get("pp", 0 if pipeline and devices > 1 else 1))
        outcome = branch_and_bound(problem, hw, devices, limit, keep=keep, **settings)
    searched = Searched(problem, Prices(problem, hw, optimizer), devices, limit, outcome, settings)
    searched.tried.asked = trace
    return _first_that_traces(searched)


def _hardware(name: Any, model: Any) -> Any:
    """The device of that name, or, for None, the one that the model's parameters are on.

    Raises:
        ShardingError: what it is cannot be told.
    """
    from mindspeed_fx.cost.hardware import detect, hardware

    if name is None:
        target = next((p.device.type for p in model.parameters() if p.device.type not in ("meta", "cpu")), "cpu")
        name, why = detect("npu" if target == "privateuseone" else target)
        if name is None:
            raise ShardingError(f"hardware: {why}")
    return hardware(name)


def _first_that_traces(searched: Any) -> Any:
    """The fastest plan of which a rank can make its program.

    Raises:
        ShardingError: none can; says why of each.
    """
    from mindspeed_fx.planning.search.searched_plan import SearchedPlan

    for solution in searched.outcome.solutions:
        plan = SearchedPlan.of(searched, solution)
        if searched.tried.take(plan):
            return plan
    reasons = "; ".join(f"{name}: {why}" for name, why in searched.refused.items())
    raise ShardingError(f"plan: no rank can make its program of the plans that fit ({reasons})")


def _fixed_settings(microbatches: int | None, zero: str | None, recompute: str | None) -> dict[str, Any]:
    """The search's arguments for what is given of these, and for what is not."""
    from mindspeed_fx.planning.search.layouts import RECOMPUTE, ZERO

    arguments.check_whole("plan", "microbatches", microbatches, optional=True)
    for name, value, valid in (("zero", zero, ZERO), ("recompute", recompute, RECOMPUTE)):
        if value is not None:
            arguments.check_word("plan", name, value, valid)
    return {
        "microbatches": microbatches,
        "zero": (zero,) if zero else ZERO,
        "recompute": (recompute,) if recompute else RECOMPUTE,
    }


def _fixed_sizes(mesh: Any, devices: int | None) -> tuple[dict[str, int], int]:
    """Sizes that are given, and the number of devices."""
    if mesh is None:
        if devices is None:
            raise ShardingError("plan: devices is None and mesh is None; give one of them")
        arguments.check_whole("plan", "devices", devices)
        return {}, devices
    if isinstance(mesh, DeviceMesh):
        mesh = dict(zip(mesh.mesh_dim_names or ("",), mesh.shape))
        if "" in mesh:
            raise ShardingError(
                f"plan: the mesh has no names: give init_device_mesh mesh_dim_names, of {', '.join(DIMENSIONS)}"
            )
    sizes = arguments.check_sizes("plan", mesh)
    for name in sizes:
        if name not in DIMENSIONS:
            raise ShardingError(
                f'plan: mesh dimension "{name}"{nearest(name, DIMENSIONS)}; valid: {", ".join(DIMENSIONS)}'
            )
    count = math.prod(sizes.values())
    if devices is not None:
        arguments.check_whole("plan", "devices", devices)
        if devices != count:
            raise ShardingError(f"plan: devices is {devices}, and the mesh has {count}")
    return {**dict.fromkeys(DIMENSIONS, 1), **sizes}, count
