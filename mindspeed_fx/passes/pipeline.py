"""How passes are chosen, ordered, run, timed, dumped and checked.

The order within a stage comes from ``requires`` / ``provides`` (then the name), and is settled before anything runs.
Around every pass the pipeline does what a pass need not know: time it, lint, check that every node still has its fake
value and that the graph's outputs kept shape, dtype and strides, keep the text for dumps, run the numeric check.
"""

from __future__ import annotations

import contextlib
import fnmatch
import time
from typing import Any, Callable

import torch
import torch.fx as fx

from mindspeed_fx import compat, compat_tracing
from mindspeed_fx.capture.normalize import bodies
from mindspeed_fx.options import OptionError, Options, nearest
from mindspeed_fx.passes.base import STAGES, Context, Pass, PassError, registered
from mindspeed_fx.passes.check import check_pass
from mindspeed_fx.passes.deferred import recompiled_once
from mindspeed_fx.report.records import GraphRecord, PassReport, PassRun, Skip


class Pipeline:
    """The passes that are in force for one set of options, in order.

    Raises:
        OptionError: ``enable`` or ``disable`` names no pass.
        PassError: a pass requires what no active pass provides, or passes require each other in a circle.
    """

    def __init__(self, options: Options):
        self.options = options
        self.named = {p.name for p in registered() if _matches(p.name, options.enable, "enable")}
        disabled = {p.name for p in registered() if _matches(p.name, options.disable, "disable")}
        if options.strict and (contradicted := sorted(disabled & set(options.enable))):
            raise OptionError(f'strict: option "enable" names "{contradicted[0]}", which option "disable" turns off ({", ".join(options.disable)})')
        active = [p for p in registered() if (p.level <= options.level or p.name in self.named) and p.name not in disabled]
        self.passes = [p for stage in STAGES for p in _ordered([p for p in active if p.stage == stage], stage, options)]

    def run(self, stage: str, side: str, gm: fx.GraphModule, record: GraphRecord, readable: Callable[[fx.GraphModule], str] | None) -> None:
        """Run the passes of ``stage`` on ``gm`` in place and add their runs to ``record``.

        Args:
            side: which graph this is: "captured", "joint", "forward", "backward" or "inference".
            readable: makes the text that dumps keep; None when no text is wanted.
        """
        context = Context(self.options, side)
        with recompiled_once(gm) if self.options.check != "each" else contextlib.nullcontext():  # a check runs the graph after every pass
            for p in self.passes:
                if p.stage == stage and not compat.bisector_disables(p.name):
                    record.runs.append(self._run_one(p, side, gm, context, readable))

    def _run_one(self, p: Pass, side: str, gm: fx.GraphModule, context: Context, readable: Any) -> PassRun:
        before_text = readable(gm) if readable else None
        before = compat.copy_graph(gm) if self.options.check == "each" else None
        outputs, count = _output_layouts(gm), _size(gm)
        start = time.perf_counter()
        report = PassReport(p.name)
        for graph in _with_bodies(gm) if p.stage == "captured" else [gm]:
            part = _report_of(p, graph, context)
            report.rewrites += part.rewrites
            report.skipped += part.skipped
            report.notes += part.notes
            report.files.update(part.files)
        seconds = time.perf_counter() - start
        _validate(p, gm, outputs)
        after = _size(gm)
        run = PassRun(report, side, seconds, count, after, before_text, readable(gm) if readable and (report.rewrites or after != count) else before_text)
        if before is not None:
            run.check = check_pass(p, before, gm, differentiable=p.stage == "captured")
        return run

    def decide(self, record: GraphRecord, graph: fx.Graph, nodes: Any) -> list[fx.Node] | None:
        """What the forward of a joint graph saves, by the passes of stage "cut"; the last that decides wins. None: torch's choice."""
        saved, before = None, _shape(graph)
        for p in self.passes:
            if p.stage == "cut" and not compat.bisector_disables(p.name):
                start = time.perf_counter()
                report = _report_of(p, graph.owning_module, Context(self.options, "joint", nodes))
                if _shape(graph) != before:
                    raise PassError(f'pass "{p.name}" of stage "cut" changed the graph; it may only decide what is saved')
                unknown = set(report.saved or ()) - {n.name for n in graph.nodes}
                if unknown:
                    raise PassError(f'pass "{p.name}" saves what the joint graph does not have: {", ".join(sorted(unknown)[:5])}')
                seconds = time.perf_counter() - start
                saved = saved if report.saved is None else set(report.saved)
                record.seconds["passes"] = record.seconds.get("passes", 0.0) + seconds
                record.runs.append(PassRun(report, "joint", seconds, len(graph.nodes), len(graph.nodes)))
        return saved if saved is None else [n for n in graph.nodes if n.name in saved]

    def refuse(self, stage: str, reason: str, record: GraphRecord) -> None:
        """Note for every pass of ``stage`` that the graph is not for it."""
        for p in self.passes:
            if p.stage == stage:
                record.runs.append(PassRun(PassReport(p.name, skipped=[Skip("", reason)]), stage, 0.0, 0, 0))

    def require_named(self, record: GraphRecord, side: str) -> None:
        """In strict mode, fail when a pass that the user named rewrote nothing; the error carries the reasons.

        Called when ``side`` has been through its passes: after a forward, passes on its own graphs still have the backward to
        come. Globs are wishes, not names: only passes spelled out in ``enable`` are held to this, graph by graph.
        """
        counts = record.counts
        later = {p.name for p in self.passes if p.stage == "partitioned"} if side == "forward" else set()
        for name in self.options.enable if self.options.strict else ():
            if name in counts and not counts[name] and name not in later:
                runs = [run.report for run in record.runs if run.report.name == name]
                reasons = {s.reason for report in runs for s in report.skipped} or {note for report in runs for note in report.notes}
                why = "; ".join(sorted(reasons)) or "no subgraph looked like it"
                raise PassError(f'strict: pass "{name}" was enabled by name and rewrote nothing in graph {record.index}: {why}')


