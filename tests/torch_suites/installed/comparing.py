"""Compiled calls of torch's databases against eager ones, gradients too."""

from __future__ import annotations

import copy
import itertools
import warnings
from typing import Any, Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

SAMPLES = 3
"""Inputs of an operator that are tried: the first, and others as far apart as can be."""


def chosen(samples: Iterable[Any], most: int = SAMPLES) -> list[Any]:
    every = list(itertools.islice(samples, 60))
    step = max(1, (len(every) - 1) // max(1, most - 1))
    return every[::step][:most]


def results(call: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], module: Any = None) -> Any:
    """(what ``call`` gives, gradients of its inputs and of a module's parameters, inputs and buffers after it), from
    one state of the generator."""
    args, kwargs = copied((args, kwargs))
    leaves = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    parameters, buffers = (list(module.parameters()), list(module.buffers())) if module is not None else ([], [])
    wanted = [x for x in [*leaves, *parameters] if x.requires_grad]
    torch.manual_seed(0)
    found = call(*args, **kwargs)
    outputs = [x for x in pytree.tree_leaves(found) if isinstance(x, Tensor) and x.requires_grad]
    grads: Sequence[Tensor | None] = []
    if outputs and wanted:
        torch.manual_seed(1)
        weights = [torch.randn_like(x.detach()) for x in outputs]
        grads = torch.autograd.grad(outputs, wanted, weights, allow_unused=True)
    return found, grads, [*leaves, *buffers]


def copied(tree: Any) -> Any:
    """With tensors and modules of its own."""
    return pytree.tree_map(
        lambda x: (
            x.detach().clone().requires_grad_(x.requires_grad)
            if isinstance(x, Tensor)
            else copy.deepcopy(x)
            if isinstance(x, torch.Generator)
            else x
        ),
        tree,
    )


def compare(call: Any, args: Sequence[Any], kwargs: dict[str, Any], backend: Any) -> None:
    """Raises where the compiled call is not as the eager one: within torch's own tolerances for the dtype, or, where a
    result is all rounding (the mean of one number taken from it), as near to float64's as twice the eager one.

    Args:
        call: a function, or a module, of which each has one of its own.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = _run(call, args, kwargs)
        torch._dynamo.reset()
        found = _run(call, args, kwargs, lambda x: torch.compile(x, backend=backend))
        try:
            torch.testing.assert_close(found, expected, equal_nan=True)
        except AssertionError:
            exact = _exact(call, args, kwargs)
            if exact is None or not _as_near(found, expected, exact):
                raise


def _run(call: Any, args: Any, kwargs: Any, compiled: Callable[[Any], Any] = lambda x: x, exact: bool = False) -> Any:
    is_module = isinstance(call, torch.nn.Module)
    mine = copy.deepcopy(call) if is_module else call
    mine = mine.double() if is_module and exact else mine
    return results(compiled(mine), args, kwargs, mine if is_module else None)


def _exact(call: Any, args: Any, kwargs: Any) -> Any:
    """Results in float64; None where the call takes none, or is so already."""

    def widened(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return x.detach().double().requires_grad_(x.requires_grad)

    try:
        return _run(call, *pytree.tree_map(widened, (args, kwargs)), exact=True)
    except (RuntimeError, TypeError, NotImplementedError):
        return None


def _as_near(found: Any, expected: Any, exact: Any) -> bool:
    (mine, kind), (theirs, other), (true, third) = map(pytree.tree_flatten, (found, expected, exact))
    if not kind == other == third:
        return False
    for x, y, z in zip(mine, theirs, true):
        if isinstance(x, Tensor) and x.is_floating_point():
            if not x.shape == y.shape == z.shape or x.dtype != y.dtype or not bool((x.isnan() == y.isnan()).all()):
                return False
            error, allowed = ((v.double() - z).abs().nan_to_num() for v in (x, y))
            if bool((error > 2 * allowed.max() + torch.finfo(x.dtype).eps).any() if x.numel() else False):
                return False
        elif isinstance(x, Tensor):
            if not torch.equal(x, y):
                return False
    return True
