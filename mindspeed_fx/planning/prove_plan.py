"""``prove_plan(model, mesh, plan, *args)``: that the local programs of all ranks are the whole program, in parts.

The program of every rank, forward and backward, is traced on tensors without storage, of the model's true sizes, and
walked beside that of the others. Each tensor is shown to be a part of one of the whole program, by rules that are not
those which made the local programs (:mod:`mindspeed_fx.sharding.audit.relations`). Nothing is computed.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator, Sequence

import torch
import torch.fx as fx
from torch import nn
from torch.utils import _pytree as pytree

from mindspeed_fx import arguments
from mindspeed_fx.compat import dtensor, tracing
from mindspeed_fx.garbage import without_collection
from mindspeed_fx.planning.search.model_graph import capture_model
from mindspeed_fx.planning.search.traced_plan import local_input, local_program
from mindspeed_fx.sharding.audit.relations.compare import Failed, Result, compare_part, divided, whole_inputs
from mindspeed_fx.sharding.audit.relations.parts import Part, Terms
from mindspeed_fx.sharding.audit.relations.walk import Programs, Walk
from mindspeed_fx.sharding.parallelize import check_mesh, plan_for, unmatched_patterns
from mindspeed_fx.sharding.plan import Plan


@dataclass
class ShardedProof:
    """What was shown of each result and each gradient."""

    plan: str
    ranks: int
    results: list[Result] = field(default_factory=list)
    operators: int = 0
    """Of a rank's program, forward and backward."""

    @property
    def proved(self) -> bool:
        return all(r.state == "proved" for r in self.results)

    def __str__(self) -> str:
        done = sum(r.state == "proved" for r in self.results)
        lines = [f'plan "{self.plan}" on {self.ranks} ranks: {done} of {len(self.results)} results proved']
        return "\n".join([*lines, *(f"  {r.state}: {r.name}: {r.reason}" for r in self.results if r.state != "proved")])


def prove_plan(
    model: nn.Module,
    mesh: dict[str, int],
    plan: Plan | str,
    *args: Any,
    edit: Callable[[int, fx.Graph], None] | None = None,
    **kwargs: Any,
) -> ShardedProof:
    """Whether every rank's program of ``plan``, forward and backward, is the model in parts.

    Args:
        model: whole, on any device, meta included; returns tensors, of which the gradients are taken. Not changed.
        mesh: dimension -> number of ranks, outermost first.
        plan: a plan, or the name of one.
        args, kwargs: of the model, whole, on its device.
        edit: called with each rank and its program before it is looked at: for tests that plant a fault.

    Returns:
        For every output, and for the gradient of every parameter and floating argument, "proved"; "wrong", with the
        operator where a rank's value is no part of the whole one; or "unknown", with the operator that has no rule.

    Raises:
        ShardingError: the plan does not fit the model or the mesh, or the model breaks into several graphs.
        RuntimeError: a process group exists already.
    """
    arguments.check_module("prove_plan", model)
    arguments.check_sizes("prove_plan", mesh)
    arguments.check_call("prove_plan", args, kwargs, model)
    plan = plan_for("prove_plan", plan, model)
    check_mesh(plan, tuple(mesh))
    unmatched_patterns(model, plan)
    gm, names = capture_model(model, args, kwargs)
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    vals = [n.meta.get("val") for n in placeholders]
    inputs = [torch.empty_like(v, device="cpu") if isinstance(v, torch.Tensor) else v for v in vals]
    whole, _ = _joint(gm, inputs, None)
    graphs: list[fx.Graph] = []
    values: list[Any] = []
    kinds = None
    with torch.device("cpu"), dtensor.one_of_fake_ranks(mesh) as device_mesh:  # whatever the caller's default is
        groups = {device_mesh.get_group(d).group_name: d for d in mesh}
        for rank, coordinate in enumerate(itertools.product(*(range(n) for n in mesh.values()))):
            with dtensor.placed_at(device_mesh, coordinate):
                program, values = local_program(copy.deepcopy(gm), names, model, plan, device_mesh)
                local = [local_input(v, value, device_mesh) for v, value in zip(vals, values)]
                with without_collection():
                    graph, kinds = _joint(program, local, program, kinds)
                graphs.append(graph)
            if edit is not None:
                edit(rank, graphs[-1])
    with torch.device("cpu"), torch.no_grad(), without_collection():
        return _compared(plan.name, mesh, whole, graphs, groups, placeholders, values)


class _OtherResults(Exception):
    """The results of a rank have other shapes than those of the rank before it."""


Kinds = list[tuple[torch.Size, torch.dtype]]


