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
    """What a lowering of a backward operator, whose first argument is the incoming gradient, does wrong on fake tensors:
    results of another shape or type than the operator's, or that do not depend on the incoming gradient."""
    positions = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]

    def run(*tensors: torch.Tensor) -> Any:
        given = dict(zip(positions, tensors))
        return build(*(given.get(i, a) for i, a in enumerate(args)))

    # Operators with two incoming gradients (of the sum and of the norm) name the second one grad_sum; the first always counts.
    gm = make_fx(run)(*(args[i] for i in positions))
    wanted = [r for r in pytree.tree_leaves(reference(*args))]
    made = pytree.tree_leaves(next(n for n in gm.graph.nodes if n.op == "output").args)
    problems = []
    for i, (w, m) in enumerate(zip(wanted, made, strict=True)):
        value = m.meta["val"] if isinstance(m, fx.Node) else m
        if (value.shape, value.dtype) != (w.shape, w.dtype):
            problems.append(f"result {i} is {value.dtype} {tuple(value.shape)}, the gradient is {w.dtype} {tuple(w.shape)}")
    problems += [f"result {i} does not depend on the incoming gradient" for i in lost(gm, [next(n.name for n in gm.graph.nodes)]) if wanted[i].numel()]
    return problems
