"""``pipeline_stage(model, mesh, plan, args)``: this rank's stage of an unmodified single-device model, for torch's
schedules.

    stage = mindspeed_fx.pipeline_stage(model, mesh, plan, (ids, labels), microbatches=4)
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda loss, _: loss.sum())
    schedule.step(ids=ids, labels=labels, target=labels, losses=losses)

The step is traced once, with the sizes of a microbatch; its graph is cut between layers (``split_stages.py``), and this
rank's part goes the backend's way: what ``parallelize`` divides over the other mesh dimensions is in the graph already,
and so are names. (torch's own ``pipeline`` cuts by torch.export, which refuses parameters that are DTensors,
non-graphable "DTensorSpec", in 2.13.)
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, Callable, Sequence

import torch
import torch.fx as fx
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from mindspeed_fx import arguments, torch_compile
from mindspeed_fx.backend import Compilation, device_of
from mindspeed_fx.compat import fx_graph, tracing
from mindspeed_fx.options import Options
from mindspeed_fx.planning.split_stages import RECEIVED, Part, layers_of, receivable, split_stages, tied_parameters
from mindspeed_fx.sharding.parallelize import check_mesh, parallelize, plan_for
from mindspeed_fx.sharding.plan import Plan, ShardingError
from mindspeed_fx.training.accumulation import rows_of


class Stage(nn.Module):
    """Consecutive layers of a model, compiled; parameters and buffers are the model's own, under their names.

    ``stage(*received, **arguments of the model)`` for one microbatch: the tensors that the stage before returned, then
    the model's own arguments (those that this stage does not read are ignored; the first stage takes them by position
    too). Returns what the next stage receives; the last one the model's loss, as a tensor [1].
    """

    def __init__(self, index: int, stages: int, part: Part, loss: torch.Tensor, run: Callable, arguments: list[str]):
        super().__init__()
        self._index, self._stages, self._run, self._arguments = index, stages, run, arguments
        values = [fx_graph.example_value_of(n) for n in part.received + part.sent] + (
            [loss.reshape(1)] if index == stages - 1 else []
        )
        self._tensors = [
            torch.empty(t.shape, dtype=t.dtype, device="meta", requires_grad=t.requires_grad) for t in values
        ]
        self._receives = len(part.received)
        self._values: list[Callable[[dict[str, Any]], Any]] = []
        self.tied: dict[str, list[int]] = {}
        """Parameter -> the stages that have it too, this one among them."""

    def _bind(self, value: Any, parameters: dict[int, str], buffers: dict[int, str], inputs: dict[int, str]) -> None:
        """One more input of the graph: a parameter, a buffer, an argument of the model, or a constant."""
        if (name := parameters.get(id(value))) is not None or id(value) in buffers:
            name = name if name is not None else buffers[id(value)]
            owner, last = self, name.rpartition(".")[2]
            for word in name.split(".")[:-1]:
                if word not in owner._modules:
                    owner.add_module(word, nn.Module())
                owner = owner._modules[word]
            if id(value) in parameters:
                owner.register_parameter(last, value)
                self._values.append(lambda arg: owner._parameters[last])
            else:
                owner.register_buffer(last, value)
                self._values.append(lambda arg: owner._buffers[last])
        elif (name := inputs.get(id(value))) is not None:
            shape = tuple(value.shape)
            self._values.append(lambda arg: self._argument(arg, name, shape))
        else:
            self._values.append(lambda arg: value)

    def _argument(self, arguments: dict[str, Any], name: str, shape: tuple[int, ...]) -> Any:
        if name not in arguments:
            raise ShardingError(
                f'stage {self._index} of {self._stages} reads the model\'s argument "{name}", which is missing: give '
                f"every rank all of them by name, schedule.step({name}=...)"
            )
        if tuple(arguments[name].shape) != shape:
            raise ShardingError(
                f'stage {self._index} of {self._stages}: "{name}" is {tuple(arguments[name].shape)}; microbatches of '
                f"{shape} were traced: give the schedule and pipeline_stage the same batch and number of microbatches"
            )
        return arguments[name]

    def forward(self, *received: Any, **arguments: Any) -> Any:
        if not self._index:
            arguments.update(zip(self._arguments, received))
            received = ()
        if len(received) != self._receives:
            raise ShardingError(
                f"stage {self._index} of {self._stages} receives {self._receives} tensors, and got {len(received)}"
            )
        out = self._run(*(value(arguments) for value in self._values), *received)
        if self._index == self._stages - 1:
            return out[0].reshape(1)
        return out[0].contiguous() if len(out) == 1 else tuple(t.contiguous() for t in out)

    def examples(self) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Tensors on the meta device like those that come and go, for ``PipelineStage``."""
        return tuple(self._tensors[: self._receives]), tuple(self._tensors[self._receives :])


