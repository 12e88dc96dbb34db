"""A plan tried on fake ranks before it is returned: the program of one rank is made, forward and backward, on tensors
without storage, of two layers of each kind; nothing is computed and no process group is needed."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any, Sequence

import torch
import torch.fx as fx
from torch import nn

from mindspeed_fx.compat import dtensor, tracing
from mindspeed_fx.errors import OptionError
from mindspeed_fx.options import Options
from mindspeed_fx.passes.base import Context
from mindspeed_fx.passes.sharding.constraint import place_edges
from mindspeed_fx.passes.sharding.token_dispatch import dispatch_tokens
from mindspeed_fx.planning.search.layer_dedup import Repetition
from mindspeed_fx.sharding.parallelize import parameter_placements
from mindspeed_fx.sharding.parallelized_graph import ParallelizedGraph, input_value
from mindspeed_fx.sharding.patterns import matching, of_operator
from mindspeed_fx.sharding.plan import Plan, placement_of
from mindspeed_fx.sharding.plan_names import names_of_parameters
from mindspeed_fx.sharding.registry import Sharding

PIPELINE = "pp"
"""Stages have this plan's layers; how they are cut is no part of the trace."""


@dataclass
class Traced:
    """A captured graph with two layers of each kind, as the search read it."""

    gm: fx.GraphModule
    names: list[str | None]
    """Of each input the parameter that it is; "" for a buffer, None for an argument."""
    repeated: Repetition


def find_failure(traced: Traced, plan: Plan, sizes: dict[str, int]) -> str | None:
    """Why no rank can make its program of ``plan``, in one line; None: it can.

    Args:
        sizes: mesh dimension -> ranks, outermost first.
    """
    sizes = {d: n for d, n in sizes.items() if d != PIPELINE} or {"dp": 1}
    try:
        with dtensor.one_of_fake_ranks(sizes) as mesh:
            _trace(copy.deepcopy(traced.gm), traced, _shortened(plan, traced, tuple(sizes)), mesh)
    except OptionError as error:
        return str(error).splitlines()[0]
    except Exception as error:  # noqa: BLE001  whatever stops the trace stops the program
        line = next(iter(str(error).strip().splitlines()), "")
        return f"{type(error).__name__}: {line}"
    return None


def _shortened(plan: Plan, traced: Traced, mesh: tuple[str, ...]) -> Plan:
    """``plan`` for the model that was traced, whose layers have other numbers, without pipeline stages."""
    whole = traced.repeated.whole_name
    parameters = {n: placement_of(plan.parameters, whole(n), "parameter") for n in traced.names if n}
    modules, operators = {}, {p: edge for p, edge in plan.operators.items() if not of_operator(p)[0]}
    for name, _ in traced.repeated.model.named_modules():
        for pattern, edge in plan.modules.items():
            if matching([pattern], whole(name)):
                modules[name] = edge
        for pattern, edge in plan.operators.items():
            module, called = of_operator(pattern)
            if module and matching([module], whole(name)):
                operators[f"{name}/{called}"] = edge
    patterns = plan.experts.get("parameters", ())
    experts = [n for n in parameters if placement_of(dict.fromkeys(patterns, {"": "R"}), whole(n), "parameter")]
    return Plan(
        plan.name,
        mesh,
        {n: placed for n, placed in parameters.items() if placed},
        inputs=plan.inputs,
        modules=modules,
        operators=operators,
        gather=plan.gather,
        rings=plan.rings,
        experts={**plan.experts, **({"parameters": experts} if patterns else {})},
        keep_whole=plan.keep_whole,
    )


def _trace(gm: fx.GraphModule, traced: Traced, plan: Plan, mesh: Any) -> None:
    from mindspeed_fx.sharding.spmd.program import differentiating

    inputs = [n.meta.get("val") for n in gm.graph.nodes if n.op == "placeholder"]
    program, values = local_program(gm, traced.names, traced.repeated.model, plan, mesh)
    fakes = tracing.new_fake_mode(unknown_sizes=True)
    with fakes, dtensor.plain_tensors_as_replicated():
        results = program(*(local_input(x, v, mesh) for x, v in zip(inputs, values)))
        tensors = [x for x in torch.utils._pytree.tree_leaves(results) if isinstance(x, torch.Tensor)]
        losses = [x for x in tensors if x.requires_grad]
        with differentiating(lambda: program):
            torch.autograd.backward([x.sum() for x in losses])


def local_program(
    gm: fx.GraphModule, names: Sequence[str | None], model: nn.Module, plan: Plan, mesh: Any
) -> tuple[Any, list[Any]]:
    """The program of one rank, made of ``gm``, which is changed, and how it takes each of its inputs.

    Args:
        names: of each input the parameter that it is; "" for a buffer, None for an argument.
    """
    from mindspeed_fx.sharding.spmd.program import Program, Value

    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    inputs = {n.name: name for n, name in zip(placeholders, names, strict=True) if name}
    every = names_of_parameters(model)
    tied = {n: every[name] for n, name in inputs.items() if len(every[name]) > 1}
    hit = ParallelizedGraph(Sharding(plan, mesh, [n for n, _ in model.named_modules()]), inputs, tied)
    context = Context(Options.parse(None).resolve("cpu"), "captured", sharding=hit)
    place_edges(gm, context)
    dispatch_tokens(gm, context)
    values: list[Any] = []
    for n in placeholders:
        x = n.meta.get("val")
        if not isinstance(x, torch.Tensor):
            values.append(None)
        elif n.name in inputs:
            placements = parameter_placements(plan, mesh, inputs[n.name], x)
            values.append(Value(placements, x.shape, x.stride(), True, inputs[n.name]))
        else:
            values.append(input_value(n, x, hit))
    return Program(gm, plan, mesh, values), values


def local_input(x: Any, value: Any, mesh: Any) -> Any:
    """What one rank is given of the input ``x``: its part of a parameter, an argument whole."""
    if value is None:
        return x
    shape = list(x.shape)
    for i, p in enumerate(value.placements if value.parameter else ()):
        if dtensor.is_divided(p):
            shape[p.dim] = -(-shape[p.dim] // mesh.size(i))  # the first rank has the largest part
    if math.prod(shape) and tuple(shape) == tuple(x.shape):
        local = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
    else:
        local = torch.empty(shape, dtype=x.dtype)
    return local.requires_grad_(x.is_floating_point() and value.parameter)
