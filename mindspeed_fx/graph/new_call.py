"""A call that a reader asks for and no graph holds yet.

A reader that needs a value the model does not compute (a mask as booleans, a one-hot vector's place) says which call
would compute it. It is read like a node, so that matching goes on behind it; :func:`mindspeed_fx.graph.rewrite.build`
puts it into the graph once everything has matched.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.fx as fx

from mindspeed_fx.compat import fake


class NewCall:
    """``target(*args, **kwargs)`` before the node ``before``; arguments may be new calls, too.

    Has of a node what is read of one: op, target, args, kwargs, meta, graph and all_input_nodes.
    """

    op = "call_function"

    def __init__(self, before: fx.Node, target: Any, *args: Any, **kwargs: Any):
        self.before, self.target, self.args, self.kwargs = before, target, args, kwargs
        self.graph = before.graph
        self.node: fx.Node | None = None
        """The node that :func:`mindspeed_fx.graph.rewrite.build` made of it."""

    @property
    def name(self) -> str:
        return f"{self.target} before {self.before.name}"

    @property
    def all_input_nodes(self) -> list[Any]:
        leaves = torch.utils._pytree.tree_leaves((self.args, self.kwargs))
        return [a for a in leaves if isinstance(a, (fx.Node, NewCall))]

    @functools.cached_property
    def meta(self) -> dict[str, Any]:
        """The fake value and the annotations that the node will have."""
        return call_meta(self.before, self.target, self.args, self.kwargs)


def call_meta(before: fx.Node, target: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """What ``meta`` says of a call that stands before ``before``: its origin, its fake value and its annotations."""
    origin = ("nn_module_stack", "stack_trace", "source_fn_stack", "grad_enabled", "custom")
    meta = {k: before.meta[k] for k in origin if k in before.meta}
    of_values = functools.partial(torch.utils._pytree.tree_map_only, (fx.Node, NewCall), lambda n: n.meta["val"])
    with fake.fake_like(before.meta.get("val")), torch.no_grad():
        meta["val"] = target(*of_values(args), **of_values(kwargs))
    inputs = torch.utils._pytree.tree_leaves((args, kwargs))
    meta["mutated"] = False
    meta["needs_grad"] = meta.get("grad_enabled", True) and any(
        a.meta.get("needs_grad") for a in inputs if isinstance(a, (fx.Node, NewCall))
    )
    return meta
