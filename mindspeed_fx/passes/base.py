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
from dataclasses import dataclass
from typing import Any, Callable, Iterator

import torch.fx as fx

from mindspeed_fx.options import Options
from mindspeed_fx.report.records import PassReport, Site, Skip
from mindspeed_fx.report.source import source_line

STAGES = ("captured", "joint", "cut", "partitioned")
"""captured: before autograd. joint: forward and backward in one graph. cut: decides what the forward saves and rewrites
nothing (:attr:`Context.nodes`, :attr:`PassReport.saved`). partitioned: forward and backward each on its own."""


class PassError(ValueError):
    """A pass that is declared wrongly, named wrongly, cannot be ordered, or did not keep its contract."""


@dataclass(frozen=True)
class Context:
    """What a pass may know besides the graph."""

    options: Options
    """Resolved options: target and codegen are concrete."""
    side: str
    """"captured", "joint", "forward", "backward" or "inference"."""
    nodes: Any = None
    """Stage "cut" alone: torch's classification of the joint graph's nodes, for :mod:`mindspeed_fx.compat_partition`."""

    def left_to_inductor(self, name: str) -> bool:
        """True on cpu with generated code, where Inductor makes the same or better of what pass ``name`` rewrites, unless
        the user named the pass in ``enable``. For rewrites that pay elsewhere."""
        return self.options.target == "cpu" and self.options.codegen == "inductor" and name not in self.options.enable


@dataclass(frozen=True)
class Pass:
    """A registered pass; see :func:`register` for the fields."""

    name: str
    stage: str
    level: int
    exact: bool
    requires: tuple[str, ...]
    provides: tuple[str, ...]
    after: tuple[str, ...]
    run: Callable[[fx.GraphModule, Context], PassReport]

    @property
    def description(self) -> str:
        """First sentence of the function's docstring."""
        return (inspect.getdoc(self.run) or "").strip().split("\n\n")[0].replace("\n", " ")

    def source_hash(self) -> str:
        """Changes with the source of the file that defines the pass, so that compile caches miss."""
        try:
            with open(inspect.getsourcefile(self.run), "rb") as file:
                text = file.read()
        except (OSError, TypeError):  # typed into an interpreter, or an object that can be called: the code itself
            code = (self.run if hasattr(self.run, "__code__") else type(self.run).__call__).__code__
            text = code.co_code + repr((code.co_consts, code.co_names)).encode()
        return hashlib.sha256(text).hexdigest()


_REGISTERED: dict[str, Pass] = {}


def register(
    name: str,
    *,
    stage: str,
    level: int = 1,
    exact: bool = False,
    requires: tuple[str, ...] = (),
    provides: tuple[str, ...] = (),
    after: tuple[str, ...] = (),
    replace: bool = False,
) -> Callable[[Callable], Callable]:
    """Decorator that makes ``run(graph_module, context) -> PassReport`` a pass.

    Args:
        name: "family.name": what the user types, the log prints and the dump file bears.
        stage: "captured", "joint", "cut" or "partitioned".
        level: the lowest optimization level that turns it on, 0 to 2; 3 for on request only.
        exact: outputs and gradients stay bitwise equal.
        requires, provides: capability names from which the order within the stage is derived; a pass runs after
            every active pass that provides what it requires, and it is an error if none does.
        after: capability names that only order: whoever provides them comes first, if anyone does.
        replace: allow a second registration of the same name.

    Raises:
        PassError: bad name, stage or level, or a name that is taken.
    """
    if not re.fullmatch(r"[a-z0-9_]+(\.[a-z0-9_]+)+", name):
        raise PassError(f'pass name {name!r} is not "family.name" in lower case')
    if stage not in STAGES:
        raise PassError(f'pass "{name}" has stage {stage!r}; valid: {", ".join(STAGES)}')
    if level not in (0, 1, 2, 3):
        raise PassError(f'pass "{name}" has level {level!r}; valid: 0, 1, 2, or 3 for on request only')
    for field, value in (("requires", requires), ("provides", provides), ("after", after)):
        if isinstance(value, str) or not all(isinstance(v, str) for v in value):
            raise PassError(f'pass "{name}" has {field} {value!r}; it takes a tuple of capability names')
    if name in _REGISTERED and not replace:
        raise PassError(f'a pass named "{name}" is registered already; give replace=True to replace it')

    def wrap(run: Callable) -> Callable:
        _REGISTERED[name] = Pass(name, stage, level, exact, tuple(requires), tuple(provides), tuple(after), run)
        return run

    return wrap


def unregister(name: str) -> None:
    """Forget a registered pass; unknown names are an error."""
    if name not in _REGISTERED:
        raise PassError(f'no pass is named "{name}"')
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


def site(operator: str, node: fx.Node, nodes: Any = ()) -> Site:
    """A record of a rewrite at ``node``: where in the model and in the source it is."""
    return Site(operator, module_path(node), source_line(node), tuple(n.name for n in nodes) or (node.name,))


def skip(operator: str, node: fx.Node, reason: str) -> Skip:
    """A record of a near miss at ``node``."""
    return Skip(operator, reason, module_path(node), source_line(node))


def module_path(node: fx.Node) -> str:
    """Path of the module whose forward made ``node``, as ``named_modules`` spells it."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = list(stack.values())[-1][0]
    path = re.sub(r"^L\['\w+'\]\.?", "", path)
    path = re.sub(r"\._modules\['([^']+)'\]|\['([^']+)'\]", lambda m: "." + (m.group(1) or m.group(2)), path)
    return re.sub(r"^(self\.)?_modules\.|\.?_modules\.", ".", path).strip(".")