class _Traced(Exception):
    """Ends the run of the traced model before it starts."""


def stages(
    model: nn.Module,
    count: int,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    microbatches: int = 1,
    options: dict[str, Any] | None = None,
    only: int | None = None,
    recompute: str | None = None,
) -> list[Stage]:
    """The stages of ``model``, or of them the one with number ``only``, compiled for microbatches of the batch in
    ``args``; ``recompute``: a plan's.

    Raises:
        ShardingError: see :func:`pipeline_stage`.
    """
    layers = layers_of(model, count)
    bound = inspect.signature(model.forward).bind(*args, **(kwargs or {}))
    arguments = {name: _rows(name, value, microbatches) for name, value in _bind_arguments(bound).items()}
    inputs = {id(value): name for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    options_ = Options.parse(options).with_plan(recompute)
    outputs: list[Stage] = []
    wrong: list[BaseException] = []
    tied: dict[fx.Node, list[int]] = {}

    def backend(gm: fx.GraphModule, fakes: Sequence[Any]) -> Callable:
        placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        numbers = {n: i for i, n in enumerate(placeholders)}
        try:
            parts = split_stages(gm, layers, count)
            if len(results := [n for n in gm.graph.nodes if n.op == "output"][0].args[0]) != 1:
                raise ShardingError(
                    f"the model returns {len(results)} tensors; a pipeline needs a training step that returns its loss "
                    "alone"
                )
            tied.update(tied_parameters(parts))
            chosen = [(s, p) for s, p in enumerate(parts) if only in (None, s)]
            for s, part in chosen:
                examples = [
                    *(fakes[numbers[n]] for n in part.inputs),
                    *(receivable(fx_graph.example_value_of(n)) for n in part.received),
                ]
                compiled = Compilation(options_.resolve(device_of(examples))).compile(part.gm, examples)
                outputs.append(Stage(s, count, part, fx_graph.example_value_of(results[0]), compiled, list(arguments)))
        except Exception as e:
            wrong.append(e)
            raise

        def run(*values: Any) -> Any:
            parameters = {id(p): n for n, p in model.named_parameters()}
            buffers = {id(b): n for n, b in model.named_buffers()}
            for stage, (_, part) in zip(outputs, chosen):
                for n in part.inputs:
                    stage._bind(values[numbers[n]], parameters, buffers, inputs)
                    if n in tied:
                        stage.tied[parameters[id(values[numbers[n]])]] = tied[n]
            raise _Traced

        return run

    torch._dynamo.reset()  # a graph of this code with other sizes would make Dynamo's sizes symbols
    try:
        with torch.enable_grad(), tracing.in_one_graph(ShardingError, "pipeline_stage"):
            torch_compile.compile_with_backend(model, backend=backend, fullgraph=True, dynamic=False)(**arguments)
    except _Traced:
        pass
    except Exception:
        if wrong:
            raise wrong[0] from None
        raise
    finally:
        torch._dynamo.reset()
    return outputs


def pipeline_stage(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Plan | str | None,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    microbatches: int | None = None,
    init: Callable | None = None,
    seed: int = 0,
    options: dict[str, Any] | None = None,
) -> Any:
    """This rank's stage of ``model`` over the mesh dimension "pp"; the other dimensions divide it as
    :func:`mindspeed_fx.parallelize` does.

    The first stage has what comes before the layers, the last one head and loss, no stage more than ceil(layers / pp)
    layers. The stage is compiled here; give every rank all arguments of the model by name: ``schedule.step(ids=ids,
    labels=labels, ...)``.

    A weight of several stages, such as an embedding that is the output layer's weight, is on each of them, and its
    gradients are summed at the end of every step of the schedule (:mod:`tied_stage`); ``stage.submod.tied`` names such
    weights and their stages, for a global norm that counts them once.

    Args:
        model: a training step that returns its loss; layers are the list of modules of one class with the most
            parameters. Its parameters are divided in place; those of other stages are free once ``model`` is.
        mesh: with a dimension "pp", outermost.
        plan: for the other dimensions: a plan, the name of one, or None with "pp" alone.
        args, kwargs: of the model, with the whole batch of a step.
        microbatches: as for the schedule; default: those of the plan, else the number of stages. The step's loss is the
            mean of theirs.
        init, seed: for parameters on the meta device, see :func:`mindspeed_fx.parallelize`.
        options: of the backend.

    Returns:
        ``torch.distributed.pipelining.PipelineStage``; its ``submod`` is the :class:`Stage`.

    Raises:
        ShardingError: no repeated layers, more stages than layers, a batch that is no multiple of the microbatches,
            a plan that does not fit.
    """
    arguments.check_module("pipeline_stage", model)
    arguments.check_device_mesh("pipeline_stage", mesh)
    arguments.check_call("pipeline_stage", args, kwargs, model)
    arguments.check_whole("pipeline_stage", "microbatches", microbatches, optional=True)
    arguments.check_callable("pipeline_stage", "init", init, optional=True)
    arguments.check_whole("pipeline_stage", "seed", seed, least=0)
    arguments.check_options("pipeline_stage", options)
    names, plan = _check_plan(model, mesh, plan)
    count, inner = mesh["pp"].size(), tuple(d for d in names if d != "pp")
    layers_of(model, count)
    if microbatches is None:
        microbatches = (plan.microbatches if plan is not None else None) or count
    recompute = plan.recompute if plan is not None else None
    if inner:
        if plan is None:
            raise ShardingError(
                f"plan is None, and the mesh has {', '.join(inner)} beside pp; a plan for them is expected"
            )
        parallelize(model, mesh[inner], inside(plan), init=init, seed=seed)
    elif any(p.is_meta for p in model.parameters()):
        raise ShardingError(
            'parameters are on the meta device, and the mesh has "pp" alone; initialize the model first'
        )
    index = mesh.get_local_rank("pp")
    (stage,) = stages(
        model, count, args, kwargs, microbatches=microbatches, options=options, only=index, recompute=recompute
    )
    device = next(
        (a.device for a in [*args, *(kwargs or {}).values()] if isinstance(a, torch.Tensor)),
        torch.device(mesh.device_type),
    )
    examples = dict(zip(("input_args", "output_args"), stage.examples()))
    if stage.tied:
        from mindspeed_fx.planning.tied_stage import TiedStage

        return TiedStage(stage, index, count, device, group=mesh.get_group("pp"), tied=stage.tied, **examples)
    from torch.distributed.pipelining import PipelineStage

    return PipelineStage(stage, index, count, device, group=mesh.get_group("pp"), **examples)


def _check_plan(model: nn.Module, mesh: DeviceMesh, plan: Plan | str | None) -> tuple[tuple[str, ...], Plan | None]:
    """Names of the mesh dimensions, "pp" among them, and the plan, which fits them."""
    names = mesh.mesh_dim_names or ()
    if "pp" not in names:
        raise ShardingError(
            'pipeline_stage needs a mesh dimension "pp"; the mesh has '
            f"{', '.join(names) or 'no names: give init_device_mesh mesh_dim_names'}"
        )
    if plan is not None:
        plan = plan_for("pipeline_stage", plan, model)
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


def _bind_arguments(bound: inspect.BoundArguments) -> dict[str, Any]:
    """Arguments by name.

    Raises:
        ShardingError: arguments without a name.
    """
    results: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            raise ShardingError(f'the model takes "*{name}"; a pipeline needs arguments with names')
        results.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
    return results


def _rows(name: str, value: Any, microbatches: int) -> Any:
    """The first microbatch of an argument, as torch's schedules split it: along dimension 0."""
    return rows_of(name, value, microbatches, 0).clone() if isinstance(value, torch.Tensor) else value
