"""Reading a captured graph by meaning.

A matcher asks these helpers what a node *is* (a scaled value, a slice, a cast, the square of something) and never which
spelling was used. Every helper returns None where the answer is no.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from mindspeed_fx.compat import fake, symbols, tracing
from mindspeed_fx.graph.annotate import written_nodes
from mindspeed_fx.graph.new_call import NewCall
from mindspeed_fx.graph.op_sets import RESHAPES
from mindspeed_fx.graph.schema import argument

aten = torch.ops.aten

NODES = (fx.Node, NewCall)
"""What can be read as a node: those of the graph, and calls that readers ask for."""

END = 9223372036854775807  # how ATen spells "to the end" of a slice


ADD = (aten.add.Tensor, aten.add.Scalar)


MUL = (aten.mul.Tensor, aten.mul.Scalar)


DIV = (aten.div.Tensor, aten.div.Scalar)


class Pieces(NamedTuple):
    """A part of ``source`` along one dimension; ``step`` 2 for every other element."""

    source: fx.Node
    dim: int
    start: int
    stop: int
    step: int


def is_call(n: Any, *targets: Any) -> bool:
    return isinstance(n, NODES) and n.op == "call_function" and n.target in targets


def value(n: fx.Node) -> Any:
    return n.meta["val"]


def rank(n: fx.Node) -> int:
    """How many dimensions ``n`` can be asked for: torch takes 0 and -1 for a tensor without any, too."""
    return max(value(n).dim(), 1)


def is_float(n: Any) -> bool:
    return isinstance(n, NODES) and isinstance(n.meta.get("val"), torch.Tensor) and value(n).is_floating_point()


def uncast(n: Any) -> Any:
    """``n`` without casts between floating types."""
    while is_call(n, aten.to.dtype) and is_float(n) and is_float(n.args[0]):
        n = n.args[0]
    return n


def operands(n: Any, *targets: Any) -> list[tuple[Any, Any]]:
    """Both orders of a commutative call's operands; [] when ``n`` is something else. ``add`` with alpha is none."""
    if not is_call(n, *targets) or len(n.args) != 2 or n.kwargs.get("alpha", 1) != 1:
        return []
    return [(n.args[0], n.args[1]), (n.args[1], n.args[0])]


def number(n: Any) -> float | int | None:
    """A Python number, or a constant scalar tensor made in the graph (``full([], c)``, ``scalar_tensor(c)``,
    ``torch.tensor(c)``).
    """
    if isinstance(n, (int, float)) and not isinstance(n, bool):
        return n
    if isinstance(n, fx.Node) and isinstance(n.meta.get("val"), torch.SymFloat):
        return symbols.float_value(value(n))  # with dynamic=True an eps is an input
    if is_call(n, aten.scalar_tensor.default) and isinstance(n.args[0], (int, float)):
        return n.args[0]
    if is_call(n, aten.full.default) and list(n.args[0]) == [] and isinstance(n.args[1], (int, float)):
        return n.args[1]
    if is_call(n, aten.zeros.default) and list(n.args[0]) == []:
        return 0
    if is_call(n, aten.reciprocal.default) and (divisor := number(n.args[0])):
        return 1 / divisor
    held = literal(n)
    if held is not None and held.dim() == 0 and held.dtype != torch.bool and not held.is_complex():
        with tracing.outside_tracing():
            return held.item()
    return None


def is_zeros(n: Any) -> bool:
    """Whether every element of ``n`` is certainly zero: made so, and not written to since."""
    while is_call(n, aten.expand.default, aten.to.dtype) and not n.meta.get("mutated"):
        n = n.args[0]
    if isinstance(n, fx.Node) and n.meta.get("mutated"):
        return False
    if is_call(n, aten.full.default, aten.full_like.default, aten.new_full.default):
        return argument(n, "fill_value") == 0
    return number(n) == 0 or is_call(n, aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)


def reciprocal(n: Any) -> fx.Node | None:
    """x when ``n`` is 1 / x in one operator."""
    return (
        n.args[0]
        if is_call(n, aten.reciprocal.default) or (is_call(n, aten.pow.Tensor_Scalar) and n.args[1] == -1)
        else None
    )


def literal(n: Any) -> torch.Tensor | None:
    """What ``torch.tensor(...)`` in the model's code is, when it has one element; a buffer, which may change between
    calls, is none.
    """
    held = written_down(n)
    return held if held is not None and held.numel() == 1 else None


