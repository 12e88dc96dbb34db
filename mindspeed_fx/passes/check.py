"""The numeric check of one pass: its graph before and after, on the same real values, forward and gradients.

An exact pass must agree bitwise. Any other may differ from the graph before by a small multiple of the rounding of
the type it computes in, measured against the largest element of each result.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from mindspeed_fx.compat import fake, fx_graph, tracing
from mindspeed_fx.passes.base import Pass

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Largest error relative to the largest element: a few thousand roundings, which a reordered sum can make, below any
real mistake in a formula."""


class CheckError(AssertionError):
    """A pass left its tolerance; the message names it and the first result that differs."""


def check_pass(p: Pass, before: fx.GraphModule, after: fx.GraphModule, differentiable: bool) -> str:
    """Compare two graphs with the same inputs on seeded random values.

    Args:
        differentiable: also compare the gradients of every floating-point input that requires one.

    Returns:
        a line for the report, with the largest relative error.

    Raises:
        CheckError: a result is off by more than the tolerance of its type (or at all, for an exact pass).
    """
    with tracing.without_fake_mode(), torch.random.fork_rng(devices=[]):
        inputs = [_real(n) for n in before.graph.nodes if n.op == "placeholder"]
        expected, actual = (_evaluate(gm, inputs, differentiable) for gm in (before, after))
        # A float64 model that takes its softmax in float32 is a float32 model: the narrowest type sets the tolerance.
        narrowest = max(
            (
                TOLERANCE.get(n.meta["val"].dtype, 0.0)
                for n in before.graph.nodes
                if isinstance(n.meta.get("val"), torch.Tensor)
            ),
            default=0.0,
        )
        worst = 0.0
        for (name, a), (_, b) in zip(expected, actual):
            if (a is None) != (b is None):
                raise CheckError(f'check: pass "{p.name}" {"lost" if b is None else "added"} {name}')
            if a is None or torch.equal(a, b):
                continue
            error = _error(a, b)
            limit = 0.0 if p.exact else narrowest
            worst = max(worst, error)
            if not error <= limit:
                what = "is declared exact and" if p.exact else f"may be off by {limit:g} and"
                raise CheckError(
                    f'check: pass "{p.name}" {what} is off by {error:.3g} (relative to the largest element) in {name}, '
                    f"{a.dtype} {tuple(a.shape)}"
                )
    return f"{len(expected)} results, worst relative error {worst:.2g}"


def _real(node: fx.Node) -> Any:
    """A real value like the fake one: small random floats, zeros and ones for integers, so that they are valid
    indices.
    """
    value = fx_graph.example_value_of(node)
    if not isinstance(value, torch.Tensor):
        return fake.hint(value) if isinstance(value, torch.SymInt) else value
    shape = [fake.hint(s) for s in value.shape]
    generator = torch.Generator().manual_seed(len(node.name) + sum(map(ord, node.name)))
    if value.dtype == torch.bool:
        result = torch.rand(shape, generator=generator) < 0.5
    elif value.is_floating_point():
        # Like trained weights and activations: products over the last dimension stay near one.
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 1.0
        result = (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(value.dtype)
    else:
        result = torch.randint(0, 2, shape, generator=generator).to(value.dtype)
    return _laid_out(result, [fake.hint(s) for s in value.stride()]).to(value.device)


def _laid_out(x: torch.Tensor, strides: list[int]) -> torch.Tensor:
    """``x`` with these strides, where they fill a block of memory: the graph may have a view of it that only they
    allow. With any others (expanded, sliced) it stays contiguous, of which every view can be had."""
    filled = 1
    for size, stride in sorted(zip(x.shape, strides), key=lambda pair: (pair[1], pair[0])):
        if size != 1 and stride != filled:
            return x
        filled *= size
    return torch.empty_strided(x.shape, strides, dtype=x.dtype).copy_(x)


def _evaluate(gm: fx.GraphModule, inputs: list[Any], differentiable: bool) -> list[tuple[str, torch.Tensor | None]]:
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    values = [v.clone() if isinstance(v, torch.Tensor) else v for v in inputs]
    leaves = []
    for node, v in zip(placeholders, values):
        if (
            differentiable
            and isinstance(v, torch.Tensor)
            and v.is_floating_point()
            and node.meta.get("requires_grad", True)
        ):
            leaves.append((node.name, v.requires_grad_()))
    torch.manual_seed(0)
    with torch.set_grad_enabled(differentiable):
        # In-place operators may write to an input: give the graph copies that are not leaves.
        outputs = fx.Interpreter(gm).run(
            *(v.clone() if isinstance(v, torch.Tensor) and v.requires_grad else v for v in values)
        )
    tensors = [o for o in torch.utils._pytree.tree_leaves(outputs) if isinstance(o, torch.Tensor)]
    results = [(f"output {i}", o.detach()) for i, o in enumerate(tensors)]
    differentiable_outputs = [o for o in tensors if o.requires_grad]
    if leaves and differentiable_outputs:
        weights = [
            torch.linspace(0.5, 1.5, o.numel(), dtype=torch.float64).to(o.dtype).to(o.device).reshape(o.shape)
            for o in differentiable_outputs
        ]
        grads = torch.autograd.grad(differentiable_outputs, [v for _, v in leaves], weights, allow_unused=True)
        results += [(f"the gradient of {name}", g) for (name, _), g in zip(leaves, grads)]
    return results


def _error(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if not a.is_floating_point():
        return float("inf")
    finite = a.isfinite()
    if not torch.equal(finite, b.isfinite()):
        return float("inf")
    a, b = a.double().where(finite, 0.0), b.double().where(finite, 0.0)
    return ((a - b).abs().max() / a.abs().max().clamp_min(1e-12)).item()
