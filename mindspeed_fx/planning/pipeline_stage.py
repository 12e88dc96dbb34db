"""``pipeline_stages(model, mesh, plan, args)``: this rank's stages of an unmodified single-device model, for torch's
schedules.

    stages = mindspeed_fx.pipeline_stages(model, mesh, plan, (ids, labels), microbatches=4, virtual=2)
    schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=lambda loss, _: loss.sum())
    schedule.step(ids=ids, labels=labels, target=labels, losses=losses)

The step is traced once, with the sizes of a microbatch; its graph is cut between layers (``split_stages.py``), and this
rank's parts go the backend's way (``stage_module.py``): what ``parallelize`` divides over the other mesh dimensions is
in the graph already, and so are names. (torch's own ``pipeline`` cuts by torch.export, which refuses parameters that
are DTensors, non-graphable "DTensorSpec", in 2.13.)
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from mindspeed_fx import arguments
from mindspeed_fx.compat import pipelining
from mindspeed_fx.errors import nearest
from mindspeed_fx.planning.balanced_layers import balanced_layers
from mindspeed_fx.planning.layer_lists import layers_of
from mindspeed_fx.planning.search.layouts import Layout
from mindspeed_fx.planning.stage_module import Stage, add_under, stages
from mindspeed_fx.planning.tied_stage import TiedStage, TiedWeights
from mindspeed_fx.sharding.between_stages import RECEIVED, part_like
from mindspeed_fx.sharding.parallelize import check_mesh, parallelize, plan_for
from mindspeed_fx.sharding.plan import Plan, ShardingError

STYLES = ("loop", "v")
SCHEDULES = (
    "1F1B",
    "GPipe",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)
"""Of torch.distributed.pipelining, without "Schedule" before the name."""


class RankStages(list):
    """The stages of one rank, in order: ``torch.distributed.pipelining.PipelineStage``, each with its :class:`Stage` as
    ``submod``.
    """

    module: nn.Module
    """All parameters and buffers of these stages under the model's names, each once: for optimizer and checkpoint."""


def pipeline_stages(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Plan | str | None,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    virtual: int | None = None,
    style: str | None = None,
    layers: Sequence[int] | str | None = None,
    microbatches: int | None = None,
    init: Callable | None = None,
    seed: int = 0,
    options: dict[str, Any] | None = None,
) -> RankStages:
    """This rank's stages of ``model`` over the mesh dimension "pp"; the other dimensions divide each as
    :func:`mindspeed_fx.parallelize` does.

    The first stage has what comes before the layers, the last one head and loss. The stages are compiled here; give
    every rank all arguments of the model by name: ``schedule.step(ids=ids, labels=labels, ...)``. Schedules that make
    gradients of weights later than those of a stage's input (zero bubble, DualPipeV) get them so: the backward's graph
    is taken apart where they ask for it.

    A weight of several stages, such as an embedding that is the output layer's weight, is on each of their ranks, and
    its gradients are summed at the end of every step of the schedule (:mod:`tied_stage`); ``stage.submod.tied`` names
    such weights and their stages, for a global norm that counts them once.

    Args:
        model: a training step that returns its loss, beside it what a loss of the schedule reads, or results alone;
            layers are the list of modules of one class with the most parameters, an encoder's and a decoder's one after
            the other. Its parameters are divided in place; those of other ranks are free once ``model`` is.
        mesh: with a dimension "pp", outermost.
        plan: for the other dimensions: a plan, the name of one, or None with "pp" alone.
        args, kwargs: of the model, with the whole batch of a step.
        virtual: stages on a rank; default: those of the plan, else 2 for style "v", else 1.
        style: which: "loop", on rank r of p stages r, p + r, ... (``ScheduleInterleaved1F1B``, ``ScheduleLoopedBFS``,
            ``ScheduleInterleavedZeroBubble``), or "v", r and 2 p - 1 - r (``ScheduleZBVZeroBubble``,
            ``ScheduleDualPipeV``); default: the plan's, else "loop".
        layers: how many each stage has; "balanced": so that the fullest stage takes the least modelled time
            (:mod:`balanced_layers`); default: those of the plan, else as equal as can be by number, none more than
            ceil(layers / stages).
        microbatches: as for the schedule; default: those of the plan, else the number of stages. The step's loss is the
            mean of theirs.
        init, seed: for parameters on the meta device, see :func:`mindspeed_fx.parallelize`.
        options: of the backend.

    Raises:
        ShardingError: no repeated layers, more stages than layers, a batch that is no multiple of the microbatches,
            a plan that does not fit.
    """
    how = virtual, style, layers, microbatches, init, seed, options
    return _stages("pipeline_stages", model, mesh, plan, args, kwargs, *how)


