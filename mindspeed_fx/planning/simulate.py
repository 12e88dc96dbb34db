"""Every rank of a plan in one process, to check it: outputs, gradients and collectives, on a CPU, without a process
group.

The model is captured whole, and the program of ``program.py`` runs on LocalTensors, which hold all ranks' parts,
operator by operator; DTensor's propagation, the plan's edges and the operators' own collectives are those of the real
thing. Stages of a pipeline run one after another, each on what the one before it returned.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator, Sequence

import torch
import torch.fx as fx
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_fx import arguments
from mindspeed_fx.compat import dtensor, tracing
from mindspeed_fx.options import Options
from mindspeed_fx.planning.layer_lists import layers_of
from mindspeed_fx.planning.split_stages import Part, split_stages
from mindspeed_fx.sharding import parallelized_graph
from mindspeed_fx.sharding.expert_lists import reading_loops
from mindspeed_fx.sharding.plan import Plan, ShardingError


@dataclass
class Simulation:
    """What a simulated training step did."""

    outputs: Any
    """Whole, as a single device returns them."""
    gradients: dict[str, torch.Tensor]
    """Parameter -> whole gradient."""
    forward: Counter = field(default_factory=Counter)
    """Collective -> how often it ran in the forward."""
    backward: Counter = field(default_factory=Counter)
    whole: list[str] = field(default_factory=list)
    """What the ranks cannot share evenly and the plan lets stay whole, with the reason."""
    padded: list[str] = field(default_factory=list)
    """What is padded because the ranks cannot share it evenly, and how much that adds."""


def simulate(
    model: nn.Module,
    mesh: dict[str, int],
    plan: Plan | str,
    *args: Any,
    options: dict[str, Any] | None = None,
    local_inputs: bool = False,
    **kwargs: Any,
) -> Simulation:
    """Run one forward and backward of ``model`` by ``plan`` for every rank of a mesh.

    Args:
        model: whole, on cpu; is not changed.
        mesh: dimension -> number of ranks, outermost first, e.g. {"dp": 2, "tp": 4}; with "pp" the model is cut into
            stages as :func:`mindspeed_fx.pipeline_stage` cuts it, and the batch is one microbatch.
        plan: a plan, or the name of one.
        args, kwargs: of the model, whole. The backward starts from the sum of the floating outputs.
        options: of the backend; decide which operators are fused.
        local_inputs: every rank gets its part of the arguments alone, as with ``parallelize(..., inputs="local")``.

    Raises:
        ShardingError: the plan does not fit the model or the mesh, or the model breaks into several graphs.
        RuntimeError: a process group exists already.
    """
    arguments.check_module("simulate", model)
    arguments.check_sizes("simulate", mesh)
    arguments.check_options("simulate", options)
    arguments.check_bool("simulate", "local_inputs", local_inputs)
    arguments.check_call("simulate", args, kwargs, model)
    parsed = Options.parse(options)
    plan, sizes, stages = _plan_of_a_stage(model, mesh, plan)

    def step(kept: frozenset[int]) -> tuple[Simulation, frozenset[int]]:
        return _simulated(_copy(model), plan, sizes, stages, parsed, local_inputs, kept, args, kwargs)

    state = torch.get_rng_state()
    result, kept = step(frozenset())
    if kept:
        torch.set_rng_state(state)
        result, _ = step(kept)
    return result


def _simulated(
    model: nn.Module,
    plan: Plan,
    sizes: dict[str, int],
    stages: int,
    options: Options,
    local_inputs: bool,
    kept: frozenset[int],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> tuple[Simulation, frozenset[int]]:
    """The step, and which of its graph's results the model keeps and does not return, which only the return tells; the
    backward does not start from those of ``kept``."""
    from mindspeed_fx.sharding.parallelize import show_whole, unmatched_patterns
    from mindspeed_fx.sharding.registry import Sharding

    layers = layers_of(model, stages) if stages > 1 else ()
    unmatched_patterns(model, plan)
    names = {id(p): n for n, p in model.named_parameters()}
    show_whole(model, Sharding(plan, None, [n for n, _ in model.named_modules()]), lambda name, p: p)
    results: list[Simulation] = []
    wrong: list[ShardingError] = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable:
        placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        try:
            parts = split_stages(gm, layers, stages) if stages > 1 else [Part(gm, placeholders, [], [])]
            hits = [_captured(part.gm, options) for part in parts]
            for i, hit in enumerate(hits):
                hit.between = i > 0, i < stages - 1
        except ShardingError as error:  # which Dynamo makes one of many lines
            wrong.append(error)
            raise

        def run(*values: Any) -> Any:
            by_node = dict(zip(placeholders, values, strict=True))
            with dtensor.all_ranks(sizes) as local_mesh, dtensor.plain_tensors_as_replicated():
                graphs = [_Graph(part, hit, local_mesh, by_node, names, local_inputs) for part, hit in zip(parts, hits)]
                results.append(_step(graphs, kept))
            return torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, results[0].outputs)

        return run

    torch._dynamo.reset()
    try:
        with tracing.in_one_graph(ShardingError, "simulate"):
            returned = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(*args, **kwargs)
    except Exception:
        if wrong:
            raise wrong[0] from None
        raise
    finally:
        torch._dynamo.reset()
    return results[0], _kept_results(model, results[0].outputs, _addresses(returned))


def _addresses(values: Any) -> set[int]:
    leaves = torch.utils._pytree.tree_leaves(values)
    return {x.data_ptr() for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point()}


def _kept_results(model: nn.Module, outputs: Any, returned: set[int]) -> frozenset[int]:
    """Numbers of the tensors among ``outputs`` that are at the address of an attribute of the model, and at none of
    ``returned``."""
    attributes = {a for module in model.modules() for a in _addresses(list(vars(module).values()))} - returned
    tensors = [x for x in torch.utils._pytree.tree_leaves(outputs) if isinstance(x, torch.Tensor)]
    return frozenset(i for i, x in enumerate(tensors) if x.is_floating_point() and x.data_ptr() in attributes)


def _copy(model: nn.Module) -> nn.Module:
    """The model, whose own gradients and placements stay as they are.

    Raises:
        ShardingError: it holds results of a step that it ran.
    """
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                raise ShardingError(
                    f'simulate: "{f"{name}.{attribute}".lstrip(".")}" of the model is a result of a step that it ran, '
                    "and cannot be copied with it; set it to None, or give a model that has not run"
                )
    return copy.deepcopy(model)


def _captured(gm: fx.GraphModule, options: Options) -> parallelized_graph.ParallelizedGraph:
    """Capture ``gm``, in place, with the passes of the backend."""
    from mindspeed_fx.backend import Compilation

    hit = parallelized_graph.take_shown_calls(gm)
    if hit is None:
        raise ShardingError("simulate: the model reads none of its parameters")
    compilation = Compilation(options.resolve("cpu"))
    compilation.sharding = hit
    with reading_loops(hit.sharding, again=False):
        compilation.capture(gm)
    return hit


def _plan_of_a_stage(model: nn.Module, mesh: dict[str, int], plan: Plan | str) -> tuple[Plan, dict[str, int], int]:
    """The plan and the mesh of one stage, and how many stages there are.

    Raises:
        ShardingError: the plan does not fit the model or the mesh.
    """
    from mindspeed_fx.planning.pipeline_stage import inside
    from mindspeed_fx.sharding.parallelize import check_mesh, plan_for

    plan = plan_for("simulate", plan, model)
    if "pp" not in mesh:
        check_mesh(plan, tuple(mesh))
        return plan, mesh, 1
    if unsupported := getattr(plan, "unsupported", None):
        raise ShardingError(f'plan "{plan.name}" cannot be executed: {"; ".join(unsupported)}')
    sizes = {d: n for d, n in mesh.items() if d != "pp"}
    check_mesh(inside(plan), tuple(sizes))
    return inside(plan), sizes or {"dp": 1}, mesh["pp"]


class _Graph:
    """One captured graph on all ranks: the whole step, or a stage of it."""

    def __init__(
        self,
        part: Part,
        hit: parallelized_graph.ParallelizedGraph,
        mesh: Any,
        by_node: dict[fx.Node, Any],
        names: dict[int, str],
        local_inputs: bool,
    ):
        """
        Args:
            by_node: placeholder of the whole step -> what it is called with.
            names: identity of a parameter -> its name.
            local_inputs: see :func:`simulate`.
        """
        self.part, self.hit, self.mesh, self.by_node = part, hit, mesh, by_node
        self.names, self.local_inputs = names, local_inputs
        hit.sharding.mesh = mesh
        self.parameters: dict[str, tuple[Any, torch.Tensor]] = {}
        """Name -> the parameter as a DTensor, and its local tensors, to which gradients come."""
        self.received: list[torch.Tensor] = []
        self.outputs: Any = None

    def forward(self, received: Sequence[torch.Tensor]) -> None:
        """Run on what the stage before returned."""
        from mindspeed_fx.sharding.spmd.program import Program

        self.received = [x.detach().requires_grad_(x.requires_grad) for x in received]
        args = [*(self.by_node[n] for n in self.part.inputs), *self.received]
        placeholders = [n for n in self.part.gm.graph.nodes if n.op == "placeholder"]
        pairs = [self._enter(n, x) for n, x in zip(placeholders, args, strict=True)]
        values = [value for value, _ in pairs]
        self.program = Program(self.part.gm, self.hit.plan, self.mesh, values, hands_on=self.hit.between[1])
        self.outputs = self.program(*(x for _, x in pairs))

    def _enter(self, node: fx.Node, x: Any) -> tuple[Any, Any]:
        """How the program takes an input, and the input as all ranks hold it."""
        from torch.distributed.tensor import distribute_tensor

        from mindspeed_fx.sharding.parallelize import parameter_placements

        name, hit = self.names.get(id(x)), self.hit
        if name is not None:
            placements = parameter_placements(hit.plan, self.mesh, name, x)
            whole = distribute_tensor(x.detach(), self.mesh, placements, src_data_rank=None)
            self.parameters[name] = whole, whole.to_local().detach().requires_grad_(x.requires_grad)
            return parallelized_graph.parameter_value(whole, name), self.parameters[name][1]
        if isinstance(x, torch.Tensor) and any(x is r for r in self.received):
            value = parallelized_graph.received_value(node, hit)
            return (parallelized_graph.input_value(node, x, hit) if value is None else value), x
        if not isinstance(x, torch.Tensor):
            return parallelized_graph.input_value(node, x, hit), x
        argument = parallelized_graph.argument_name(node) if self.local_inputs else None
        if argument is None:
            return parallelized_graph.input_value(node, x, hit), dtensor.on_every_rank(x)
        placements = parallelized_graph.input_value(node, x, hit).placements
        local = distribute_tensor(x.detach(), self.mesh, placements, src_data_rank=None).to_local()
        hit.parts[node.name] = (argument, x)
        return parallelized_graph.part_value(x, argument, x, hit), local.requires_grad_(x.requires_grad)

    def backward(self, gradients: Sequence[torch.Tensor | None] | None, kept: frozenset[int] = frozenset()) -> None:
        """From the gradients that the next stage gave back; None: from the sum of the results, but for the numbers of
        ``kept``."""
        from mindspeed_fx.sharding.spmd.program import differentiating

        tensors = [x for x in torch.utils._pytree.tree_leaves(self.outputs) if isinstance(x, torch.Tensor)]
        if gradients is None:
            pairs = [(x.sum(), None) for i, x in enumerate(tensors) if x.requires_grad and i not in kept]
        else:
            pairs = [(x, g) for x, g in zip(tensors, gradients, strict=True) if g is not None]
        with differentiating(lambda: self.program):
            if pairs:  # none under no_grad
                torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs])

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Of the parameters that have one, whole."""
        from torch.distributed.tensor import Replicate

        for name, (whole, part) in self.parameters.items():
            if part.grad is not None:
                gradient = type(whole).from_local(
                    part.grad, self.mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
                )
                yield name, _one(gradient.redistribute(placements=[Replicate()] * self.mesh.ndim).to_local())


