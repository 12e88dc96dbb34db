"""What a fault is, kind by kind: ``find(node, place)`` gives pairs of a node and what stands in its place instead."""

from __future__ import annotations

import ast
import copy
from dataclasses import dataclass
from typing import Callable, Iterator

Pairs = Iterator[tuple[ast.AST, ast.AST]]


@dataclass(frozen=True)
class Place:
    """Where a node stands: its file, the function or class (dotted; "" outside of all), the statement's first line."""

    file: str
    function: str
    statement: int


def _int(node: ast.AST | None) -> int | None:
    """The whole number that is written there, also a negative one."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        n = _int(node.operand)
        return None if n is None else -n
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    return None


def _name(node: ast.AST) -> str:
    """The last name of a dotted one."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _called(node: ast.AST) -> str:
    return _name(node.func) if isinstance(node, ast.Call) else ""


def _replace(node: ast.AST, **fields: object) -> ast.AST:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


# ---------------------------------------------------------------- sign

NUMERIC = (ast.Mult, ast.Div, ast.FloorDiv, ast.Pow, ast.Sub)


def _is_numeric(node: ast.AST) -> bool:
    return (
        _int(node) is not None
        or isinstance(node, ast.Constant)
        and type(node.value) is float
        or isinstance(node, ast.BinOp)
        and isinstance(node.op, NUMERIC)
    )


def sign(node: ast.AST, place: Place) -> Pairs:
    """``a - b`` is ``a + b``, ``-a`` is ``a``, and a sum of numbers a difference."""
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, ast.Sub):
            yield node, _replace(node, op=ast.Add())
        elif isinstance(node.op, ast.Add) and (_is_numeric(node.left) or _is_numeric(node.right)):
            yield node, _replace(node, op=ast.Sub())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        yield node, node.operand


# ---------------------------------------------------------------- axis

NEIGHBOUR = {-3: -2, -2: -1, -1: -2, 0: 1, 1: 0, 2: 1, 3: 2}
AXES = ("dim", "axis", "dims")
BY_AXIS = frozenset("sum mean amax amin softmax log_softmax cumsum argmax unsqueeze squeeze size chunk unbind".split())
SIZES = ("shape", "sizes", "strides", "dims")


def _neighbour(node: ast.AST) -> Pairs:
    n = _int(node)
    if n in NEIGHBOUR:
        yield node, ast.Constant(NEIGHBOUR[n])


def axis(node: ast.AST, place: Place) -> Pairs:
    """The dimension beside."""
    if isinstance(node, ast.keyword) and node.arg in AXES:
        yield from _neighbour(node.value)
    elif isinstance(node, ast.Subscript) and _name(node.value) in SIZES and isinstance(node.ctx, ast.Load):
        yield from _neighbour(node.slice)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _called(node) in BY_AXIS and node.args:
        yield from _neighbour(node.args[-1])


# ---------------------------------------------------------------- edge, comparison

EDGES = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
OPPOSITES = {ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn}


def edge(node: ast.AST, place: Place) -> Pairs:
    """``<`` for ``<=`` and the like; a triangle whose diagonal is one further."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in EDGES:
        yield node, _replace(node, ops=[EDGES[type(node.ops[0])]()])
    elif _called(node) in ("tril", "triu", "tril_", "triu_"):
        has_keyword = bool(node.keywords)  # type: ignore[attr-defined]
        if not has_keyword:
            args = [*node.args]  # type: ignore[attr-defined]
            yield node, _replace(node, args=args, keywords=[ast.keyword("diagonal", ast.Constant(1))])


def comparison(node: ast.AST, place: Place) -> Pairs:
    """The opposite condition; ``or`` for ``and``."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in OPPOSITES:
        yield node, _replace(node, ops=[OPPOSITES[type(node.ops[0])]()])
    elif isinstance(node, ast.BoolOp):
        yield node, _replace(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())


# ---------------------------------------------------------------- dtype

TYPES = {
    "float64": "float32",
    "float32": "bfloat16",
    "bfloat16": "float16",
    "float16": "bfloat16",
    "int64": "int32",
    "int32": "int16",
    "bool": "uint8",
}


def dtype(node: ast.AST, place: Place) -> Pairs:
    """A type with fewer bits, and a cast that is not made."""
    if isinstance(node, ast.Attribute) and _name(node.value) == "torch" and node.attr in TYPES:
        yield node, _replace(node, attr=TYPES[node.attr])
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        is_cast = node.func.attr in ("float", "double") and not node.args
        if is_cast or node.func.attr in ("to", "type_as") and len(node.args) == 1 and "dtype" in ast.unparse(node):
            yield node, node.func.value


# ---------------------------------------------------------------- gradient