def pipeline_stage(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Plan | str | None,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    layers: Sequence[int] | str | None = None,
    microbatches: int | None = None,
    init: Callable | None = None,
    seed: int = 0,
    options: dict[str, Any] | None = None,
) -> Any:
    """The one stage of this rank, for schedules of one (``Schedule1F1B``, ``ScheduleGPipe``); see
    :func:`pipeline_stages`.

    Returns:
        ``torch.distributed.pipelining.PipelineStage``; its ``submod`` is the :class:`Stage`.
    """
    how = 1, "loop", layers, microbatches, init, seed, options
    (stage,) = _stages("pipeline_stage", model, mesh, plan, args, kwargs, *how)
    return stage


def _stages(
    name: str,
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Plan | str | None,
    args: Sequence[Any],
    kwargs: dict[str, Any] | None,
    virtual: int | None,
    style: str | None,
    layers: Sequence[int] | str | None,
    microbatches: int | None,
    init: Callable | None,
    seed: int,
    options: dict[str, Any] | None,
) -> RankStages:
    arguments.check_module(name, model)
    arguments.check_device_mesh(name, mesh)
    arguments.check_call(name, args, kwargs, model)
    arguments.check_whole(name, "virtual", virtual, optional=True)
    if style is not None:
        arguments.check_word(name, "style", style, STYLES)
    if isinstance(layers, str):
        arguments.check_word(name, "layers", layers, ("balanced",))
    else:
        arguments.check_wholes(name, "layers", layers)
    arguments.check_whole(name, "microbatches", microbatches, optional=True)
    arguments.check_callable(name, "init", init, optional=True)
    arguments.check_whole(name, "seed", seed, least=0)
    arguments.check_options(name, options)
    names, plan = _check_plan(name, model, mesh, plan)
    pp, inner = mesh["pp"].size(), tuple(d for d in names if d != "pp")
    own_style, own_virtual, own_layers = schedule_of(plan)
    style = style or own_style or "loop"
    virtual = virtual or own_virtual or (2 if style == "v" else 1)
    if style == "v" and virtual != 2:
        raise ShardingError(f'virtual={virtual}, style="v"; valid: 2 stages on a rank')
    count = pp * virtual
    layers_of(model, count)
    if microbatches is None:
        microbatches = (plan.microbatches if plan is not None else None) or count
    if layers is None and virtual == own_virtual:
        layers = own_layers
    elif layers == "balanced":
        layout = Layout(pp=pp, microbatches=microbatches, schedule=schedule_like(style, virtual), virtual=virtual)
        layers = balanced_layers(model, args, kwargs, layout, mesh)
    if inner:
        if plan is None:
            raise ShardingError(
                f"plan is None, and the mesh has {', '.join(inner)} beside pp; a plan for them is expected"
            )
        own_plan = inside(plan)
        parallelize(model, mesh[inner], own_plan, init=init, seed=seed)
    elif any(p.is_meta for p in model.parameters()):
        raise ShardingError(
            'parameters are on the meta device, and the mesh has "pp" alone; initialize the model first'
        )
    rank_of = [ranks_of_stage(s, pp, style) for s in range(count)]
    own = [s for s in range(count) if rank_of[s] == mesh.get_local_rank("pp")]
    recompute = plan.recompute if plan is not None else None
    how = {"microbatches": microbatches, "options": options, "recompute": recompute, "layers": layers}
    if inner:
        how["part_of"] = lambda value: part_like(value, own_plan, mesh[inner])
    modules = stages(model, count, args, kwargs, only=own, **how)
    device = next(
        (a.device for a in [*args, *(kwargs or {}).values()] if isinstance(a, torch.Tensor)),
        torch.device(mesh.device_type),
    )
    results = _for_schedules(modules, rank_of, own, device, mesh.get_group("pp"))
    for stage in results:
        stage.inner_groups = [mesh.get_group(d) for d in inner]
    return results


def schedule_of(plan: Plan | None) -> tuple[str | None, int | None, list[int] | None]:
    """Style, stages on a rank and layers of each stage that a plan's schedule asks for.

    Raises:
        ShardingError: a schedule that torch does not have, or a number that is none.
    """
    if plan is None or plan.schedule is None:
        return None, None, None
    name, _, numbers = plan.schedule.partition(":")
    virtual, _, sizes = numbers.partition(":")
    if name not in SCHEDULES or not all(n.isdigit() and int(n) for n in (virtual or "1", *(sizes or "1").split("+"))):
        raise ShardingError(
            f'plan "{plan.name}": schedule is {plan.schedule!r}{nearest(name, SCHEDULES)}; valid: '
            f"{', '.join(SCHEDULES)}, with stages on a rank as in Interleaved1F1B:2, and layers of each stage as in "
            "1F1B:1:3+5"
        )
    layers = [int(n) for n in sizes.split("+")] if sizes else None
    return ("v" if name in ("ZBVZeroBubble", "DualPipeV") else "loop"), int(virtual or 1), layers


