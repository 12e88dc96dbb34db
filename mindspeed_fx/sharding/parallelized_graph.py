"""From Dynamo's graph of a parallelized model to the local program and back: what the backend calls.

take_shown_calls   the calls that show parameters whole leave the graph: the placeholder itself stands for the whole
(capture and captured passes, ``constrain`` among them, run on what is then a single-device graph)
localize    that graph on DTensors becomes a graph of local tensors for AOTAutograd; DTensor arguments become local
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Iterator, Sequence

import torch
import torch.fx as fx

from mindspeed_fx.compat import distributed, fx_graph, symbols
from mindspeed_fx.compat import tracing as tracing_compat
from mindspeed_fx.errors import OptionError
from mindspeed_fx.graph.annotate import bodies
from mindspeed_fx.graph.collectives import rename_groups
from mindspeed_fx.graph.op_sets import draws
from mindspeed_fx.graph.provenance import module_path
from mindspeed_fx.sharding.between_stages import RECEIVED, placements_between, placements_received
from mindspeed_fx.sharding.constraint import operands
from mindspeed_fx.sharding.expert_lists import reading_loops  # noqa: F401  the backend's
from mindspeed_fx.sharding.plan import ShardingError, parse_placement, placement_of
from mindspeed_fx.sharding.registry import SHOWN, WHOLE_INPUT


@dataclass(eq=False)
class ParallelizedGraph:
    """A sharding and the graph it was found in."""

    sharding: Any
    inputs: dict[str, str] = field(default_factory=dict)
    """Placeholder -> name of the parameter."""
    tied: dict[str, list[str]] = field(default_factory=dict)
    """The same of parameters that several modules have -> all names."""
    parts: dict[str, tuple[str, torch.Tensor]] = field(default_factory=dict)
    """Placeholder -> name of the model's argument of which a rank passes its part, and the whole of it (fake)."""
    prefix: str = ""
    """Path of the parallelized model in the compiled one, with a dot."""
    between: tuple[bool, bool] = (False, False)
    """Of a stage of a pipeline: whether it receives parts, and sends them (:mod:`between_stages`)."""
    groups: dict[str, str] = field(default_factory=dict)
    """Process group of a mesh dimension -> its second name."""
    program: Any = None
    """The local program, once there is one: its ``traffic`` is what its edges need."""

    @property
    def is_cacheable(self) -> bool:
        """Whether every process group has a name by which another start finds it."""
        return len(self.groups) == self.sharding.mesh.ndim

    def rename_groups(self, gm: fx.GraphModule) -> None:
        """Call the process groups of the mesh in ``gm`` by names that are alike on every rank and in every start
        (:func:`mindspeed_fx.compat.distributed.name_groups`), so that compile caches may know graphs by them."""
        rename_groups(gm, self.groups)

    @property
    def plan(self) -> Any:
        return self.sharding.plan

    @property
    def modules(self) -> list[str]:
        return self.sharding.modules


def take_shown_calls(gm: fx.GraphModule) -> ParallelizedGraph | None:
    """Take the whole-showing calls out of ``gm``, in place; None if it has none, and the model is not parallelized.

    Raises:
        ShardingError: parameters of two models, or one that is changed before its use.
    """
    numbers: set[int] = set()
    names: dict[str, list[str]] = {}
    parts: dict[str, tuple[str, torch.Tensor]] = {}
    prefixes: set[str] = set()
    for shown, source, key, path in _shown_calls(gm):
        number, _, name = key.partition(":")
        name, owner = name.lstrip("."), name.lstrip(".").rpartition(".")[0]
        numbers.add(int(number))
        if shown == WHOLE_INPUT:
            parts.setdefault(source.name, (name, source.meta["example_value"]))
            continue
        if source.op != "placeholder":
            raise ShardingError(f'parameter "{name}" was changed before its use; plans know parameters as they are')
        if name not in names.setdefault(source.name, []):
            names[source.name].append(name)
        if path.endswith(owner):
            prefixes.add(path[: len(path) - len(owner)])
    if not numbers:
        return None
    if len(numbers) > 1:
        raise ShardingError(
            "two models that were parallelized apart are compiled as one; call parallelize on a module that holds both"
        )
    from mindspeed_fx.sharding.registry import SHARDINGS

    first = {source: own[0] for source, own in names.items()}
    tied = {source: own for source, own in names.items() if len(own) > 1}
    return ParallelizedGraph(SHARDINGS[numbers.pop()], first, tied, parts, min(prefixes, key=len, default=""))