def _report_of(p: Pass, gm: fx.GraphModule, context: Context) -> PassReport:
    report = p.run(gm, context)
    if not isinstance(report, PassReport):
        raise PassError(f'pass "{p.name}" returned {type(report).__name__}, not a PassReport')
    return report


def _shape(graph: fx.Graph) -> list[Any]:
    """What every node calls and reads; of a graph that nobody touched, the very same objects."""
    return [(n.name, n.target, n.args, n.kwargs) for n in graph.nodes]


def _matches(name: str, wanted: tuple[str, ...], option: str) -> bool:
    names = [p.name for p in registered()]
    for pattern in wanted:
        if not fnmatch.filter(names, pattern):
            raise OptionError(f'option "{option}" names no pass: "{pattern}"{nearest(pattern, names)}; valid: {", ".join(names)}')
    return any(fnmatch.fnmatch(name, pattern) for pattern in wanted)


def _ordered(passes: list[Pass], stage: str, options: Options) -> list[Pass]:
    """Topological order by capability, ties by name."""
    providers: dict[str, set[str]] = {}
    for p in registered():
        for capability in p.provides:
            providers.setdefault(capability, set()).add(p.name)
    active, done, order = {p.name for p in passes}, set(), []
    for p in passes:
        for capability in p.requires:
            offered = providers.get(capability, set())
            if not offered & active:
                who = ", ".join(sorted(offered)) or "no registered pass"
                raise PassError(f'pass "{p.name}" requires "{capability}", which no active {stage} pass provides (provided by: {who})')
    waiting = sorted(passes, key=lambda p: p.name)
    while waiting:
        ready = next((p for p in waiting if all((providers.get(c, set()) & active) - {p.name} <= done for c in p.requires + p.after)), None)
        if ready is None:
            raise PassError(f"passes require each other in a circle: {', '.join(p.name for p in waiting)}")
        waiting.remove(ready)
        done.add(ready.name)
        order.append(ready)
    return order


def _with_bodies(gm: fx.GraphModule) -> list[fx.GraphModule]:
    """``gm`` and the bodies of its checkpointed and wrapped regions. The forward of an opaque autograd.Function is left
    alone: its own backward reads what that forward saved."""
    found = [gm]
    for node in gm.graph.nodes:
        if node.op == "call_function" and compat_tracing.is_autograd_function(node.target):
            return found + [b for b in _wrapped(gm)]
    return found + [inner for body in bodies(gm) for inner in _with_bodies(body)]


def _wrapped(gm: fx.GraphModule) -> list[fx.GraphModule]:
    own = {id(getattr(gm, str(n.args[0].target))) for n in gm.graph.nodes if n.op == "call_function" and compat_tracing.is_autograd_function(n.target)}
    return [inner for body in bodies(gm) if id(body) not in own for inner in _with_bodies(body)]


def _size(gm: fx.GraphModule) -> int:
    return sum(len(g.graph.nodes) for g in _with_bodies(gm))


def _output_layouts(gm: fx.GraphModule) -> list[Any]:
    output = next(n for n in gm.graph.nodes if n.op == "output")
    values = [n.meta.get("val") if isinstance(n, fx.Node) else n for n in torch.utils._pytree.tree_leaves(output.args)]
    return [(tuple(v.shape), v.dtype, compat.layout(v)) if isinstance(v, torch.Tensor) else type(v) for v in values]


def _validate(p: Pass, gm: fx.GraphModule, outputs: list[Any]) -> None:
    gm.graph.lint()
    for node in (n for g in _with_bodies(gm) for n in g.graph.nodes):
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) and node.target._schema.returns and "val" not in node.meta:
            raise PassError(f'pass "{p.name}" left node {node.name} ({node.target}) without a fake value')
    after = _output_layouts(gm)
    for i, (old, new) in enumerate(zip(outputs, after)):
        if str(old) != str(new):
            raise PassError(f'pass "{p.name}" changed output {i} of the graph from {old} to {new} (shape, dtype, strides)')
    if len(outputs) != len(after):
        raise PassError(f'pass "{p.name}" changed the number of outputs from {len(outputs)} to {len(after)}')
