"""Mixtures whose experts are a list of modules, with a loop over them: kept in one graph.

For each expert such a loop takes the tokens that chose it (``torch.where``, ``nonzero``, a boolean index), runs the
expert on them and adds the results up, and often leaves out an expert that nobody chose (``if rows.numel() > 0``,
``if not mask.any(): continue``). Dynamo ends its graph at each of these. While a graph is traced, a copy of the method
runs, in whose loops rows are chosen by :mod:`mindspeed_fx.capture.chosen_rows` and such conditions hold: an expert of
no rows adds nothing. ``canonicalize.expert_loop`` makes products of all experts of it, or says why not; then the method
is read as it was written, and Dynamo ends its graphs as on one device.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import logging
import textwrap
import types
from dataclasses import dataclass
from typing import Any, Callable, Iterator

import torch
from torch import nn

from mindspeed_fx.capture import chosen_rows
from mindspeed_fx.capture.chosen_rows import ChosenRowsError
from mindspeed_fx.compat import dynamo
from mindspeed_fx.sharding.plan import ShardingError

logger = logging.getLogger(__name__)

TAKES_ROWS = {"where", "nonzero", "argwhere"}
COUNTS = {"numel", "nelement", "sum", "size", "item", "count_nonzero"}


@dataclass
class Reading:
    """A model that is read once, and not parallelized."""

    reads_loops: bool = True


def keep_in_one_graph(model: nn.Module, sharding: Any) -> None:
    """Give every module of ``model`` with a loop over a list of experts a class whose loop stays in one graph, for as
    long as ``sharding.reads_loops`` holds."""
    for module in list(model.modules()):
        lists = tuple(name for name, child in module.named_children() if is_list_of_experts(child))
        if lists and "_loops" not in module.__dict__ and (kind := _with_loops(type(module), lists)) is not None:
            module.__dict__["_loops"] = sharding
            module.__class__ = kind


@contextlib.contextmanager
def kept_in_one_graph(model: nn.Module) -> Iterator[None]:
    """:func:`keep_in_one_graph` for as long as a model is read, and not afterwards."""
    before = [(m, type(m)) for m in model.modules() if "_loops" not in m.__dict__]
    keep_in_one_graph(model, Reading())
    try:
        yield
    finally:
        for module, kind in before:
            if module.__dict__.pop("_loops", None) is not None:
                module.__class__ = kind


@contextlib.contextmanager
def reading_loops(sharding: Any, again: bool = True) -> Iterator[None]:
    """A graph with loops is captured within. One that cannot be read is read by Dynamo ``again``, as it is written.

    Raises:
        ShardingError: what cannot be read, where nothing is read again.
    """
    try:
        yield
    except ChosenRowsError as e:
        why = f"a loop over a list of experts cannot be divided: {e}"
        if sharding is None or not again or not sharding.reads_loops:
            raise ShardingError(why) from None
        logger.warning('plan "%s": %s; it is run as it is written, whole on every rank', sharding.plan.name, why)
        sharding.reads_loops = False
        raise dynamo.start_over(why) from None


def is_list_of_experts(module: nn.Module) -> bool:
    """Whether ``module`` is a list of two or more modules of one class with parameters of the same names and shapes."""
    if not isinstance(module, nn.ModuleList) or len(module) < 2:
        return False
    kinds = {(type(m), tuple((n, p.shape) for n, p in m.named_parameters())) for m in module}
    return len(kinds) == 1 and next(iter(kinds))[1] != ()


def listed_parameters(model: nn.Module) -> dict[str, torch.Size]:
    """Parameters of experts that a loop goes over, one name for those of all experts of a list ("mlp.experts.*.w1"),
    and the shape of each."""
    results = {}
    for path, module in model.named_modules():
        lists = [(name, child) for name, child in module.named_children() if is_list_of_experts(child)]
        if not lists or ("_loops" not in module.__dict__ and not _with_loops(type(module), tuple(n for n, _ in lists))):
            continue
        for name, child in lists:
            results.update({f"{path}.{name}.*.{n}".lstrip("."): p.shape for n, p in child[0].named_parameters()})
    return results


@functools.cache
def _with_loops(cls: type, lists: tuple[str, ...]) -> type | None:
    """``cls`` with copies of the methods that loop over these lists; None without any."""
    methods = {}
    for name in dir(cls):
        own = inspect.getattr_static(cls, name)
        is_own = isinstance(own, types.FunctionType) and not (own.__module__ or "").startswith("torch.")
        if is_own and (copy := _copy_of(own, lists)) is not None:
            methods[name] = _either(own, copy)
    if not methods:
        return None
    return type(cls.__name__, (cls,), {"__module__": cls.__module__, "__doc__": cls.__doc__, **methods})


def _either(own: Callable, copy: Callable) -> Callable:
    @functools.wraps(own)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() or not self._loops.reads_loops:
            return own(self, *args, **kwargs)
        return copy(self, *args, **kwargs)

    return method


def _copy_of(method: types.FunctionType, lists: tuple[str, ...]) -> Callable | None:
    """``method`` with its loops over experts changed; None where it has none."""
    try:
        lines, first = inspect.getsourcelines(method)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return None
    if not isinstance(tree.body[0], ast.FunctionDef) or tree.body[0].decorator_list:
        return None
    if any(isinstance(n, ast.Attribute) and _is_mangled(n.attr) for n in ast.walk(tree)):
        return None
    loops = [n for n in ast.walk(tree) if isinstance(n, ast.For) and _is_over_experts(n, lists) and _takes_rows(n)]
    if not loops:
        return None
    for loop in loops:
        _Conditions(loop).visit(loop)
        _Rows().visit(loop)
    ast.increment_lineno(tree, first - 1)
    names = (*method.__code__.co_freevars, *ROWS)
    outer = ast.parse(f"def outer({', '.join(names)}):\n  return None").body[0]
    outer.body = [tree.body[0], *outer.body]  # type: ignore[attr-defined]
    module = ast.fix_missing_locations(ast.Module([outer], []))
    code = compile(module, method.__code__.co_filename, "exec")
    body = _code(_code(code, "outer"), method.__name__)
    cells = dict(zip(names, method.__closure__ or ())) | {n: types.CellType(f) for n, f in ROWS.items()}
    closure = tuple(cells[name] for name in body.co_freevars)
    copy = types.FunctionType(body, method.__globals__, method.__name__, method.__defaults__, closure)
    copy.__kwdefaults__ = method.__kwdefaults__
    return copy


def _is_mangled(name: str) -> bool:
    """Whether a class gives ``self.name`` another name, which a copy outside of it would not."""
    return name.startswith("__") and not name.endswith("__")


def _code(code: types.CodeType, name: str) -> types.CodeType:
    return next(c for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == name)


def _is_over_experts(loop: ast.For, lists: tuple[str, ...]) -> bool:
    """Whether the loop goes over one of the lists, or takes modules of one."""
    lengths = [n for n in ast.walk(loop.iter) if isinstance(n, ast.Call) and _called(n) == "len"]
    counted = {id(n) for call in lengths for n in ast.walk(call)}
    return any(_is_list(n, lists) for n in ast.walk(loop.iter) if id(n) not in counted) or any(
        isinstance(n, ast.Subscript) and _is_list(n.value, lists) for n in ast.walk(loop)
    )


def _is_list(n: ast.AST, lists: tuple[str, ...]) -> bool:
    return isinstance(n, ast.Attribute) and n.attr in lists and isinstance(n.value, ast.Name) and n.value.id == "self"


def _takes_rows(loop: ast.For) -> bool:
    """Whether tokens are chosen in the loop: by a call that finds them, or by a mask that is compared there."""
    conditions = {id(n) for i in ast.walk(loop) if isinstance(i, ast.If) for n in ast.walk(i.test)}
    for n in ast.walk(loop):
        if isinstance(n, ast.Call) and _called(n) in TAKES_ROWS:
            return True
        if isinstance(n, ast.Compare) and id(n) not in conditions and isinstance(n.ops[0], ast.Eq):
            return True
    return False


def _called(n: ast.Call) -> str:
    return n.func.attr if isinstance(n.func, ast.Attribute) else n.func.id if isinstance(n.func, ast.Name) else ""


ROWS = {f"_mindspeed_{f.__name__}": f for f in (chosen_rows.places, chosen_rows.nonzero, chosen_rows.index)}
"""What the copies call, by the names that they have there."""


class _Rows(ast.NodeTransformer):
    """``torch.where(mask)``, ``nonzero`` and an index that may be a mask become calls of :data:`ROWS`."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name, keywords = _called(node), {k.arg for k in node.keywords}
        of_torch = isinstance(node.func, ast.Attribute) and _is_torch(node.func.value)
        inputs = node.args if of_torch else [node.func.value] if isinstance(node.func, ast.Attribute) else []
        if name == "where" and of_torch and len(inputs) == 1 and not keywords:
            return _call(node, "places", inputs, [])
        if name in ("nonzero", "argwhere") and len(inputs) == 1 and keywords <= {"as_tuple"}:
            return _call(node, "nonzero", inputs, node.keywords)
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.slice, (ast.Tuple, ast.Slice, ast.Constant)):
            node.slice = _call(node.slice, "index", [node.slice], [])
        return node