def _step(graphs: Sequence[_Graph], kept: frozenset[int]) -> Simulation:
    """Forward and backward of stages, or of the one graph that a model is; see :func:`_simulated`."""
    result = Simulation(None, {})
    received: Sequence[torch.Tensor] = ()
    for graph in graphs:
        with _Collectives() as forward:
            graph.forward(received)
        result.forward += forward.counts
        received = graph.outputs if graph is not graphs[-1] else ()
    result.outputs = torch.utils._pytree.tree_map_only(torch.Tensor, _one, graphs[-1].outputs)
    gradients: Sequence[torch.Tensor | None] | None = None
    for graph in reversed(graphs):
        with _Collectives() as backward:
            graph.backward(gradients, kept)
        result.backward += backward.counts
        gradients = [x.grad for x in graph.received]
    for graph in graphs:
        result.whole += [reason for reason in graph.program.kept.reasons if reason not in result.whole]
        result.padded += [text for text in graph.program.kept.padded if text not in result.padded]
        for name, gradient in graph.gradients():  # stages that share a weight sum its gradients
            result.gradients[name] = result.gradients[name] + gradient if name in result.gradients else gradient
    return result


class _Collectives(TorchDispatchMode):
    """Counts collectives by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if dtensor.has_dtensor(types):
            return NotImplemented
        if func.namespace in ("c10d", "_c10d_functional", "_dtensor") and func._opname not in (
            "wait_tensor",
            "_wrap_tensor_autograd",
        ):
            self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


def _one(x: torch.Tensor) -> torch.Tensor:
    """The tensor that all ranks hold alike."""
    return dtensor.reconcile(x).detach()