def _joint(program: Any, inputs: Sequence[Any], local: Any, kinds: Kinds | None = None) -> tuple[fx.Graph, Kinds]:
    """Forward and backward: the inputs and one gradient for each floating result -> results, then gradients. And the
    shapes and types of those gradients; ``kinds`` are those of another rank, which spare a run where they are the same.
    """
    from mindspeed_fx.sharding.spmd.program import differentiating

    leaves = [isinstance(x, torch.Tensor) and x.is_floating_point() for x in inputs]
    fakes = tracing.new_fake_mode(unknown_sizes=True)

    def results_of(args: Sequence[Any]) -> list[torch.Tensor]:
        results = pytree.tree_leaves(program(*args))
        return [r for r in results if isinstance(r, torch.Tensor)]

    def kinds_of(results: Sequence[torch.Tensor]) -> Kinds:
        return [(r.shape, r.dtype) for r in results if r.requires_grad]

    def joint(*args: Any) -> list[Any]:
        with torch.enable_grad(), differentiating(lambda: local):
            own = [x.detach().requires_grad_() if leaf else x for x, leaf in zip(args[: len(leaves)], leaves)]
            results = results_of(own)
            starts = [r for r in results if r.requires_grad]
            if kinds_of(starts) != kinds:
                raise _OtherResults
            wanted = [x for x, leaf in zip(own, leaves) if leaf]
            gradients = torch.autograd.grad(starts, wanted, list(args[len(leaves) :]), allow_unused=True)
        return [*results, *gradients]

    with dtensor.plain_tensors_as_replicated() if local is not None else fakes:
        with fakes, torch.enable_grad():
            args = [torch.empty(x.shape, dtype=x.dtype) if isinstance(x, torch.Tensor) else x for x in inputs]
            if kinds is None:
                with tracing.symbols_given_up(fakes, on_error=False):
                    kinds = kinds_of(results_of([x.requires_grad_() if leaf else x for x, leaf in zip(args, leaves)]))
                args = [x.detach() if isinstance(x, torch.Tensor) else x for x in args]
            starts = [torch.empty(shape, dtype=dtype) for shape, dtype in kinds]
            try:
                return tracing.make_fx_decomposed(joint, [*args, *starts], None).graph, kinds
            except _OtherResults:
                pass
    return _joint(program, inputs, local)


def _compared(
    plan: str,
    mesh: dict[str, int],
    whole: fx.Graph,
    graphs: Sequence[fx.Graph],
    groups: dict[str, str],
    placeholders: Sequence[fx.Node],
    values: Sequence[Any],
) -> ShardedProof:
    terms = Terms(dict(mesh))
    shapes = [tuple(n.meta["val"].shape) for n in whole.nodes if n.op == "placeholder"]
    starts = [f"gradient of result {i}" for i in range(len(shapes) - len(placeholders))]
    inputs = whole_inputs(terms, [*(n.name for n in placeholders), *starts], shapes)
    alone = Walk(terms, Programs([whole], {}, {}, {}))
    expected = alone.run(inputs)
    terms.known = {p.arranged for p in _parts(alone.values)}
    coordinates = list(itertools.product(*(range(n) for n in mesh.values())))
    places = {m: tuple(c[i] for c in coordinates) for i, m in enumerate(mesh)}
    at_rest = [divided(x, _placed(v, mesh), mesh) for x, v in zip(inputs, values)]
    walk = Walk(terms, Programs(graphs, places, groups, dict(mesh)))
    parts = walk.run([*at_rest, *inputs[len(placeholders) :]])
    floats = [i for i, n in enumerate(placeholders) if n.meta["val"].is_floating_point()]
    results = len(expected) - len(floats)
    proof = ShardedProof(plan, len(graphs), operators=sum(n.op == "call_function" for n in graphs[0].nodes))
    for i, (part, own) in enumerate(zip(parts, expected, strict=True)):
        rest = None if i < results else floats[i - results]
        name = f"result {i}" if rest is None else f'gradient of "{values[rest].name}"'
        target = None
        if rest is not None and isinstance(own, Part):
            target = divided(own, _placed(values[rest], mesh), mesh)
        proof.results.append(compare_part(name, part, own, target))
    return proof


def _placed(value: Any, mesh: dict[str, int]) -> list[tuple[str, int]]:
    """(mesh dimension, tensor dimension) of what a rank holds at rest; arguments come whole."""
    if value is None or not value.parameter:
        return []
    return [(m, p.dim) for m, p in zip(mesh, value.placements) if dtensor.is_divided(p)]


def _parts(values: Any) -> Iterator[Part]:
    for x in values:
        if isinstance(x, Part):
            yield x
        elif isinstance(x, (list, tuple)) and not isinstance(x, Failed):
            yield from _parts(x)