BETWEEN_GRAPHS = (RECEIVED, "stack")
"""Names of inputs that no caller passes: activations of a pipeline, and what is handed on behind a graph break."""


def _shown(n: fx.Node) -> str | None:
    """What ``n`` shows whole; None for other nodes."""
    return SHOWN.get(n.target) if n.op == "call_function" else None


def check_part(source: fx.Node, name: str) -> None:
    """Refuse an argument that is not the caller's tensor as it is, or that is read beside the model.

    Raises:
        ShardingError: with the argument's name.
    """
    way_out = 'compile the model alone, or pass the whole to every rank (inputs="whole")'
    if source.op != "placeholder":
        what = f"is computed in front of the model ({source.name})"
        raise ShardingError(
            f'argument "{name}" {what}; inputs="local" takes tensors as they come from outside; {way_out}'
        )
    if other := next((u for u in source.users if not _shown(u) and not tracing_compat.is_higher_order(u.target)), None):
        what = f"is read outside of the model too ({other.name})"
        raise ShardingError(f'argument "{name}" {what}, where it is this rank\'s part; with inputs="local" {way_out}')


def _shown_calls(gm: fx.GraphModule) -> Iterator[tuple[str, fx.Node, str, str]]:
    """What is called, input of ``gm``, key and module path, for every call that shows one whole, in it and in the
    graphs of its checkpointed regions; afterwards the inputs look whole.

    Raises:
        ShardingError: see :func:`check_part`.
    """
    calls = [n for n in gm.graph.nodes if _shown(n)]
    for n in calls:
        if _shown(n) == WHOLE_INPUT:
            check_part(n.args[0], n.args[1].partition(":")[2])
    for n in calls:
        _becomes(n.args[0], fx_graph.example_value_of(n))
        yield _shown(n), n.args[0], n.args[1], module_path(n)
        n.replace_all_uses_with(n.args[0])
        gm.graph.erase_node(n)
    for n in [n for n in gm.graph.nodes if n.op == "call_function" and tracing_compat.is_higher_order(n.target)]:
        for body, arg in operands(gm, n):
            for shown, source, key, path in _shown_calls(body):
                if isinstance(outer := arg.get(source), fx.Node):
                    if shown == WHOLE_INPUT:
                        check_part(outer, key.partition(":")[2])
                    _becomes(outer, source.meta["example_value"])
                    yield shown, outer, key, path
    gm.recompile()


def _becomes(node: fx.Node, whole: torch.Tensor) -> None:
    node.meta["example_value"] = whole.detach().requires_grad_(node.meta["example_value"].requires_grad)


