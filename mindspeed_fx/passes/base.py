"""What a pass is.

A pass is a named function on a graph. Register one of your own in a few lines::

    from mindspeed_fx import passes

    @passes.register("mine.no_dropout", stage="captured", level=1, exact=False)
    def no_dropout(gm, context):
        '''Removes dropout.'''
        report = passes.PassReport("mine.no_dropout")
        for node in passes.calls(gm, torch.ops.aten.dropout.default):
            node.replace_all_uses_with(node.args[0])
            report.rewrites.append(passes.site("removed", node))
        return report
"""

from __future__ import annotations

import hashlib
import inspect
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator

import torch.fx as fx

from mindspeed_fx.compat import symbols
from mindspeed_fx.errors import nearest
from mindspeed_fx.graph.provenance import module_path
from mindspeed_fx.options import Options
from mindspeed_fx.passes.manager import ROWS, STAGES, PassError
from mindspeed_fx.report.records import PassReport, Site, Skip
from mindspeed_fx.report.source import source_line


@dataclass
class OverlapFindings:
    """What passes of the family "overlap" hand on to those after them on the same graph."""

    limit: int | None = None
    """Bytes that an earlier pass promised not to exceed."""
    order: tuple[Any, Any] = ((), ())
    """Nodes, and the order of their tasks that an earlier pass found."""
    tasks: tuple[Any, Any] = (None, None)
    """The nodes of a large graph with their arguments, and its tasks."""


@dataclass(frozen=True)
class Context:
    """What a pass may know besides the graph."""

    options: Options
    """Resolved options: target and codegen are concrete."""
    side: str
    """"captured", "joint", "forward", "backward" or "inference"."""
    nodes: Any = None
    """Stage "partition" alone: torch's classification of the joint graph's nodes, for
    :mod:`mindspeed_fx.compat.partitioner`.
    """
    sharding: Any = None
    """What the plan of a parallelized model says of this graph
    (:class:`mindspeed_fx.sharding.parallelized_graph.ParallelizedGraph`); None of other models, and of the bodies of
    checkpointed regions."""
    plan: Any = None
    """The plan (:class:`mindspeed_fx.sharding.plan.Plan`) by which the graph, or that whose body it is, runs in parts;
    None where it runs whole."""
    overlap: OverlapFindings = field(default_factory=OverlapFindings)

    def left_to_inductor(self, name: str) -> bool:
        """True on cpu with generated code, where Inductor makes the same or better of what pass ``name`` rewrites,
        unless the user named the pass in ``enable``. For rewrites that pay elsewhere."""
        return self.options.target == "cpu" and self.options.codegen == "inductor" and name not in self.options.enable


@dataclass(frozen=True)
class Pass:
    """A registered pass; see :func:`register` for the fields."""

    name: str
    stage: str
    level: int
    exact: bool
    before: tuple[str, ...]
    after: tuple[str, ...]
    run: Callable[[fx.GraphModule, Context], PassReport]

    @property
    def description(self) -> str:
        """First sentence of the function's docstring."""
        return (inspect.getdoc(self.run) or "").strip().split("\n\n")[0].replace("\n", " ")

    def source_hash(self) -> str:
        """Changes with the source of the file that defines the pass, so that compile caches miss."""
        try:
            text = Path(str(inspect.getsourcefile(self.run))).read_bytes()
        except (OSError, TypeError):  # typed into an interpreter, or an object that can be called: the code itself
            code = (self.run if hasattr(self.run, "__code__") else type(self.run).__call__).__code__
            text = code.co_code + repr((code.co_consts, code.co_names)).encode()
        return hashlib.sha256(text).hexdigest()


_REGISTERED: dict[str, Pass] = {}