def schedule_like(style: str, virtual: int) -> str:
    """A schedule of stages that lie so."""
    return "ZBVZeroBubble" if style == "v" else "1F1B" if virtual == 1 else "Interleaved1F1B"


def _for_schedules(
    modules: list[Stage], rank_of: list[int], own: list[int], device: torch.device, group: Any
) -> RankStages:
    result = RankStages()
    result.module = nn.Module()
    for module in modules:
        for n, p in module.named_parameters():
            add_under(result.module, n, p)
        for n, b in module.named_buffers():
            add_under(result.module, n, b)
    tied = {n: readers for module in modules for n, readers in module.tied.items()}
    kind: dict[str, Any] = {}
    if tied:
        parameters = dict(result.module.named_parameters(remove_duplicate=False))
        readers = {n: tied[n] for n in sorted(tied)}
        kind["weights"] = TiedWeights(readers, parameters, own, rank_of, group)
    for s, module in zip(own, modules):
        examples = dict(zip(("input_args", "output_args"), module.examples()))
        stage_class = TiedStage if tied else pipelining.PartedStage
        stage = stage_class(module, s, len(rank_of), device, group=group, late=module.late, **examples, **kind)
        stage.stage_index_to_group_rank = dict(enumerate(rank_of))
        result.append(stage)
    return result


def ranks_of_stage(stage: int, ranks: int, style: str) -> int:
    """The rank that has a stage: 0 1 2 0 1 2 ("loop"), or 0 1 2 2 1 0 ("v")."""
    turn, place = divmod(stage, ranks)
    return ranks - 1 - place if style == "v" and turn % 2 else place


def follow_shapes(schedule: Any) -> Any:
    """Let a schedule of stages from :func:`pipeline_stages` take batches of other sizes: what is new is traced and
    compiled at the beginning of its first step, and kept.

    The stages' model must still be there, and every rank must give all of its arguments by name.

    Args:
        schedule: of torch.distributed.pipelining.

    Returns:
        ``schedule`` itself.

    Raises:
        ArgumentError: a stage is not of :func:`pipeline_stages`.
    """
    own = pipelining.stages_of(schedule)
    if not own or not all(isinstance(getattr(s, "submod", None), Stage) for s in own):
        arguments.refuse("follow_shapes", "schedule", schedule, "one of stages from pipeline_stages is expected")

    def prepare(args: tuple, kwargs: dict) -> None:
        changed = [s.submod.select(s.submod.named(args, kwargs)) for s in own]
        if any(changed):
            for s in own:
                s.take_sizes(*s.submod.examples())
            pipelining.forget_sizes(schedule)

    pipelining.before_steps(schedule, prepare)
    return schedule


def _check_plan(
    name: str, model: nn.Module, mesh: DeviceMesh, plan: Plan | str | None
) -> tuple[tuple[str, ...], Plan | None]:
    """Names of the mesh dimensions, "pp" among them, and the plan, which fits them."""
    names = mesh.mesh_dim_names or ()
    if "pp" not in names:
        raise ShardingError(
            f'{name} needs a mesh dimension "pp"; the mesh has '
            f"{', '.join(names) or 'no names: give init_device_mesh mesh_dim_names'}"
        )
    if plan is not None:
        plan = plan_for(name, plan, model)
        if unsupported := getattr(plan, "unsupported", None):
            raise ShardingError(f'plan "{plan.name}" cannot be executed: {"; ".join(unsupported)}')
        check_mesh(inside(plan), names)
    return names, plan


class StagePlan(Plan):
    """The plan of one stage, which may have no part of what the plan of the whole is about."""

    is_of_stage = True


def inside(plan: Plan) -> Plan:
    """The plan of one stage: without "pp"; what a stage receives is divided like the arguments of the model, but over
    tp.
    """
    received = {
        d: word
        for placed in plan.inputs.values()
        for d, word in placed.items()
        if d != "tp" and all(p.get(d, word) == word for p in plan.inputs.values())
    }
    inputs = {**plan.inputs, **({f"{RECEIVED}*": received} if received else {})}
    parts = {f.name: getattr(plan, f.name) for f in dataclasses.fields(Plan)}
    return StagePlan(**{**parts, "mesh": tuple(d for d in plan.mesh if d != "pp"), "inputs": inputs})
