"""How passes are chosen, ordered, run, timed, dumped and checked.

The order is that of :mod:`manager`'s list, and is settled before anything runs. Around every pass the pipeline does
what a pass need not know: time it, lint, check that every node still has its fake value and that the graph's outputs
kept shape, dtype and strides, keep the text for dumps, run the numeric check.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fnmatch
import time
from typing import Any, Callable, Sequence

import torch
import torch.fx as fx

from mindspeed_fx.compat import bisector, fake, fx_graph, symbols, tracing
from mindspeed_fx.errors import OptionError, nearest
from mindspeed_fx.graph.annotate import bodies, holds_graphs
from mindspeed_fx.graph.recompile import defer_recompile
from mindspeed_fx.options import Options
from mindspeed_fx.partition.masks import save_as_bytes
from mindspeed_fx.partition.offload import move
from mindspeed_fx.passes.base import Context, Pass, registered, site
from mindspeed_fx.passes.check import check_pass
from mindspeed_fx.passes.manager import ROWS, PassError, in_order
from mindspeed_fx.passes.prove.sites import prove_pass
from mindspeed_fx.report import progress
from mindspeed_fx.report.records import GraphRecord, PassReport, PassRun, Skip


class Pipeline:
    """The passes that are in force for one set of options, in order.

    Raises:
        OptionError: ``enable`` or ``disable`` names no pass.
        PassError: a pass goes before or after one that does not exist, or passes wait for each other in a circle.
    """

    def __init__(self, options: Options):
        self.options = options
        self.named = {p.name for p in registered() if _matches(p.name, options.enable, "enable")}
        disabled = {p.name for p in registered() if _matches(p.name, options.disable, "disable")}
        if options.strict and (contradicted := sorted(disabled & set(options.enable))):
            raise OptionError(
                f'strict: option "enable" names "{contradicted[0]}", which option "disable" turns off '
                f"({', '.join(options.disable)})"
            )
        self.passes = [
            p
            for p in in_order(registered())
            if (p.level <= options.level or p.name in self.named) and p.name not in disabled
        ]

    def run(
        self,
        stage: str,
        side: str,
        gm: fx.GraphModule,
        record: GraphRecord,
        readable: Callable[[fx.GraphModule], str] | None,
        sharding: Any = None,
    ) -> None:
        """Run the passes of ``stage`` on ``gm`` in place and add their runs to ``record``.

        Args:
            side: which graph this is: "captured", "joint", "forward", "backward" or "inference".
            readable: makes the text that dumps keep; None when no text is wanted.
            sharding: what the plan of a parallelized model says of this graph.
        """
        context = Context(self.options, side, sharding=sharding, plan=sharding and sharding.plan)
        outputs = _outputs(gm)
        with (
            defer_recompile(gm) if self.options.check == "off" else contextlib.nullcontext()
        ):  # a check runs the graph after every pass
            for number, p in enumerate(mine := [p for p in self.passes if p.stage == stage]):
                if not bisector.bisector_disables(p.name):
                    progress.note(p.name, number, len(mine))
                    record.runs.append(self._run_one(p, side, gm, context, readable, outputs))
        _validate(f'a pass of stage "{stage}"', gm, outputs)

    def _run_one(
        self, p: Pass, side: str, gm: fx.GraphModule, context: Context, readable: Any, outputs: list[Any]
    ) -> PassRun:
        before_text = readable(gm) if readable else None
        before = fx_graph.copy_graph(gm) if self.options.check != "off" else None
        start, count = time.perf_counter(), _size(gm)
        report = PassReport(p.name)
        for graph in _with_bodies(gm) if p.stage == "captured" else [gm]:
            part = _report_of(p, graph, context if graph is gm else dataclasses.replace(context, sharding=None))
            report.rewrites += part.rewrites
            report.skipped += part.skipped
            report.layers += part.layers
            report.notes += part.notes
            report.files.update(part.files)
        seconds = time.perf_counter() - start
        after = _size(gm)
        if report.rewrites or after != count or p.name not in ROWS:
            # what rewrote nothing is looked at once, behind all of its stage: to look takes longer than such a pass
            _validate(f'pass "{p.name}"', gm, outputs)
        run = PassRun(
            report,
            side,
            seconds,
            count,
            after,
            before_text,
            readable(gm) if readable else None,
            exact=p.exact,
        )
        if before is not None and self.options.check == "prove":
            run.proofs = prove_pass(p, before, gm, report)
            states = collections.Counter(proof.status for proof in run.proofs)
            run.check = ", ".join(f"{n} {state}" for state, n in sorted(states.items(), reverse=True))
        elif before is not None:
            run.check = check_pass(p, before, gm, differentiable=p.stage == "captured")
        return run

    def decide(self, record: GraphRecord, graph: fx.Graph, nodes: Any) -> list[fx.Node] | None:
        """What the forward of a joint graph saves, by the passes of stage "partition"; the last that decides wins.
        None: torch's choice.
        """
        saved, before = None, _shape(graph)
        for p in self.passes:
            if p.stage == "partition" and not bisector.bisector_disables(p.name):
                progress.note(p.name)
                start = time.perf_counter()
                report = _report_of(p, graph.owning_module, Context(self.options, "joint", nodes=nodes))
                if _shape(graph) != before:
                    raise PassError(
                        f'pass "{p.name}" of stage "partition" changed the graph; it may only decide what is saved'
                    )
                unknown = set(report.saved or ()) - {n.name for n in graph.nodes}
                if unknown:
                    raise PassError(
                        f'pass "{p.name}" saves what the joint graph does not have: {", ".join(sorted(unknown)[:5])}'
                    )
                seconds = time.perf_counter() - start
                saved = saved if report.saved is None else set(report.saved)
                record.seconds["passes"] = record.seconds.get("passes", 0.0) + seconds
                size = len(graph.nodes)
                record.runs.append(PassRun(report, "joint", seconds, size, size, exact=p.exact))
        return saved if saved is None else [n for n in graph.nodes if n.name in saved]

    def after_cut(self, record: GraphRecord, forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        """Does to the two halves of a joint graph what the passes of stage "partition" have asked for."""
        for report in (run.report for run in record.runs):
            if report.moves:
                stay = move(forward, backward, report.moves)
                report.skipped += [Skip("", f"{name} is not moved: {why}") for name, why in stay.items()]
            if report.masks:
                saved, stay = save_as_bytes(forward, backward, report.masks)
                report.rewrites += [site("mask as bytes", n) for n in saved]
                report.skipped += [Skip("mask as bytes", f"{name} stays bool: {why}") for name, why in stay.items()]

    def refuse(self, stage: str, reason: str, record: GraphRecord) -> None:
        """Note for every pass of ``stage`` that the graph is not for it."""
        for p in self.passes:
            if p.stage == stage:
                record.runs.append(PassRun(PassReport(p.name, skipped=[Skip("", reason)]), stage, 0.0, 0, 0))

    def require_named(self, record: GraphRecord, side: str) -> None:
        """In strict mode, fail when a pass that the user named rewrote nothing; the error carries the reasons.

        Called when ``side`` has been through its passes: after a forward, passes on its own graphs still have the
        backward to
        come. Globs are wishes, not names: only passes spelled out in ``enable`` are held to this, graph by graph.
        """
        counts = record.counts
        later = {p.name for p in self.passes if p.stage == "partitioned"} if side == "forward" else set()
        for name in self.options.enable if self.options.strict else ():
            if name in counts and not counts[name] and name not in later:
                runs = [run.report for run in record.runs if run.report.name == name]
                reasons = {s.reason for report in runs for s in report.skipped} or {
                    note for report in runs for note in report.notes
                }
                why = "; ".join(sorted(reasons)) or "no subgraph looked like it"
                raise PassError(
                    f'strict: pass "{name}" was enabled by name and rewrote nothing in graph {record.index}: {why}'
                )


def _report_of(p: Pass, gm: fx.GraphModule, context: Context) -> PassReport:
    try:
        report = p.run(gm, context)
    except Exception as error:
        if p.name in ROWS or isinstance(error, ValueError):  # the package's own tell more by their traceback
            raise
        raise PassError(f'pass "{p.name}" failed with {type(error).__name__}: {error}') from error
    if not isinstance(report, PassReport):
        raise PassError(f'pass "{p.name}" returned {type(report).__name__}, not a PassReport')
    if report.name != p.name:
        raise PassError(f'pass "{p.name}" returned the report of "{report.name}"; PassReport("{p.name}") is expected')
    return report


def _shape(graph: fx.Graph) -> list[Any]:
    """What every node calls and reads; of a graph that nobody touched, the very same objects."""
    return [(n.name, n.target, n.args, n.kwargs) for n in graph.nodes]


def _matches(name: str, wanted: tuple[str, ...], option: str) -> bool:
    names = [p.name for p in registered()]
    for pattern in wanted:
        if not fnmatch.filter(names, pattern):
            raise OptionError(
                f'option "{option}" names no pass: "{pattern}"{nearest(pattern, names)}; valid: {by_family(names)}'
            )
    return any(fnmatch.fnmatch(name, pattern) for pattern in wanted)


def by_family(names: Sequence[str]) -> str:
    """``fusion.{rope, swiglu}, lowering.{onednn}``: sixty names would say their families sixty times."""
    families: dict[str, list[str]] = {}
    for name in names:
        family, _, rest = name.rpartition(".")
        families.setdefault(family, []).append(rest)
    return ", ".join(f"{f}.{{{', '.join(rest)}}}" if f else ", ".join(rest) for f, rest in families.items())


def _with_bodies(gm: fx.GraphModule) -> list[fx.GraphModule]:
    """``gm`` and the bodies of its checkpointed and wrapped regions. The forward of an opaque autograd.Function is left
    alone: its own backward reads what that forward saved."""
    results = [gm]
    if not holds_graphs(gm):
        return results
    for node in gm.graph.nodes:
        if node.op == "call_function" and tracing.is_autograd_function(node.target):
            return results + list(_wrap(gm))
    return results + [inner for body in bodies(gm) for inner in _with_bodies(body)]


def _wrap(gm: fx.GraphModule) -> list[fx.GraphModule]:
    own = {
        id(getattr(gm, str(n.args[0].target)))
        for n in gm.graph.nodes
        if n.op == "call_function" and tracing.is_autograd_function(n.target)
    }
    return [inner for body in bodies(gm) if id(body) not in own for inner in _with_bodies(body)]


def _size(gm: fx.GraphModule) -> int:
    return sum(len(g.graph.nodes) for g in _with_bodies(gm))


def _outputs(gm: fx.GraphModule) -> list[Any]:
    output = next(n for n in gm.graph.nodes if n.op == "output")
    return [n.meta.get("val") if isinstance(n, fx.Node) else n for n in torch.utils._pytree.tree_leaves(output.args)]


def _layout(value: Any) -> str:
    """Symbols by the names that they have now: a pass may learn that two sizes are one."""
    if not isinstance(value, torch.Tensor):
        return str(type(value))
    return str((tuple(value.shape), value.dtype, fake.layout(value)))


def _same_layout(a: Any, b: Any) -> bool:
    """Whether two tensors lie alike where their sizes are other expressions of the same numbers."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    if a.dtype != b.dtype or a.dim() != b.dim():
        return False
    strides = [(x, y) for n, x, y in zip(a.shape, a.stride(), b.stride()) if not (isinstance(n, int) and n <= 1)]
    return all(symbols.same_size(x, y) for x, y in (*zip(a.shape, b.shape), *strides))


def _validate(what: str, gm: fx.GraphModule, outputs: list[Any]) -> None:
    try:
        gm.graph.lint()
    except RuntimeError as error:
        first = str(error).strip().splitlines()[0]
        raise PassError(f"{what} left a graph that is no program: {first}") from error
    for node in (n for g in _with_bodies(gm) for n in g.graph.nodes):
        if (
            node.op == "call_function"
            and isinstance(node.target, torch._ops.OpOverload)
            and node.target._schema.returns
            and "val" not in node.meta
        ):
            raise PassError(f"{what} left node {node.name} ({node.target}) without a fake value")
    after = _outputs(gm)
    for i, (x, y) in enumerate(zip(outputs, after)):
        old, new = _layout(x), _layout(y)
        if old != new and not _same_layout(x, y):
            raise PassError(f"{what} changed output {i} of the graph from {old} to {new} (shape, dtype, strides)")
    if len(outputs) != len(after):
        raise PassError(f"{what} changed the number of outputs from {len(outputs)} to {len(after)}")
