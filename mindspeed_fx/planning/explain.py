"""``mindspeed_fx.explain(model, *args)``: compile, run once forward and backward, and say what happened."""

from __future__ import annotations

import contextlib
import html
import json
import pathlib
from typing import Any, Callable, Iterator

import torch
from torch.utils import _pytree as pytree

from mindspeed_fx.report import recorder, summary
from mindspeed_fx.report.modelled import Modelled
from mindspeed_fx.report.records import GraphRecord, Site, Skip


class Report:
    """What the compiler did to a model.

    Attributes:
        graphs: one record for each Dynamo graph.
        break_reasons: why the model fell apart into several graphs, one text for each break, with the line of code.
    """

    def __init__(self, graphs: list[GraphRecord], break_reasons: list[str]):
        self.graphs, self.break_reasons = graphs, break_reasons

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
        from mindspeed_fx.report.dump import metadata

        return {
            "graph_count": self.graph_count,
            "break_reasons": self.break_reasons,
            "counts": self.counts,
            "graphs": [metadata(g) for g in self.graphs],
        }

    def __str__(self) -> str:
        return summary.text(self)

    def _repr_html_(self) -> str:
        """For notebooks."""
        return f"<pre>{html.escape(str(self))}</pre>"

    def _runs(self, name: str) -> list[Any]:
        from mindspeed_fx.errors import nearest

        ran = {run.report.name for g in self.graphs for run in g.runs}
        if name not in ran:
            raise KeyError(f'no pass "{name}" ran{nearest(name, ran)}; ran: {", ".join(sorted(ran))}')
        return [run for g in self.graphs for run in g.runs if run.report.name == name]


def explain(model: Callable, *args: Any, options: dict[str, Any] | None = None, **kwargs: Any) -> Report:
    """Compile ``model``, run it once forward and (if an output needs a gradient) backward, and report.

    Gradients, buffers and random-number state are as before afterwards. Compile caches are off, since a hit runs no
    pass.

    Args:
        model: module or function.
        args, kwargs: its inputs.
        options: as for ``torch.compile(model, backend="mindspeed", options=...)``.

    Raises:
        OptionError: a bad option. Errors of the model and of the compiler pass through.
    """
    from mindspeed_fx import arguments, torch_compile
    from mindspeed_fx.backend import mindspeed
    from mindspeed_fx.compat import dynamo
    from mindspeed_fx.options import Options

    arguments.check_callable("explain", "model", model)
    arguments.check_options("explain", options)
    Options.parse(options)  # a bad option is an error of its own, not one inside a compilation
    # Dynamo keeps what it compiled for a backend; one of its own makes it compile even a model that was compiled
    # before.
    backend = lambda gm, inputs: mindspeed(gm, inputs, options=options)  # noqa: E731
    with (
        recorder.collecting() as graphs,
        dynamo.collecting_graph_breaks() as breaks,
        dynamo.recompiling(),
        _check_unchanged(model),
    ):
        outputs = torch_compile.compile_with_backend(dynamo.fresh_callable(model), backend=backend)(*args, **kwargs)
        loss = loss_of(outputs)
        if loss is not None:
            loss.backward()
    return Report(list(graphs), list(breaks))


def loss_of(outputs: Any) -> torch.Tensor | None:
    """A scalar to differentiate: the model's own ``loss``, else the sum of its floating-point outputs; None without
    gradient.
    """
    own = getattr(outputs, "loss", None)
    if isinstance(own, torch.Tensor) and own.requires_grad:
        return own.sum()
    tensors = [t for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.requires_grad]
    return sum(t.float().sum() for t in tensors) if tensors else None


@contextlib.contextmanager
def _check_unchanged(model: Any) -> Iterator[None]:
    module = model if isinstance(model, torch.nn.Module) else None
    grads = {p: p.grad for p in module.parameters()} if module else {}
    for p in grads:
        p.grad = None
    buffers = {b: b.detach().clone() for b in module.buffers()} if module else {}
    with torch.random.fork_rng():
        try:
            yield
        finally:
            for p, grad in grads.items():
                p.grad = grad
            with torch.no_grad():
                for b, value in buffers.items():
                    b.copy_(value)
