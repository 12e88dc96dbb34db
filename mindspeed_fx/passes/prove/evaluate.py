"""From a graph to terms: every node's value as a function from indices to terms.

What has no rule is taken apart by tracing it (composite operators, torch's decompositions, our operators' references);
what then remains is a function of its whole arguments of which nothing is known, which equals itself.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from mindspeed_fx.compat import fake, tracing
from mindspeed_fx.kernels.base import find
from mindspeed_fx.passes.prove import rules
from mindspeed_fx.passes.prove.conditions import is_zero_real, negate
from mindspeed_fx.passes.prove.functions import load
from mindspeed_fx.passes.prove.obligations import attribute_of
from mindspeed_fx.passes.prove.rules.base import RULES
from mindspeed_fx.passes.prove.rules.pointwise import detach
from mindspeed_fx.passes.prove.sums import whole
from mindspeed_fx.passes.prove.terms import add, imaginary, mul
from mindspeed_fx.passes.prove.values import Unsupported, Value, scalar

assert rules

_TRACES: dict[tuple, fx.GraphModule | None] = {}
"""Operator and layout of its arguments -> what it is made of; None where tracing shows the operator alone."""
MOST_TRACES = 2000


def leaf(name: str, val: torch.Tensor) -> Value:
    """A tensor of which nothing is known."""
    kind = Value((), val.dtype, lambda _: scalar(0)).kind

    def element(i: Any) -> Any:
        if val.dtype.is_complex:
            return add(load(f"{name}.real", i, "real"), mul(imaginary(), load(f"{name}.imag", i, "real")))
        return load(f"integer {name}" if kind == "integer" else name, i, kind)

    return Value([fake.hint(n) for n in val.shape], val.dtype, element)


class Evaluator:
    """Values of a graph's nodes, on demand.

    Args:
        leaves: nodes that stand for themselves, with their values.
        own: whether the graph is the model's, whose detached values have no gradient, or an operator's definition.
    """

    def __init__(self, gm: fx.GraphModule, leaves: dict[fx.Node, Any], own: bool = True):
        self.gm, self.own = gm, own
        self.values: dict[fx.Node, Any] = dict(leaves)
        self.inside: dict[fx.Node, Any] = {}
        """Values under no_grad as their readers there see them: only what leaves is detached."""

    def value(self, node: fx.Node) -> Any:
        """A Value, a tuple of them, or a number."""
        pending = [node]
        while pending:  # deep graphs: no recursion
            n = pending[-1]
            if n in self.values:
                pending.pop()
                continue
            missing = [a for a in n.all_input_nodes if a not in self.values]
            if missing:
                pending += missing
                continue
            self.values[n] = self._compute(n)
            pending.pop()
        return self.values[node]

    def _compute(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return self._constant(node)
        if node.op != "call_function":
            raise Unsupported(f"node {node.name} of kind {node.op}")
        detached = self.own and node.meta.get("grad_enabled") is False
        args, kwargs = fx.map_arg(
            (node.args, node.kwargs), lambda n: self.inside.get(n, self.values[n]) if detached else self.values[n]
        )
        if node.target is operator.getitem:
            return args[0][args[1]]
        val = node.meta.get("val")
        if isinstance(val, (int, torch.SymInt)):
            return fake.hint(val)
        if not isinstance(node.target, torch._ops.OpOverload):
            raise Unsupported(f"{getattr(node.target, '__name__', node.target)}")
        result = self._call(node, val, args, kwargs)
        cut = any(n in self.inside or n.meta.get("needs_grad") for n in node.all_input_nodes)
        if detached and cut and isinstance(result, Value):
            self.inside[node] = result
            return detach(val, result)
        return result

    def _constant(self, node: fx.Node) -> Value:
        value = attribute_of(self.gm, str(node.target))
        if not isinstance(value, torch.Tensor):
            raise Unsupported(f"attribute {node.target}")
        if value.numel() == 1 and not fake.is_fake(value) and value.dtype != torch.bool and not value.requires_grad:
            number = scalar(value.item())
            return Value(value.shape, value.dtype, lambda _: number)
        if not self.own:  # names are of the definition: another has another tensor under this one
            raise Unsupported("a constant tensor within an operator's definition")
        return leaf(f"attribute {node.target}", value)

    def _call(self, node: fx.Node, val: Any, args: Any, kwargs: Any) -> Any:
        if node.target._schema.is_mutable:
            raise Unsupported(f"{node.target} writes in place")
        name = str(node.target.overloadpacket)
        if name == "aten.detach" and not self.own:
            return args[0]
        if name in RULES:
            try:
                return RULES[name](_sized(val), *args, **kwargs)
            except Unsupported:
                pass
        body = _traced(node)
        if body is None:
            return _opaque(node, _sized(val), args, kwargs)
        inputs = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, Value)]
        placeholders = [n for n in body.graph.nodes if n.op == "placeholder"]
        inner = Evaluator(body, dict(zip(placeholders, inputs, strict=True)), own=False)
        output = next(n for n in body.graph.nodes if n.op == "output").args[0]
        return pytree.tree_map_only(fx.Node, inner.value, output)


class _Sized:
    """A fake tensor with plain integers for sizes."""

    def __init__(self, val: torch.Tensor):
        self.shape, self.dtype = tuple(fake.hint(n) for n in val.shape), val.dtype


def _sized(val: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, _Sized, val)


def _traced(node: fx.Node) -> fx.GraphModule | None:
    """The operator's definition, reference or decomposition as a graph of its tensors; None where there is none."""
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    values = [a.meta.get("val") if isinstance(a, fx.Node) else a for a in leaves]
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    keys = [fake.layout_key(v) if isinstance(v, torch.Tensor) else repr(v) for v in values]
    key = (node.target, spec, tuple(keys))
    if key in _TRACES:
        return _TRACES[key]
    operator_of = find(node.target)
    if torch.Tag.nondeterministic_seeded in node.target.tags:
        raise Unsupported(f"{node.target} draws random numbers")
    target = node.target if operator_of is None else operator_of.reference

    def run(*inputs: torch.Tensor) -> Any:
        rest = iter(inputs)
        args, kwargs = pytree.tree_unflatten([next(rest) if isinstance(v, torch.Tensor) else v for v in values], spec)
        return target(*args, **kwargs)

    body = None
    if operator_of is None or not operator_of.opaque:
        body = _trace(run, tensors, node.target)
    if len(_TRACES) > MOST_TRACES:
        _TRACES.clear()
    _TRACES[key] = body
    return body


