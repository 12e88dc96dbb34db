"""A chunk that torch's FSDP2 divides as one graph: weights are gathered, and gradients scattered, inside it.

FSDP2 does both in hooks of modules that torch keeps from Dynamo (``torch._dynamo.disable``; 2.13 has no setting that
would trace them), so that with its hooks a chunk is a graph between any two of them. Here the hooks are taken off when
a chunk is compiled. Where the model reads a weight, its graph gathers the rows of all ranks, and its backward sends the
sum of the gradient's rows to their ranks, in FSDP2's types and divided as FSDP2 divides; which gathers run beside which
compute is the scheduler's. Parameters stay FSDP2's DTensors for optimizers, clipping and checkpoints.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Callable, Iterable

import torch
from torch import Tensor, nn

from mindspeed_fx.compat import dynamo, fsdp
from mindspeed_fx.megatron import collectives
from mindspeed_fx.training import freed_weights


class Rows:
    """This rank's rows of a weight, as a leaf of the graph's gradients in the DTensor's memory.

    With what lengthens them to the longest of the ranks, so that every rank has the same graph.

    Args:
        weight: of which they are.
    """

    def __init__(self, weight: fsdp.DividedWeight) -> None:
        self.weight, self.group, self.copies, self.device = weight, weight.group, weight.copies, weight.device
        self.length, self.types = weight.parameter.shape[0], (weight.compute_dtype, weight.reduce_dtype)
        self.leaf = nn.Parameter(weight.rows(), requires_grad=weight.parameter.requires_grad)
        if weight.is_freed:
            freed_weights.free_after_forward(self.leaf)
        if weight.parameter.requires_grad:
            self.leaf.register_post_accumulate_grad_hook(functools.partial(_hand_over, weight))

    def whole(self) -> Tensor:
        """The weight, [length, ...] in the type that computes."""
        return _Whole.apply(self.leaf, self.length, self.group, self.copies, self.device, self.types)

    def follow(self) -> None:
        """Be the DTensor's memory also where something has given it another."""
        rows = self.weight.rows()
        if rows.data_ptr() != self.leaf.data_ptr():
            self.leaf.data = rows


def _hand_over(weight: fsdp.DividedWeight, leaf: Tensor) -> None:
    """The gradient of the rows is the DTensor's."""
    gradient, before = weight.as_gradient(leaf.grad), weight.parameter.grad
    weight.parameter.grad = gradient if before is None else before + gradient
    leaf.grad = None


class _Whole(torch.autograd.Function):
    """Forward: all-gather of rows. Backward: the mean gradient's own rows, over all ranks of all copies."""

    @staticmethod
    def forward(ctx, rows, length, group, copies, device, types):
        compute_dtype, ctx.reduce_dtype = types
        ctx.group, ctx.copies, ctx.home = group, copies, (rows.device, rows.dtype)
        whole = collectives.gather(rows.to(device, compute_dtype), group)
        ctx.more = whole.shape[0] - length
        return whole[:length].clone() if ctx.more else whole

    @staticmethod
    def backward(ctx, grad):
        ranks = ctx.group.size() * (1 if ctx.copies is None else ctx.copies.size())
        grad = grad.to(ctx.reduce_dtype or grad.dtype)
        before = first_divisor(ranks, grad.dtype)
        grad = grad / before if before > 1 else grad
        grad = torch.cat([grad, grad.new_zeros(ctx.more, *grad.shape[1:])]) if ctx.more else grad
        grad = collectives.reduce_scatter(grad, ctx.group)
        if ctx.copies is not None:
            grad = collectives.all_reduce(grad, ctx.copies)
        return (grad / (ranks / before)).to(*ctx.home), None, None, None, None, None


def first_divisor(ranks: int, dtype: torch.dtype) -> int:
    """By what gradients are divided before they are added up, about sqrt(ranks) in float16 as FSDP2 does it."""
    if dtype != torch.float16:
        return 1
    return 2 ** math.ceil(math.log2(ranks) / 2)


def compile_whole(model: nn.Module, options: dict[str, Any]) -> None:
    """Compile ``model``, which FSDP2 divides, in one graph, in place.

    Args:
        options: of the backend.
    """
    rows: dict[int, Rows] = {}
    by_module: dict[nn.Module, dict[str, Rows]] = {}
    for weight in fsdp.weights(model):
        if id(weight.fsdp) not in rows:
            rows[id(weight.fsdp)] = Rows(weight)
        by_module.setdefault(weight.module, {})[weight.name] = rows[id(weight.fsdp)]
    for module, of_names in by_module.items():
        _read_gathered(module, of_names)
    for module, policy in fsdp.take_off_hooks(model):
        _cast_as(module, policy)
    dynamo.compile_alone(module=model, backend="mindspeed", fullgraph=True, options=options)
    dynamo.before_compiled_calls(model, lambda: _follow(rows.values()))


def _follow(rows: Iterable[Rows]) -> None:
    for each in rows:
        each.follow()


def _read_gathered(module: nn.Module, rows: dict[str, Rows]) -> None:
    """Have a graph that reads a parameter of ``module`` gather it; outside of graphs it is the DTensor."""
    kind = type(module)
    readers = {name: property(functools.partial(_read, name)) for name in rows}
    module.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, **readers})
    module.__dict__["divided_rows"] = rows


def _read(name: str, module: Any) -> Any:
    if torch.compiler.is_compiling():
        return module.divided_rows[name].whole()
    return module._parameters[name]


def _cast_as(module: nn.Module, policy: Any) -> None:
    """What FSDP2's hooks cast: the tensors that go into a module of its own, and what comes out."""
    if policy.cast_forward_inputs and policy.param_dtype is not None:
        cast = _caster(policy.param_dtype)
        module.register_forward_pre_hook(
            lambda module, args, kwargs: (cast(args), cast(kwargs)), prepend=True, with_kwargs=True
        )
    if policy.output_dtype is not None:
        cast_output = _caster(policy.output_dtype)
        module.register_forward_hook(lambda module, args, output: cast_output(output))


def _caster(dtype: torch.dtype) -> Callable[[Any], Any]:
    """Casts the floating-point tensors in lists, tuples and dictionaries."""

    def cast(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(dtype) if value.is_floating_point() else value
        if isinstance(value, (list, tuple)):
            return type(value)([cast(v) for v in value])
        if isinstance(value, dict):
            return {k: cast(v) for k, v in value.items()}
        return value

    return cast
