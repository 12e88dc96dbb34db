"""Functions that Dynamo leaves whole (``allow_in_graph``) and what they do unseen."""

from __future__ import annotations

import types
from typing import Any, Callable

import torch
from torch.utils import _pytree as pytree

from mindspeed_fx.compat.tracing import is_higher_order, tracing_fake

TRAMPOLINE = "trampoline_autograd_apply"
"""What Dynamo makes of an ``autograd.Function`` that it leaves whole."""


def is_left_whole(target: Any) -> bool:
    """Whether a function of a Dynamo graph is one that Dynamo did not look into, not torch's own."""
    if not isinstance(target, (types.FunctionType, types.MethodType)) or is_higher_order(target):
        return False
    return target.__name__ == TRAMPOLINE or not str(target.__module__).startswith("torch.")


def has_own_gradient(target: Any, args: Any, kwargs: Any) -> bool:
    """Whether a function that Dynamo left whole applies an ``autograd.Function`` or puts a hook on a tensor, seen by
    calling it on fake values."""
    if target.__name__ == TRAMPOLINE:
        return True
    kind, tensor, seen = torch.autograd.Function, torch.Tensor, []
    apply, register = kind.__dict__["apply"], tensor.register_hook

    def note_function(cls: Any, *operands: Any, **named: Any) -> Any:
        seen.append(cls)
        return apply.__get__(None, cls)(*operands, **named)

    def note_hook(self: torch.Tensor, hook: Callable) -> Any:
        seen.append(hook)
        return register(self, hook)

    kind.apply, tensor.register_hook = classmethod(note_function), note_hook
    try:
        with tracing_fake([*pytree.tree_leaves((args, kwargs))]):
            target(*args, **kwargs)
    except Exception:
        return bool(seen)  # the trace of the graph says what is wrong with the call
    finally:
        kind.apply, tensor.register_hook = apply, register
    return bool(seen)