def _trace(run: Any, tensors: list[torch.Tensor], target: Any) -> fx.GraphModule | None:
    for table in (None, tracing.core_decompositions()):
        try:
            body = tracing.make_fx_decomposed(run, tensors, table)
        except Exception as error:  # noqa: BLE001  whatever the operator raises: it stays whole
            raise Unsupported(f"{target} cannot be traced: {str(error).splitlines()[0][:120]}") from error
        calls = [n for n in body.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
        if not any(n.target is target for n in calls):
            if any(isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable for n in calls):
                body = tracing.make_fx_decomposed(torch.func.functionalize(run), tensors, table)
            return body
    return None


def _undefined(out: Any, name: str) -> Value:
    """Memory that is to be written: of an element that is read before nothing is known but where it lies."""

    def element(i: Any) -> Any:
        p = whole(name, [], i)
        return negate(is_zero_real(p)) if out.dtype == torch.bool else p

    return Value(out.shape, out.dtype, element)


def _opaque(node: fx.Node, val: Any, args: Any, kwargs: Any) -> Any:
    """A function of whole tensors: equal where the operator, its numbers and its tensors are."""
    if "empty" in str(node.target):
        return pytree.tree_map_only(_Sized, lambda out: _undefined(out, f"{node.target} {node.name}"), val)
    leaves = pytree.tree_leaves((args, kwargs))
    tensors = [(v.shape, v.at) for v in leaves if isinstance(v, Value)]
    numbers = [repr(v) for v in leaves if not isinstance(v, Value)]
    name = f"{node.target}({', '.join(numbers)})"

    def result(number: int, out: Any) -> Value:
        if out.dtype.is_complex:
            raise Unsupported(f"{node.target} of complex numbers")

        def element(i: Any) -> Any:
            p = whole(f"{name}.{number}", tensors, i)
            return negate(is_zero_real(p)) if out.dtype == torch.bool else p

        return Value(out.shape, out.dtype, element)

    if isinstance(val, _Sized):
        return result(0, val)
    return tuple(result(n, out) for n, out in enumerate(val))