def _call(at: ast.AST, name: str, args: list[ast.expr], keywords: list[ast.keyword]) -> ast.Call:
    call = ast.Call(ast.Name(f"_mindspeed_{name}", ast.Load()), args, keywords)
    return ast.fix_missing_locations(ast.copy_location(call, at))


class _Conditions(ast.NodeTransformer):
    """What asks whether an expert has rows is true: the body of ``if rows:`` runs, ``if not rows: continue`` does not
    leave."""

    def __init__(self, loop: ast.For):
        self.assigned = {
            n.targets[0].id: n.value
            for n in ast.walk(loop)
            if isinstance(n, ast.Assign) and len(n.targets) == 1 and isinstance(n.targets[0], ast.Name)
        }

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)
        holds = self._says_rows(node.test)
        leaves = all(isinstance(n, (ast.Continue, ast.Pass)) for n in node.body)
        if not node.orelse and (holds is True or (holds is False and leaves)):
            node.test = ast.copy_location(ast.Constant(holds), node.test)
        return node

    def _says_rows(self, test: ast.AST) -> bool | None:
        """True for "there are rows", False for "there are none", None for anything else."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self._says_rows(test.operand)
            return None if inner is None else not inner
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and self._is_count(test.left):
            limit = getattr(test.comparators[0], "value", None)
            word = (type(test.ops[0]), limit) if type(limit) is int else None
            if word in ((ast.Gt, 0), (ast.NotEq, 0), (ast.GtE, 1)):
                return True
            return False if word in ((ast.Eq, 0), (ast.Lt, 1), (ast.LtE, 0)) else None
        return True if self._is_any(test) or self._is_count(test) else None

    def _is_any(self, n: ast.AST) -> bool:
        n = self.assigned.get(n.id, n) if isinstance(n, ast.Name) else n
        if not isinstance(n, ast.Call):
            return False
        if _called(n) == "item" and isinstance(n.func, ast.Attribute):
            return self._is_any(n.func.value)
        whole = len(n.args) == (1 if isinstance(n.func, ast.Attribute) and _is_torch(n.func.value) else 0)
        return _called(n) == "any" and whole and not n.keywords

    def _is_count(self, n: ast.AST) -> bool:
        n = self.assigned.get(n.id, n) if isinstance(n, ast.Name) else n
        if isinstance(n, ast.Subscript) and isinstance(n.value, ast.Attribute) and n.value.attr == "shape":
            return getattr(n.slice, "value", None) == 0
        return isinstance(n, ast.Call) and (_called(n) in COUNTS or _called(n) == "len")


def _is_torch(n: ast.AST) -> bool:
    return isinstance(n, ast.Name) and n.id == "torch"