def written_down(n: Any) -> torch.Tensor | None:
    """The tensor, of any size, that ``n`` is in the model's code."""
    while is_call(n, aten.detach.default, operator.getitem) and not n.meta["mutated"]:
        source = n.args[0]
        if n.target is operator.getitem:
            source = source.args[0][n.args[1]] if is_call(source, aten.broadcast_tensors.default) else None
            if source is None or value(source).shape != value(n).shape:
                return None
        n = source
    if not is_call(n, aten.lift_fresh_copy.default) or n.meta["mutated"] or n.args[0].op != "get_attr":
        return None
    held = getattr(n.graph.owning_module, str(n.args[0].target), None)
    copied_only = all(is_call(u, aten.lift_fresh_copy.default) for u in n.args[0].users)
    return held if copied_only and isinstance(held, torch.Tensor) and not tracing.is_fake(held) else None


def plus_number(n: Any) -> tuple[fx.Node, float] | None:
    """(x, c) when ``n`` is x + c."""
    for x, c in operands(n, *ADD):
        if (added := number(c)) is not None and isinstance(x, fx.Node):
            return x, added
    return None


def unscale(n: Any) -> tuple[Any, float]:
    """(x, factor) when ``n`` is x times numbers, however often; factor 1.0 when it is not scaled."""
    return unscalings(n)[-1]


def unscalings(n: Any) -> list[tuple[Any, float]]:
    """Every (x, factor) that ``n`` can be read as: itself times 1.0, and without one number after the other."""
    readings = [(n, 1.0)]
    while True:
        n, factor = readings[-1]
        result = next(
            ((x, scale) for x, c in operands(n, *MUL) if (scale := number(c)) is not None and isinstance(x, fx.Node)),
            None,
        )
        if result is not None:
            readings.append((result[0], factor * result[1]))
        elif is_call(n, *DIV) and (divisor := number(n.args[1])) and not n.kwargs:
            readings.append((n.args[0], factor / divisor))
        else:
            return readings


def match_square(n: Any) -> fx.Node | None:
    """x when ``n`` is x squared (capture spells all of them ``pow(x, 2)``)."""
    return n.args[0] if is_call(n, aten.pow.Tensor_Scalar) and n.args[1] == 2 else None


def inverse_root(n: Any) -> fx.Node | None:
    """x when ``n`` is 1 / sqrt(x) in one call."""
    return (
        n.args[0]
        if is_call(n, aten.rsqrt.default) or (is_call(n, aten.pow.Tensor_Scalar) and n.args[1] == -0.5)
        else None
    )


def root(n: Any) -> fx.Node | None:
    """x when ``n`` is sqrt(x)."""
    if is_call(n, aten.sqrt.default) or (is_call(n, aten.pow.Tensor_Scalar) and n.args[1] == 0.5):
        return n.args[0]
    return None


def uncolumn(n: Any) -> Any:
    """``n`` without a last dimension of one that was added to it."""
    if is_call(n, *RESHAPES):
        shape, before = list(value(n).shape), list(value(n.args[0]).shape)
        return n.args[0] if symbols.are_known_equal(shape, [*before, 1]) else n
    return n.args[0] if is_call(n, aten.unsqueeze.default) and n.args[1] % value(n).dim() == value(n).dim() - 1 else n


def is_column(n: Any, x: fx.Node) -> bool:
    """Whether ``n`` has one element for each row of ``x``."""
    shape = value(n).shape
    return len(shape) == value(x).dim() and symbols.statically_known_true(shape[-1] == 1)


def part(n: Any) -> Pieces | None:
    """Which part of which tensor ``n`` is: slice, split, chunk, narrow, select of an unflattened pair."""
    if is_call(n, operator.getitem) and is_call(n.args[0], aten.split_with_sizes.default):
        split, index = n.args
        sizes, dim = split.args[1], split.args[2] if len(split.args) > 2 else 0
        if not all(isinstance(s, int) for s in sizes[: index + 1]):
            return None  # sizes that the graph computes
        start = sum(sizes[:index])
        return Pieces(split.args[0], dim, start, start + sizes[index], 1)
    if is_call(n, aten.slice.Tensor):
        source, size = n.args[0], None
        dim = argument(n, "dim", 0) % value(source).dim()
        size = value(source).shape[dim]
        start, stop = argument(n, "start") or 0, argument(n, "end")
        stop = size if stop is None or stop == END else stop
        if not all(isinstance(v, int) for v in (start, stop, size)):
            return None
        start, stop = (start + size if start < 0 else start), (stop + size if stop < 0 else min(stop, size))
        return Pieces(source, dim, start, stop, argument(n, "step", 1))
    if is_call(n, aten.narrow.default) and all(isinstance(v, int) for v in n.args[1:]):
        return Pieces(n.args[0], n.args[1] % value(n.args[0]).dim(), n.args[2], n.args[2] + n.args[3], 1)
    return None


