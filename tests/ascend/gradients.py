"""Gradients that disappeared: results of a backward that do not depend on what comes back into it."""

from __future__ import annotations

from typing import Any, Callable, Sequence

import torch
import torch.fx as fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree


def lost(gm: fx.GraphModule, incoming: Sequence[str]) -> list[int]:
    """Positions of the results of a backward graph that no input whose name starts with one of ``incoming`` reaches."""
    reached: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            hit = node.name.startswith(tuple(incoming))
        else:
            hit = any(n in reached for n in node.all_input_nodes)
        if hit:
            reached.add(node)
    results = pytree.tree_leaves(next(n for n in gm.graph.nodes if n.op == "output").args)
    return [i for i, r in enumerate(results) if isinstance(r, fx.Node) and r not in reached]


def lost_by_lowering(build: Callable, reference: Callable, args: tuple) -> list[str]:
    """What a lowering of a backward operator, whose first argument is the incoming gradient, does wrong on fake
    tensors:
    results of another shape or type than the operator's, or that do not depend on the incoming gradient."""
    leaves, spec = pytree.tree_flatten(args)
    positions = [i for i, a in enumerate(leaves) if isinstance(a, torch.Tensor)]

    def run(*tensors: torch.Tensor) -> Any:
        given = dict(zip(positions, tensors))
        return build(*pytree.tree_unflatten([given.get(i, a) for i, a in enumerate(leaves)], spec))

    # Operators with two incoming gradients (of the sum and of the norm) name the second one grad_sum; the first always
    # counts.
    gm = make_fx(run)(*(leaves[i] for i in positions))
    wanted = list(pytree.tree_leaves(reference(*args)))
    made = pytree.tree_leaves(next(n for n in gm.graph.nodes if n.op == "output").args)
    problems = []
    for i, (w, m) in enumerate(zip(wanted, made, strict=True)):
        value = m.meta["val"] if isinstance(m, fx.Node) else m
        if (value.shape, value.dtype) != (w.shape, w.dtype):
            problems.append(
                f"result {i} is {value.dtype} {tuple(value.shape)}, the gradient is {w.dtype} {tuple(w.shape)}"
            )
    problems += [
        f"result {i} does not depend on the incoming gradient"
        for i in lost(gm, [next(n.name for n in gm.graph.nodes)])
        if wanted[i].numel()
    ]
    return problems


def without_gradient(overload: Any, args: tuple) -> list[str]:
    """Names of the float arguments of an operator that get no gradient when they want one, without an error that says
    so.
    """
    found = []
    for i, argument in enumerate(overload._schema.arguments[: len(args)]):
        wanting = [
            pytree.tree_map(
                lambda a: (
                    a.detach().requires_grad_(k == i and a.is_floating_point()) if isinstance(a, torch.Tensor) else a
                ),
                given,
            )
            for k, given in enumerate(args)
        ]
        tensors = [a for a in pytree.tree_leaves(wanting[i]) if isinstance(a, torch.Tensor) and a.requires_grad]
        if not tensors:
            continue
        try:
            made = [
                r.sum()
                for r in pytree.tree_leaves(overload(*wanting))
                if isinstance(r, torch.Tensor) and r.requires_grad
            ]
            grads = torch.autograd.grad(made, tensors, allow_unused=True) if made else (None,)
        except (NotImplementedError, RuntimeError):
            continue  # refused, which nobody overlooks
        if any(g is None for g in grads):
            found.append(argument.name)
    return found
