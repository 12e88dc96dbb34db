"""Every rank of a plan in one process, to check it: outputs, gradients and collectives, on a CPU, without a process
group.

The model is captured whole, and the program of ``program.py`` runs on LocalTensors, which hold all ranks' parts,
operator by operator; DTensor's propagation, the plan's edges and the operators' own collectives are those of the real
thing.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Callable, Sequence

import torch
import torch.fx as fx
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_fx import arguments
from mindspeed_fx.compat import dtensor, tracing
from mindspeed_fx.options import Options
from mindspeed_fx.sharding import parallelized_graph
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
        mesh: dimension -> number of ranks, outermost first, e.g. {"dp": 2, "tp": 4}.
        plan: a plan, or the name of one.
        args, kwargs: of the model, whole. The backward starts from the sum of the floating outputs.
        options: of the backend; decide which operators are fused.
        local_inputs: every rank gets its part of the arguments alone, as with ``parallelize(..., inputs="local")``.

    Raises:
        ShardingError: the plan does not fit the model or the mesh, or the model breaks into several graphs.
        RuntimeError: a process group exists already.
    """
    from mindspeed_fx.backend import Compilation
    from mindspeed_fx.sharding.parallelize import check_mesh, plan_for, show_whole, unmatched_patterns
    from mindspeed_fx.sharding.registry import Sharding

    arguments.check_module("simulate", model)
    arguments.check_sizes("simulate", mesh)
    arguments.check_options("simulate", options)
    arguments.check_bool("simulate", "local_inputs", local_inputs)
    arguments.check_call("simulate", args, kwargs, model)
    parsed = Options.parse(options)
    plan = plan_for("simulate", plan, model)
    check_mesh(plan, tuple(mesh))
    model = copy.deepcopy(model)
    unmatched_patterns(model, plan)
    names = {id(p): n for n, p in model.named_parameters()}
    show_whole(model, Sharding(plan, None, [n for n, _ in model.named_modules()]), lambda name, p: p)
    results: list[Simulation] = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable:
        result = parallelized_graph.take_shown_calls(gm)
        if result is None:
            raise ShardingError("simulate: the model reads none of its parameters")
        compilation = Compilation(parsed.resolve("cpu"))
        compilation.sharding = result
        compilation.capture(gm)
        return lambda *args: _run(gm, result, plan, mesh, args, names, results, local_inputs)

    torch._dynamo.reset()
    try:
        with tracing.in_one_graph(ShardingError, "simulate"):
            torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(*args, **kwargs)
    finally:
        torch._dynamo.reset()
    return results[0]


def _run(
    gm: fx.GraphModule,
    hit: parallelized_graph.ParallelizedGraph,
    plan: Plan,
    sizes: dict[str, int],
    arguments: Sequence[Any],
    names: dict[int, str],
    results: list[Simulation],
    parts: bool,
) -> Any:
    from torch.distributed.tensor import Replicate, distribute_tensor

    from mindspeed_fx.sharding.parallelize import parameter_placements
    from mindspeed_fx.sharding.spmd.program import Program, differentiating

    with dtensor.all_ranks(sizes) as mesh, dtensor.plain_tensors_as_replicated():
        hit.sharding.mesh = mesh
        values, tensors, parameters = [], [], {}
        for node, x in zip([n for n in gm.graph.nodes if n.op == "placeholder"], arguments, strict=True):
            name = names.get(id(x))
            if (
                parts
                and name is None
                and isinstance(x, torch.Tensor)
                and (argument := parallelized_graph.argument_name(node)) is not None
            ):
                placements = parallelized_graph.input_value(node, x, hit).placements
                whole = distribute_tensor(x.detach(), mesh, placements, src_data_rank=None)
                hit.parts[node.name] = (argument, x)
                values.append(parallelized_graph.part_value(x, *hit.parts[node.name], hit))
                tensors.append(whole.to_local().requires_grad_(x.requires_grad))
                continue
            if name is None:
                values.append(parallelized_graph.input_value(node, x, hit))
                tensors.append(dtensor.on_every_rank(x) if isinstance(x, torch.Tensor) else x)
                continue
            placements = parameter_placements(plan, mesh, name, x)
            whole = distribute_tensor(x.detach(), mesh, placements, src_data_rank=None)
            values.append(parallelized_graph.parameter_value(whole, name))
            parameters[name] = (whole, whole.to_local().detach().requires_grad_(x.requires_grad))
            tensors.append(parameters[name][1])
        program = Program(gm, plan, mesh, values)
        with _Collectives() as forward:
            outputs = program(*tensors)
        wanted = [
            o for o in torch.utils._pytree.tree_leaves(outputs) if isinstance(o, torch.Tensor) and o.requires_grad
        ]
        with _Collectives() as backward, differentiating(lambda: program):
            if wanted:  # none under no_grad
                torch.autograd.backward([o.sum() for o in wanted])
        result = Simulation(
            torch.utils._pytree.tree_map_only(torch.Tensor, _one, outputs),
            {},
            forward.counts,
            backward.counts,
            program.kept.reasons,
        )
        for name, (whole, part) in parameters.items():
            if part.grad is not None:
                gradient = type(whole).from_local(
                    part.grad, mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
                )
                result.gradients[name] = _one(gradient.redistribute(placements=[Replicate()] * mesh.ndim).to_local())
    results.append(result)
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result.outputs)


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
    return (x.reconcile() if hasattr(x, "reconcile") else x).detach()