def register(
    name: str,
    *,
    stage: str | None = None,
    level: int = 1,
    exact: bool = False,
    before: str | tuple[str, ...] = (),
    after: str | tuple[str, ...] = (),
    replace: bool = False,
) -> Callable[[Callable], Callable]:
    """Decorator that makes ``run(graph_module, context) -> PassReport`` a pass.

    Passes of the package are rows of :data:`mindspeed_fx.passes.manager.PASSES` and give their name alone.

    Args:
        name: "family.name": what the user types, the log prints and the dump file bears.
        stage: "captured", "joint", "partition", "partitioned" or "lowered".
        level: the lowest optimization level that turns it on, 0 to 2; 3 for on request only.
        exact: outputs and gradients stay bitwise equal.
        before, after: names of passes of the same stage; without them it runs last.
        replace: allow a second registration of the same name.

    Raises:
        PassError: bad name, stage or level, or a name that is taken. That ``before`` and ``after`` name passes is
            checked when passes are put in order.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[a-z0-9_]+(\.[a-z0-9_]+)+", name):
        raise PassError(f'pass name {name!r} is not "family.name" in lower case')
    for word, switch in (("exact", exact), ("replace", replace)):
        if not isinstance(switch, bool):
            raise PassError(f'pass "{name}" has {word} {switch!r}; valid: True or False')
    if name in _REGISTERED and not replace:
        raise PassError(f'a pass named "{name}" is registered already; give replace=True to replace it')
    if stage is None and name in ROWS:
        stage, level, exact = ROWS[name].stage, ROWS[name].level, ROWS[name].exact
    if stage not in STAGES:
        raise PassError(f'pass "{name}" has stage {stage!r}{nearest(str(stage), STAGES)}; valid: {", ".join(STAGES)}')
    if isinstance(level, bool) or level not in (0, 1, 2, 3):
        raise PassError(f'pass "{name}" has level {level!r}; valid: 0, 1, 2, or 3 for on request only')
    around: dict[str, tuple[str, ...]] = {}
    for word, value in (("before", before), ("after", after)):
        names = (value,) if isinstance(value, str) else value
        if not isinstance(names, (tuple, list)) or not all(isinstance(v, str) for v in names):
            raise PassError(f'pass "{name}" has {word} {value!r}; it takes names of passes')
        around[word] = tuple(names)

    def wrap(run: Callable) -> Callable:
        if problem := _signature_problem(run):
            raise PassError(f'pass "{name}" is {run!r}, {problem}; a function (graph_module, context) is expected')
        _REGISTERED[name] = Pass(name, stage, level, exact, around["before"], around["after"], run)
        return run

    return wrap


def _signature_problem(run: Any) -> str:
    """Why a pass cannot be called; "" when it can."""
    if not callable(run):
        return "which is no function"
    try:
        inspect.signature(run).bind(None, None)
    except TypeError as error:
        return f"which does not take them ({error})"
    except ValueError:  # written in C
        pass
    return ""


def unregister(name: str) -> None:
    """Forget a registered pass; unknown names are an error."""
    if name not in _REGISTERED:
        raise PassError(f'no pass is named "{name}"{nearest(str(name), _REGISTERED)}')
    del _REGISTERED[name]


def registered() -> list[Pass]:
    """Every registered pass, by name."""
    return [_REGISTERED[n] for n in sorted(_REGISTERED)]


# --------------------------------------------------------------------------- what passes are written with


def calls(gm: fx.GraphModule, *targets: Any) -> Iterator[fx.Node]:
    """The nodes of ``gm`` that call one of ``targets``, in order; safe while nodes are added or erased."""
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target in targets and not node._erased:
            yield node


class Miss(Exception):
    """A near miss; the text is the reason. For readers deep in a pattern; :func:`rewrite_each` reports it."""


Outcome = Site | Skip | str | None
"""Of looking at one place: what was rewritten, why not, or None where there is nothing of the kind."""


def rewrite_each(
    report: PassReport, operator: str, nodes: Iterable[fx.Node], rewrite_one: Callable[[fx.Node], Outcome]
) -> None:
    """Look at each of ``nodes`` and report the outcome: rewritten, or why not (a reason is said of the node looked
    at).
    """
    for node in nodes:
        with symbols.noting_floats() as numbers:
            try:
                outcome = rewrite_one(node)
            except Miss as miss:
                outcome = str(miss)
            except symbols.undecided_by_data() as error:
                outcome = f"whether it fits only data tell: {error.cond}"
        if isinstance(outcome, Site):
            symbols.tie_floats(numbers)
            report.rewrites.append(outcome)
        elif outcome:
            report.skipped.append(skip(operator, node, outcome) if isinstance(outcome, str) else outcome)


def site(operator: str, node: fx.Node, nodes: Any = ()) -> Site:
    """A record of a rewrite at ``node``: where in the model and in the source it is."""
    return Site(operator, module_path(node), source_line(node), tuple(n.name for n in nodes) or (node.name,))


def skip(operator: str, node: fx.Node, reason: str) -> Skip:
    """A record of a near miss at ``node``."""
    return Skip(operator, reason, module_path(node), source_line(node))
