"""``mindspeed_fx.explain(model, *args)``: compile, run once forward and backward, and say what happened."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import html
import json
import pathlib
import time
from typing import Any, Callable, Iterator, Sequence

import torch
from torch.utils import _pytree as pytree

from mindspeed_fx import arguments
from mindspeed_fx.passes.runner import by_family
from mindspeed_fx.report import recorder, summary, terminal
from mindspeed_fx.report.gains import Gain, gains
from mindspeed_fx.report.measured import Measured
from mindspeed_fx.report.modelled import Modelled
from mindspeed_fx.report.records import GraphRecord, Site, Skip


class Report:
    """What the compiler did to a model.

    Attributes:
        graphs: one record for each Dynamo graph.
        break_reasons: why the model fell apart into several graphs, one text for each break, with the line of code.
        measured: what the step and its kernels took, with ``measure=True``; else None.
    """

    def __init__(self, graphs: list[GraphRecord], break_reasons: list[str], measured: Measured | None = None):
        self.graphs, self.break_reasons, self.measured = graphs, break_reasons, measured

    @property
    def graph_count(self) -> int:
        return len(self.graphs)

    @property
    def counts(self) -> dict[str, int]:
        """Pass name -> rewrites, over all graphs."""
        totals: dict[str, int] = {}
        for graph in self.graphs:
            for name, count in graph.counts.items():
                totals[name] = totals.get(name, 0) + count
        return totals

    @property
    def effective_options(self) -> dict[str, Any]:
        """What was in force after all gating; {} when nothing was compiled."""
        return self.graphs[0].effective if self.graphs else {}

    @property
    def cost(self) -> Modelled:
        """What every graph costs on the hardware of the options, before and after the passes: modelled, not
        measured.
        """
        return Modelled(self.graphs)

    def sites(self, name: str) -> list[Site]:
        """The rewrites of one pass, in the order of the graph.

        Raises:
            KeyError: no pass of that name ran; the message has the nearest name.
        """
        return [s for run in self._runs(name) for s in run.report.rewrites]

    def skipped(self, name: str) -> list[Skip]:
        """The near misses of one pass; KeyError as :meth:`sites`."""
        return [s for run in self._runs(name) for s in run.report.skipped]

    @property
    def pareto(self) -> list[list[tuple[float, int]]]:
        """For every graph (modelled seconds of the step, modelled peak bytes) of the plans that no other beats in both,
        fastest first; [] for a graph that was not planned for a memory budget."""
        return [[point for run in g.runs for point in run.report.pareto] for g in self.graphs]

    @property
    def gains(self) -> list[Gain]:
        """What was left and what a change there would gain, modelled, the largest first; of a fusion a bound, see
        :mod:`mindspeed_fx.report.gains`."""
        return gains(self.graphs)

    def save(self, directory: str) -> pathlib.Path:
        """Write the same files as ``options["dump"]``, in place of an earlier dump's; returns the directory."""
        from mindspeed_fx.report import dump

        for rank in {graph.rank for graph in self.graphs}:
            dump.clear(directory, rank)
        for graph in self.graphs:
            dump.write(graph, directory)
        return pathlib.Path(directory)

    def to_json(self) -> str:
        """Everything but the code."""
        return json.dumps(self.to_dict(), indent=1, default=str)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the code, as values that JSON has or that have a text."""
        from mindspeed_fx.report.metadata import metadata

        return {
            "graph_count": self.graph_count,
            "break_reasons": self.break_reasons,
            "counts": self.counts,
            "gains": [dataclasses.asdict(gain) for gain in self.gains],
            "measured": None if self.measured is None else dataclasses.asdict(self.measured),
            "graphs": [metadata(g) for g in self.graphs],
        }

    def ask(self, question: str, argument: Any = None, memory: Any = None) -> str:
        """The answer to one of ten questions, as text; docs/questions.md has them all.

        Args:
            question: "unfused", "peak", "exposed", "rank", "node", "level", "bought", "step1", "batch" or
                "approximated".
            argument: what the question is about: a kind of layer, a rank, a node, a level, a family, a batch.
            memory: of the device, for "batch": bytes, or a size as in "24GiB"; None: what the hardware's table has.

        Raises:
            OptionError: no such question, or an argument that it does not take; the message has the nearest.
        """
        from mindspeed_fx.report.answers import ask, source

        size = None if memory is None else arguments.parse_bytes("memory", memory)
        graphs = source.of_records(self.graphs, size)
        return ask.answer_text(graphs, question, None if argument is None else str(argument))

    def __str__(self) -> str:
        return summary.text(self)

    def __rich__(self) -> Any:
        """For ``rich.print``: with colours."""
        return terminal.highlighted(str(self))

    @property
    def idle(self) -> dict[str, list[str]]:
        """Passes that had nothing to do, each with the reasons that it gave."""
        return summary.idle_passes(self)

    def _repr_html_(self) -> str:
        """For notebooks."""
        return f"<pre>{html.escape(str(self))}</pre>"

    def _runs(self, name: str) -> list[Any]:
        from mindspeed_fx.errors import nearest

        ran = {run.report.name for g in self.graphs for run in g.runs}
        if name not in ran:
            raise KeyError(f'no pass "{name}" ran{nearest(name, ran)}; ran: {by_family(sorted(ran))}')
        return [run for g in self.graphs for run in g.runs if run.report.name == name]


def explain(
    model: Callable,
    *args: Any,
    options: dict[str, Any] | None = None,
    measure: bool = False,
    what_if: bool | Sequence[str] = False,
    **kwargs: Any,
) -> Report:
    """Compile ``model``, run it once forward and (if an output needs a gradient) backward, and report.

    Gradients, buffers and random-number state are as before afterwards. Compile caches are off, since a hit runs no
    pass.

    Args:
        model: module or function.
        args, kwargs: its inputs.
        options: as for ``torch.compile(model, backend="mindspeed", options=...)``.
        measure: also time the step on the device of the inputs, whole and compiled once more without each family of
            rewrites that did something, and by kernel with torch.profiler: ``report.measured``. Takes a compilation for
            each family and about ten seconds of steps. Of several ranks all must call.

        what_if: also model the step otherwise, on fake tensors and without generating code: ``True`` at the other
            levels, without each family of rewrites that did something, and with two, four and eight times the batch; or
            a list of such forms: ``["level 1", "without norms", "batch 8"]``.

    Raises:
        OptionError: a bad option. Errors of the model and of the compiler pass through.
        ArgumentError: args and kwargs that the model does not take; an unknown form of the step; ``measure`` with
            tensors that are fake or on the meta device, with the kernels of another device, or with parameters that
            step in the backward.
    """
    from mindspeed_fx import torch_compile
    from mindspeed_fx.backend import mindspeed
    from mindspeed_fx.compat import dynamo, inductor
    from mindspeed_fx.options import Options

    arguments.check_callable("explain", "model", model)
    arguments.check_call("explain", args, kwargs, model)
    arguments.check_options("explain", options)
    arguments.check_bool("explain", "measure", measure)
    forms = _forms(what_if)
    parsed = Options.parse(options)  # a bad option is an error of its own, not one inside a compilation
    args, kwargs = _without_history((args, kwargs))
    state = _State(model, (args, kwargs))
    if measure:
        from mindspeed_fx.planning import measure as measuring

        measuring.check_measurable(state.tensors, parsed)
    # Dynamo keeps what it compiled for a backend; one of its own makes it compile even a model that was compiled
    # before.
    backend = lambda gm, inputs: mindspeed(gm, inputs, options=options)  # noqa: E731
    step = functools.partial(run_step, args=args, kwargs=kwargs)
    with dynamo.recompiling(), state.restored():
        with (
            recorder.collecting() as graphs,
            dynamo.collecting_graph_breaks() as breaks,
            inductor.kernels_by_node() if measure else contextlib.nullcontext(),
        ):
            compiled = torch_compile.compile_with_backend(dynamo.fresh_callable(model), backend=backend)
            start = time.perf_counter()
            step(compiled)
        report = Report(list(graphs), list(breaks))
        for graph in report.graphs[:1]:
            graph.seconds["first step"] = time.perf_counter() - start
        if forms is not None:
            from mindspeed_fx.planning import what_if as modelling

            result = modelling.what_if(model, args, kwargs, run_step, options, forms, report.graphs)
            for graph in report.graphs:
                graph.what_if = result
        if measure:
            device = measuring.device_of(state.tensors)
            report.measured = measuring.measure_step(
                model, step, state.drop_gradients, compiled, report.graphs, options, device
            )
            for graph in report.graphs:
                graph.measured = report.measured
    return report


def _forms(what_if: Any) -> list[str] | None:
    """The forms of the step that are asked for; None for none, [] for all."""
    from mindspeed_fx.planning.what_if import parse_form

    if isinstance(what_if, bool):
        return [] if what_if else None
    if not isinstance(what_if, (list, tuple)):
        arguments.refuse(
            "explain", "what_if", what_if, 'True, False, or a list as in ["level 1", "batch 8"] is expected'
        )
    for text in what_if:
        parse_form(text)
    return list(what_if)


def run_step(model: Callable, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Runs forward and, where an output needs a gradient, backward; whether it did."""
    loss = loss_of(model(*args, **kwargs))
    if loss is not None:
        loss.backward()
    return loss is not None