def localize(
    gm: fx.GraphModule, inputs: Sequence[Any], result: ParallelizedGraph | None
) -> tuple[fx.GraphModule, list[Any], Callable[[Callable], Callable]]:
    """The local program as a graph, its example inputs, and what makes a compiled program take the original arguments;
    everything as it is without a sharding.

    Raises:
        ShardingError: symbolic sizes, or an input that cannot be divided as the plan says.
    """
    if result is None:
        return gm, list(inputs), lambda compiled: compiled
    from torch.distributed.tensor import DTensor

    from mindspeed_fx.compat import dtensor, graph_inputs
    from mindspeed_fx.sharding.inputs import InputCheck, comparison_of, is_cut_outside, own_part
    from mindspeed_fx.sharding.local_call import LocalCall, Outside
    from mindspeed_fx.sharding.spmd.program import Program

    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    seen = [_of_changing_size(n, x) for n, x in zip(placeholders, inputs, strict=True)]
    values = [_value(n, x, result) for n, x in zip(placeholders, seen)]
    random_call = next((n for graph in (gm, *bodies(gm)) for n in graph.graph.nodes if draws(n)), None)
    comparison = comparison_of(arguments_of(placeholders, seen, values, result), seen, random_call)
    check = InputCheck(result.sharding, comparison)
    mesh = result.sharding.mesh
    cuts = {i: v for i, (n, x, v) in enumerate(zip(placeholders, seen, values)) if is_cut_outside(n, x, v, result)}
    values = [replace(v, part=True) if i in cuts else v for i, v in enumerate(values)]
    program = result.program = Program(gm, result.plan, mesh, values, hands_on=result.between[1])
    result.groups = distributed.name_groups(mesh)
    program.place = f"{distributed.mesh_text(mesh)} {mesh.get_coordinate()} {result.between}"
    parts = [
        x.to_local() if isinstance(x, DTensor) else own_part(x, cuts[i].placements, mesh) if i in cuts else None
        for i, x in enumerate(seen)
    ]
    parts = graph_inputs.of_fixed_sizes(gm, parts)
    local = [x if part is None else part.requires_grad_(x.requires_grad) for x, part in zip(inputs, parts)]

    outside = Outside(comparison, {i: tuple(value.placements) for i, value in cuts.items()})

    def wrap(compiled: Callable) -> Callable:
        return LocalCall(outside, check, compiled, result.is_cacheable)

    return dtensor.as_graph(program, gm), local, wrap


def _of_changing_size(node: fx.Node, x: Any) -> Any:
    """``x``, or, where sizes of it are symbols, the fake tensor that has them."""
    fake = node.meta.get("example_value")
    sizes = (*fake.shape, *fake.stride()) if isinstance(fake, torch.Tensor) else ()
    return fake if any(isinstance(n, torch.SymInt) for n in sizes) else x


def check_options(options: Any) -> None:
    """Refuse what a plan does otherwise.

    Raises:
        OptionError: with the option.
    """
    if options.data_parallel:
        raise OptionError(
            f'option "data_parallel" is "{options.data_parallel}", and the model is parallelized: its plan reduces '
            "gradients"
        )
    if options.optimizer:
        raise OptionError(
            'option "optimizer" is "backward", and the model is parallelized: its parameters are parts, which '
            "torch.optim.AdamW steps"
        )


@contextlib.contextmanager
def tracing(result: ParallelizedGraph | None) -> Iterator[None]:
    """AOTAutograd traces a local program within, forward and backward; nothing without a sharding.

    Raises:
        ShardingError: an operator that cannot be computed in parts, with module and line.
    """
    if result is None:
        yield
        return
    from mindspeed_fx.compat import dtensor, sharding_shapes
    from mindspeed_fx.sharding.spmd.program import differentiating

    with (
        dtensor.plain_tensors_as_replicated(),
        sharding_shapes.untraced(),
        symbols.equal_sizes_once(),
        differentiating(lambda: result.program),
    ):
        yield


def _value(node: fx.Node, x: Any, result: ParallelizedGraph) -> Any:
    """How the program takes one input."""
    if not isinstance(x, torch.Tensor):
        return None
    if node.name in result.inputs:
        return parameter_value(x, result.inputs[node.name])
    if node.name.startswith(RECEIVED) and (value := received_value(node, result)) is not None:
        return value
    if tracing_compat.wraps_tensors(x):
        what = f'input "{argument_name(node)}" is a {type(x).__name__}'
        raise ShardingError(f'{what}; pass the whole tensor, or, with parallelize(..., inputs="local"), its to_local()')
    return (
        part_value(x, *result.parts[node.name], result) if node.name in result.parts else input_value(node, x, result)
    )


