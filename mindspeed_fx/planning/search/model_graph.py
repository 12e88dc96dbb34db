"""From a model to its captured, fused graph, without running it: parameters may be on the meta device, of any size."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Sequence

import torch
import torch.fx as fx
from torch import nn
from torch.utils import _pytree as pytree

from mindspeed_fx.capture.chosen_rows import ChosenRowsError
from mindspeed_fx.compat import fake, symbols, tracing
from mindspeed_fx.graph.edit import move_to
from mindspeed_fx.graph.functional_writes import make_writes_functional
from mindspeed_fx.graph.provenance import module_path
from mindspeed_fx.options import Options
from mindspeed_fx.planning.layer_lists import layers_of
from mindspeed_fx.planning.search.layer_dedup import Repetition, repetition
from mindspeed_fx.planning.search.problem import NotRepeated, Problem
from mindspeed_fx.planning.search.problem_builder import build_problem
from mindspeed_fx.planning.search.traced_plan import Traced
from mindspeed_fx.planning.split_stages import why_no_stages
from mindspeed_fx.report.source import source_line
from mindspeed_fx.sharding.expert_lists import kept_in_one_graph
from mindspeed_fx.sharding.plan import ShardingError

STACKED = "a mixture as a loop over its experts can be planned as grouped products of stacked weights [experts, ., .]"
BY_NAME = "give parallelize a plan by name, which takes several graphs"
UNFUSED = ("fusion.add_rms_norm", "fusion.add_layer_norm")
"""They join the end of a layer with the beginning of the next, and the search wants layers whole."""

FUSED = ("fusion.moe_permute",)
"""Whatever it costs on cpu: the search knows how tokens go to experts by this operator."""


class _Seen(Exception):
    """Ends the run of the traced model before it starts."""


def trace_model(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], stages: int = 1) -> Problem:
    """The search's view of ``model``: two of each kind of layer are traced, or all where that is no proof.

    Args:
        model: on any device, meta included; is not changed and not run.
        args, kwargs: of the model, of the whole batch; may be on the meta device.
        stages: of a pipeline, where their number is given, 0 where it is searched; layers that do not repeat are runs
            of one then.

    Raises:
        ShardingError: sizes that are data, with module and line; fewer layers than stages.
    """

    def traced(short: Repetition, named: Any = None) -> Problem:
        reasons: list[str] = []
        read = None if stages == 1 else lambda gm: reasons.append(why_no_stages(gm, short.model))
        problem = _problem(*capture_model(short.model, args, kwargs, named, read), short)
        problem.no_stages = "".join(reasons)
        return problem

    short = repetition(model)
    if short.runs:
        try:
            with fake.failures_unlogged():
                return traced(short, contextlib.nullcontext())
        except NotRepeated as e:
            why = str(e)
        except (IndexError, KeyError, torch._dynamo.exc.TorchDynamoException, symbols.undecided_by_data()) as e:
            why = f"the model does not run with fewer layers ({str(e).splitlines()[0] if str(e) else type(e).__name__})"
        notes = [*short.notes, f"every layer was traced and is planned by itself: {why}"]
        short = Repetition(model, notes=notes)
    short.runs = _single_layers(model, stages)
    try:
        return traced(short)
    except NotRepeated as e:
        if stages:
            raise ShardingError(f"pp={stages}: {e}") from None
    short.runs = []
    return traced(short)


def _single_layers(model: nn.Module, stages: int) -> list[tuple[list[str], list[str]]]:
    """Each layer that stages are made of as a run of its own; none without stages, and, where their number is searched,
    without layers."""
    if stages == 1:
        return []
    try:
        lists = layers_of(model, stages or 2)
    except ShardingError:
        if stages:
            raise
        return []
    names = [f"{path}.{i}".lstrip(".") for path, count in lists for i in range(count)]
    return [([name], [name]) for name in names]


def _problem(gm: fx.GraphModule, names: list[str | None], repeated: Repetition) -> Problem:
    problem = build_problem(gm, names, repeated.model, repeated)
    problem.traced = Traced(gm, names, repeated)
    return problem


def capture_model(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    named: Any = None,
    read: Callable[[fx.GraphModule], None] | None = None,
) -> tuple[fx.GraphModule, list[str | None]]:
    """The graph of ``model``, as it would be on cpu, and the names of its inputs; a break is told within ``named``, and
    ``read`` gets Dynamo's graph as it is."""
    from mindspeed_fx.backend import Compilation

    results: list[fx.GraphModule] = []
    wrong: list[str] = []
    names: list[list[str | None]] = []
    parameters = {id(p): n for n, p in model.named_parameters(remove_duplicate=False)}
    buffers = {id(b) for b in model.buffers()}

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable:
        options = Options.parse({"disable": list(UNFUSED), "enable": list(FUSED)})
        if read is not None:
            read(gm)
        try:
            if reason := Compilation(options.resolve("cpu")).capture(gm):
                wrong.append(f"{reason}, so that no plan can be searched for it")
        except ChosenRowsError as e:
            wrong.append(f"a loop over a list of experts cannot be read: {e}; {STACKED}")
        for n in gm.graph.nodes:
            if n.op == "placeholder" and "example_value" in n.meta:
                n.meta.setdefault("val", n.meta["example_value"])
            if any(
                isinstance(size, torch.SymInt)
                for t in pytree.tree_leaves(n.meta.get("val"))
                if isinstance(t, torch.Tensor)
                for size in t.shape
            ):
                wrong.append(
                    f'module "{module_path(n)}", {source_line(n)}: the sizes of {n.target} are data, and a search '
                    f"needs fixed ones; {STACKED}"
                )
        make_writes_functional(gm)
        move_to(gm, "cpu")
        results.append(gm)

        def run(*args: Any) -> Any:
            names.append([parameters.get(id(x), "" if id(x) in buffers else None) for x in args])
            raise _Seen

        return run

    torch._dynamo.reset()  # a graph of this code with other sizes would make Dynamo's sizes symbols
    try:
        one_graph = named or tracing.in_one_graph(ShardingError, "plan", BY_NAME)
        with torch.enable_grad(), one_graph, kept_in_one_graph(model):
            torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(*args, **kwargs)
    except _Seen:
        pass
    finally:
        torch._dynamo.reset()
    if wrong:
        raise ShardingError(wrong[0])
    if not results or not names:
        raise ShardingError(
            f"plan: {type(model).__name__} computes no tensor from its arguments and parameters; a training step that "
            "returns its loss is expected"
        )
    return results[0], names[0]