def indexed_rows(n: Any) -> tuple[fx.Node, fx.Node] | None:
    """(x, index) when ``n`` is x[index], whole rows, with an index of one dimension."""
    if is_call(n, aten.index.Tensor) and len(n.args[1]) == 1:
        x, index = n.args[0], n.args[1][0]
    elif is_call(n, aten.index_select.default) and n.args[1] == 0:
        x, index = n.args[0], n.args[2]
    elif (
        is_call(n, aten.gather.default)
        and value(n).dim() == 2
        and n.args[1] % 2 == 0
        and value(n).shape[1] == value(n.args[0]).shape[1]
    ):
        x, index = n.args[0], row_number(n.args[2])
    else:
        return None
    integers = index is not None and value(index).dim() == 1 and value(index).dtype in (torch.int32, torch.int64)
    return (x, index) if integers else None


def row_number(n: Any) -> fx.Node | None:
    """index [rows] when ``n`` [rows, width] has it in every column."""
    column = n.args[0] if is_call(n, aten.expand.default, aten.repeat.default) else n
    if (
        not is_call(column, aten.unsqueeze.default, *RESHAPES)
        or value(column).dim() != 2
        or value(column).shape[1] != 1
        or value(column.args[0]).dim() != 1
    ):
        return None
    return column.args[0] if symbols.statically_known_true(value(column).shape[0] == value(n).shape[0]) else None


def same(a: Any, b: Any, depth: int = 8) -> bool:
    """True when two nodes certainly hold the same value: one node, or equal pure calls on the same values."""
    if a is b:
        return True
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(same(x, y, depth) for x, y in zip(a, b))
    if not (isinstance(a, NODES) and isinstance(b, NODES)):
        return type(a) is type(b) and a == b
    x, y = literal(a), literal(b)
    if x is not None and y is not None:
        with tracing.outside_tracing():
            return (x.dtype, x.shape, x.device) == (y.dtype, y.shape, y.device) and x.item() == y.item()
    if (
        depth == 0
        or a.op != "call_function"
        or a.target != b.target
        or a.kwargs != b.kwargs
        or a.meta["mutated"]
        or b.meta["mutated"]
    ):
        return False
    pure = a.target is operator.getitem or (
        isinstance(a.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded not in a.target.tags
    )
    return pure and same(a.args, b.args, depth - 1)


# --------------------------------------------------------------------------- rewriting


def unsafe(region: list[fx.Node], inputs: list[Any]) -> str | None:
    """Why the nodes of ``region``, which read ``inputs``, must not become one node; None when they may."""
    if len({n.meta["grad_enabled"] for n in region}) > 1:
        return "part of the pattern runs with gradients off (torch.no_grad) and part with them on"
    inputs = [i for i in inputs if isinstance(i, fx.Node)]
    for n in [*region, *inputs]:
        if n.meta.get("mutated") and not (n in inputs and n not in region and _written_before(n, region)):
            return f"{n.name} is changed in place"
    return None


def _written_before(n: fx.Node, region: list[fx.Node]) -> bool:
    """True when every change to the memory of ``n`` comes before the first node of ``region`` that reads it: it is read
    when done.
    """
    storage, members, reached = fake.storage_of(value(n)), set(region), False
    for node in n.graph.nodes:
        reached = reached or (
            node in members
            and any(
                isinstance(value(a), torch.Tensor) and fake.storage_of(value(a)) == storage
                for a in node.all_input_nodes
            )
        )
        if reached and any(
            isinstance(value(w), torch.Tensor) and fake.storage_of(value(w)) == storage for w in written_nodes(node)
        ):
            return False
    return True


def hint(size: Any) -> int:
    """``size``, or the value that a symbolic one was traced with."""
    return size if isinstance(size, int) else fake.hint(size)