def loss_of(outputs: Any) -> torch.Tensor | None:
    """A scalar to differentiate: the model's own ``loss``, else the sum of its floating-point outputs; None without
    gradient.
    """
    own = getattr(outputs, "loss", None)
    if isinstance(own, torch.Tensor) and own.requires_grad:
        return own.sum()
    tensors = [t for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.requires_grad]
    return sum(t.float().sum() for t in tensors) if tensors else None


def _without_history(inputs: Any) -> Any:
    """Inputs that were computed from others as copies that were computed from nothing of the caller's: the step's
    backward ends there."""
    copies: dict[int, torch.Tensor] = {}

    def copy(t: torch.Tensor) -> torch.Tensor:
        if t.is_leaf:
            return t
        return copies.setdefault(id(t), t.detach().requires_grad_().clone())

    return pytree.tree_map_only(torch.Tensor, copy, inputs)


class _State:
    """Gradients of parameters and inputs, and buffers: what a step changes.

    Attributes:
        tensors: inputs, parameters and buffers.
    """

    def __init__(self, model: Any, inputs: Any):
        module = model if isinstance(model, torch.nn.Module) else None
        own = [t for t in pytree.tree_leaves(inputs) if isinstance(t, torch.Tensor)]
        self.buffers = list(module.buffers()) if module is not None else []
        parameters = list(module.parameters()) if module is not None else []
        self.leaves = [*parameters, *(t for t in own if t.requires_grad and t.is_leaf)]
        self.tensors = [*own, *parameters, *self.buffers]

    def drop_gradients(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """As they were afterwards, and random-number states too."""
        grads = [leaf.grad for leaf in self.leaves]
        values = [b.detach().clone() for b in self.buffers]
        self.drop_gradients()
        with torch.random.fork_rng():
            try:
                yield
            finally:
                for leaf, grad in zip(self.leaves, grads):
                    leaf.grad = grad
                with torch.no_grad():
                    for b, value in zip(self.buffers, values):
                        b.copy_(value)
