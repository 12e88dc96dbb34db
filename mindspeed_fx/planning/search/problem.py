"""A model as the search sees it: one of each kind of layer, operators with their ways, values with named axes.

:mod:`mindspeed_fx.planning.search.problem_builder` makes one of a captured graph.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

from mindspeed_fx.cost.operators import Spec
from mindspeed_fx.cost.read import Call
from mindspeed_fx.kernels.base import TAGGED
from mindspeed_fx.planning.search.axes import Axes, Dim
from mindspeed_fx.planning.search.strategies import Row

SAVES = frozenset(
    "add sub neg sum mean rope cat embedding dropout moe_permute slice to where"
    " split split_with_sizes chunk gather scatter scatter_add slice_scatter select_scatter index_select flip roll "
    "zeros_like ones_like empty_like full_like new_empty new_zeros new_ones new_full".split()
)
"""Operators whose backward needs none of their floating inputs; all others keep them."""
ATEN_CHEAP = frozenset(("rms_norm", "layer_norm", "gelu", "silu", "add", "mul", "to"))


@functools.cache
def is_cheap(op: str) -> bool:
    """Whether an operator is redone rather than kept under recompute of norms and activation functions, where its
    inputs are kept anyway.
    """
    own = {str(o) for tag in ("norm", "activation", "cheap") for o in TAGGED[tag]}
    return op in ATEN_CHEAP or f"mindspeed.{op}.default" in own


@dataclass(eq=False)
class Value:
    """An activation, parameter, input or constant."""

    name: str
    shape: tuple[int, ...]
    dims: list[Dim]
    itemsize: int
    floating: bool
    producer: "Node | None" = field(default=None, repr=False)  # else its text is the whole problem's
    parameter: "Parameter | None" = field(default=None, repr=False)
    index: int = 0

    @property
    def free(self) -> bool:
        """Whole on every rank: taking a part costs nothing, and it has no gradient."""
        return self.producer is None and self.parameter is None


@dataclass(eq=False)
class Parameter:
    name: str
    shape: tuple[int, ...]
    itemsize: int
    trained: bool
    stacked: bool = False
    """Whether each expert of a list has one ("experts.*.w1"), which the graph stacks: shape [experts, ...]."""
    users: list[tuple["Node", int]] = field(default_factory=list, repr=False)
    tied: tuple[str, ...] = ()
    """Its other names."""

    @property
    def bytes(self) -> int:
        n = self.itemsize
        for s in self.shape:
            n *= s
        return n


@dataclass(eq=False)
class Use:
    """An argument: a value as this operator sees it, after views."""

    value: Value
    dims: list[Dim]
    shape: tuple[int, ...]


@dataclass(eq=False)
class Node:
    """One operator of a layer or of what is around the layers."""

    name: str
    op: str
    module: str
    line: str
    run: int
    """Index of the run of layers it is in; -1: around them."""
    call: Call
    args: tuple
    """The arguments with :class:`Use` for tensors, as ``call.args``."""
    uses: list[Use]
    outs: list[Value]
    rows: list[Row] | None
    owner: str | None = None
    """Remembered by :func:`~mindspeed_fx.planning.search.to_plan.owner`."""


@dataclass(eq=False)
class Edge:
    """A value on its way to one argument of one operator."""

    value: Value
    node: Node
    argument: int
    where: tuple
    """What else moves with it: edges of one value and one ``where`` share redistributions. ("in", run), ("between",
    run) ...
    """
    count: tuple[int, int]
    """How often in the model: run and what to add to its number of layers; (-1, n) is n times."""
    expressible: bool | None = None
    """Remembered by :func:`~mindspeed_fx.planning.search.to_plan.expressible`."""


@dataclass
class Problem:
    """See the module."""

    axes: Axes
    nodes: list[Node]
    edges: list[Edge]
    parameters: list[Parameter]
    runs: list[list[str]]
    """Names of the layers of each run."""
    batch: int | None
    sequence: int | None
    """Atoms of the inputs' first two dimensions."""
    inputs: list[tuple[str, tuple[int, ...], list[Dim]]]
    experts: dict[int, int] = field(default_factory=dict)
    """Atom of a token's choices -> atom of the experts: rows sorted by expert are divided by expert too."""
    choices: set[int] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    module_names: list[str] = field(default_factory=list)
    no_stages: str = ""
    """Why the model cannot be cut into stages of a pipeline; "" where it can."""
    traced: Any = None
    """The graph that it was read from (:class:`~mindspeed_fx.planning.search.traced_plan.Traced`)."""

    def layers(self, run: int) -> int:
        return 1 if run < 0 else len(self.runs[run])

    def label(self, atom: int) -> str:
        """A word for an atom: "batch", "sequence", or the first parameter dimension or operator that has it."""
        if atom == self.batch:
            return "batch"
        if atom == self.sequence:
            return "sequence"
        if atom in self.experts.values():
            return "experts"
        for node in self.nodes:
            if node.op == "attention":
                for use in node.uses[:1]:
                    if atom in self.axes.atoms(use.dims[1]):
                        return "heads"
        return f"axis of {self.axes.size[atom]}"


class NotRepeated(Exception):
    """The trace does not show what the module tree promised."""


def localize(args: Any, call_args: Any, size: Any) -> Any:
    """``call_args`` with every :class:`Spec` at its local size: ``size(use, spec)`` gives the shape."""
    if isinstance(call_args, Spec):
        return size(args, call_args)
    if isinstance(call_args, (tuple, list)):
        arguments = list(args) if isinstance(args, (tuple, list)) else []
        return type(call_args)(
            localize(arguments[i] if i < len(arguments) else None, c, size) for i, c in enumerate(call_args)
        )
    return call_args