def gradient(node: ast.AST, place: Place) -> Pairs:
    """A gradient that is missing, or is not asked for."""
    if isinstance(node, ast.Return) and _is_backward(place.function):
        if isinstance(node.value, ast.Tuple):
            for n in node.value.elts:
                if not isinstance(n, (ast.Constant, ast.Starred)):
                    yield n, ast.Constant(None)
        elif isinstance(node.value, (ast.Name, ast.Call, ast.BinOp)):
            yield node.value, ast.BinOp(node.value, ast.Mult(), ast.Constant(0))
    elif isinstance(node, ast.Attribute) and node.attr == "requires_grad" and isinstance(node.ctx, ast.Load):
        yield node, ast.Constant(False)
    elif isinstance(node, ast.Subscript) and _name(node.value) == "needs_input_grad":
        yield node, ast.Constant(False)
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "detach"
        and not node.args
    ):
        yield node, node.func.value


def _is_backward(function: str) -> bool:
    name = function.rpartition(".")[2]
    return any(w in name for w in ("backward", "grad")) and not any(w in name for w in ("cost", "shard", "fake"))


# ---------------------------------------------------------------- operands

COMMUTATIVE = frozenset(
    """isinstance issubclass getattr hasattr setattr max min gcd lcm maximum minimum add mul logical_and logical_or
    print same zip allclose equal is_ eq ne cast""".split()
)


def operands(node: ast.AST, place: Place) -> Pairs:
    """The first two the other way round."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Sub, ast.Div, ast.FloorDiv, ast.MatMult)):
        if ast.unparse(node.left) != ast.unparse(node.right):
            yield node, _replace(node, left=node.right, right=node.left)
    elif isinstance(node, ast.Call) and 2 <= len(node.args) <= 4 and _called(node) not in COMMUTATIVE:
        a, b = node.args[:2]
        if all(isinstance(x, (ast.Name, ast.Attribute)) for x in (a, b)) and ast.unparse(a) != ast.unparse(b):
            yield node, _replace(node, args=[b, a, *node.args[2:]])


# ---------------------------------------------------------------- plan

PLANS = ("planning/", "sharding/", "partition/", "cost/", "passes/overlap/", "passes/recompute/", "passes/sharding/")


def plan(node: ast.AST, place: Place) -> Pairs:
    """Off by one, where plans and costs are made."""
    if not place.file.startswith(PLANS):
        return
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)) and _int(node.right) is not None:
        yield node.right, ast.Constant(_int(node.right) + 1)  # type: ignore[operator]
    elif isinstance(node, ast.Slice):
        for end in (node.lower, node.upper):
            if _int(end) is not None:
                yield end, ast.Constant(_int(end) + 1)  # type: ignore[misc,operator]
    elif _called(node) == "range":
        end = node.args[-1 if len(node.args) < 3 else 1]  # type: ignore[attr-defined]
        yield end, ast.BinOp(end, ast.Sub(), ast.Constant(1))


# ---------------------------------------------------------------- wait


def wait(node: ast.AST, place: Place) -> Pairs:
    """A collective, or a copy, that nobody waits for."""
    if isinstance(node, ast.Expr) and _called(node.value) in ("wait", "_wait", "wait_stream", "wait_event"):
        yield node, ast.Pass()
    elif _called(node) == "wait_tensor":
        yield node, node.args[0]  # type: ignore[attr-defined]
    elif _called(node) == "is_wait":
        yield node, ast.Constant(False)
    elif _called(node) in ("_waits", "waits_of"):
        yield node, ast.List([], ast.Load())


# ---------------------------------------------------------------- alias

COPIES = ("list", "dict", "set")
EFFECTS = frozenset(
    "update discard remove clear replace_all_uses_with replace_input_with pop popleft recompile".split()
)


def alias(node: ast.AST, place: Place) -> Pairs:
    """A copy that is not made, and state that is not brought up to date."""
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("clone", "copy", "contiguous") and not node.args:
            yield node, node.func.value
        elif _called(node) in COPIES and len(node.args) == 1 and isinstance(node.args[0], (ast.Name, ast.Attribute)):
            yield node, node.args[0]
    elif isinstance(node, ast.List) and len(node.elts) == 1 and isinstance(node.elts[0], ast.Starred):
        yield node, node.elts[0].value
    elif isinstance(node, ast.Dict) and node.keys == [None]:
        yield node, node.values[0]
    elif isinstance(node, ast.Expr) and _called(node.value) in EFFECTS:
        yield node, ast.Pass()


KINDS: dict[str, Callable[[ast.AST, Place], Pairs]] = {
    f.__name__: f for f in (sign, axis, edge, comparison, dtype, gradient, operands, plan, wait, alias)
}
