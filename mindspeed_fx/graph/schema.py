"""How the arguments of a call are read: by the names of the operator's schema, never by the place where one spelling
puts them.
"""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import torch
import torch.fx as fx


def argument(node: fx.Node, name: str, default: Any = None) -> Any:
    """The argument ``name`` of a call, however it was given; the schema's default where it was not.

    Args:
        default: for what the operator has no such argument or no default of.
    """
    for i, a in enumerate(node.target._schema.arguments):
        if a.name == name:
            if name in node.kwargs:
                return node.kwargs[name]
            return node.args[i] if i < len(node.args) else (a.default_value if a.has_default_value() else default)
    return default


def has_argument(node: fx.Node, name: str) -> bool:
    """Whether the operator of a call has an argument ``name``: overloads differ."""
    return any(a.name == name for a in node.target._schema.arguments)


def all_arguments(target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Every argument of a call in the order of the schema, those by keyword and defaults in their places."""
    rest = target._schema.arguments[len(args) :]
    return [*args, *(kwargs[a.name] if a.name in kwargs else a.default_value for a in rest)]