def parameter_value(x: Any, name: str = "") -> Any:
    """A parameter: its own placements."""
    from mindspeed_fx.sharding.spmd.program_inputs import Value

    return Value(tuple(x.placements), x.shape, x.stride(), True, name)


def received_value(node: fx.Node, result: ParallelizedGraph) -> Any:
    """What the stage before sends in parts; None where it sends the whole."""
    from mindspeed_fx.sharding.spmd.program_inputs import Value

    whole = fx_graph.example_value_of(node)
    mesh = result.sharding.mesh
    placements = placements_between(result.plan, mesh, whole.shape) if result.between[0] else None
    if placements is None:
        return None
    read = placements_received(result.plan, mesh, placements)
    return Value(placements, whole.shape, whole.stride(), False, node.name, part=True, read=read)


def part_value(x: torch.Tensor, name: str, whole: torch.Tensor, result: ParallelizedGraph) -> Any:
    """An argument of which each rank passes its part: placed as the plan says."""
    from mindspeed_fx.sharding.inputs import argument_placements
    from mindspeed_fx.sharding.spmd.program_inputs import Value

    return Value(argument_placements(result.sharding, name, x), whole.shape, whole.stride(), False, name, part=True)


def arguments_of(
    placeholders: list[fx.Node], inputs: Sequence[Any], values: list[Any], result: ParallelizedGraph
) -> list[Any]:
    """The tensors among the inputs of a graph that callers of the model pass."""
    from torch.distributed.tensor import Replicate

    from mindspeed_fx.sharding.inputs import Argument

    whole, arguments = (Replicate(),) * result.sharding.mesh.ndim, []
    for i, (n, _x, value) in enumerate(zip(placeholders, inputs, values, strict=True)):
        if value is None or value.parameter or (not value.part and argument_name(n) is None):
            continue
        arguments.append(Argument(i, value.name or argument_name(n), value.placements if value.part else whole))
    return [a for a in arguments if not a.name.startswith(BETWEEN_GRAPHS)]


def input_value(node: fx.Node, x: torch.Tensor, result: ParallelizedGraph) -> Any:
    """An argument of the model, or a buffer: whole, and divided as the plan says."""
    from mindspeed_fx.sharding.spmd.kept_whole import evenly_divided
    from mindspeed_fx.sharding.spmd.padded import can_be_padded
    from mindspeed_fx.sharding.spmd.program_inputs import Value
    from mindspeed_fx.sharding.spmd.redistribute import even, placements_of

    name = argument_name(node)
    placed = {} if name is None else placement_of(result.plan.inputs, name, "input")
    where = f'plan "{result.plan.name}", input "{name}" of shape {tuple(x.shape)}'
    mesh, kept = result.sharding.mesh, ""
    try:
        placements = placements_of(placed, mesh, x.ndim, where)
        even(x.shape, placements, mesh, where)
    except ShardingError as error:
        if not result.plan.keep_whole:
            raise
        possible = {d: w for d, w in placed.items() if (parse_placement(w, where) or 0) < x.ndim}
        placements = placements_of(possible, mesh, x.ndim, where)
        if len(possible) < len(placed) or not can_be_padded(x.shape, placements):
            kept, placements = str(error), evenly_divided(x.shape, placements, mesh)
    return Value(placements, x.shape, x.stride(), False, name or "", kept=kept)


def argument_name(node: fx.Node) -> str | None:
    """Name of the model's argument that a placeholder is, ``args_0`` for a positional one; None for a buffer, and for a
    tensor that the model reads from its attributes or from globals, which no plan speaks of."""
    if re.search(r"_(buffers|parameters)_|_modules_|^(l_self|g)_", node.name.lower()):
        return None
    return re.sub(r"^l_(kwargs_)?|_$", "", node.name.lower()).strip("_")
