"""Which nodes of a graph are collectives, and what they say of themselves."""

from __future__ import annotations

from typing import Any, Mapping

import torch
import torch.distributed._functional_collectives  # noqa: F401  registers the operators
import torch.fx as fx

from mindspeed_fx.graph import memoize
from mindspeed_fx.graph.recompile import recompile
from mindspeed_fx.graph.schema import argument

WAIT = torch.ops._c10d_functional.wait_tensor.default


def is_wait(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is WAIT


def is_start(node: fx.Node) -> bool:
    """A functional collective: it starts here and ends at its wait."""
    return node.op == "call_function" and node.target is not WAIT and _namespace(node.target) == "_c10d_functional"


def is_blocking(node: fx.Node) -> bool:
    """Communication that starts and ends in one operator, which nothing can be hidden under."""
    return node.op == "call_function" and _namespace(node.target) in ("c10d", "_dtensor", "symm_mem")


@memoize.by_target
def _namespace(target: Any) -> str:
    return target.namespace if isinstance(target, torch._ops.OpOverload) else ""


def kind(node: fx.Node) -> str:
    """Name of the collective: "all_reduce", "all_gather_into_tensor", ..."""
    return node.target._schema.name.split("::")[1]


def group_of(node: fx.Node) -> str:
    """Name of the process group."""
    return str(argument(node, "group_name") or "")


def rename_groups(gm: fx.GraphModule, names: Mapping[str, str]) -> None:
    """Call process groups by other names of theirs, own name -> new one, in every call of ``gm`` that names one."""
    for node in gm.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        for i, a in enumerate(node.target._schema.arguments):
            if "group" not in a.name:
                continue
            if i < len(node.args) and node.args[i] in names:
                node.update_arg(i, names[node.args[i]])
            elif a.name in node.kwargs and node.kwargs[a.name] in names:
                node.update_kwarg(a.name, names[node.kwargs[a.name]])
    recompile(gm)


def waits_of(start: fx.Node) -> list[fx.Node]:
    """The waits that end a collective; one for each tensor of a coalesced one."""
    results = []
    for user in start.users:
        if is_wait(user):
            results.append(user)
        else:
            results += [w for w in user.users if is_wait(w)]
    return results
