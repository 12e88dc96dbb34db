"""Autocast regions of a graph: the nodes that enter and leave them, and what they cast."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree


def is_autocast_switch(target: Any) -> bool:
    """True for the nodes that enter and leave an autocast region."""
    return target in (torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast)


def switch_autocast(target: Any, args: tuple) -> Any:
    """Enter or leave an autocast region while recording: the context manager records its own node and, unlike a call
    of the raw function, is really in force, so that the fake values have the dtypes of the region."""
    if target is torch.amp.autocast_mode._enter_autocast:
        device, dtype, enabled, cache_enabled = args
        region = torch.autocast(device_type=device, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)
        region.__enter__()
        return region
    args[0].__exit__(None, None, None)
    return None


@contextlib.contextmanager
def following_autocast() -> Iterator[Callable[[fx.Node], bool]]:
    """A function that is called with each node of a graph in turn, and enters and leaves the graph's autocast regions;
    it tells whether the node was such a switch. What is still entered at the end is left.
    """
    regions: dict[fx.Node, Any] = {}

    def follow(node: fx.Node) -> bool:
        if not is_autocast_switch(node.target):
            return False
        if node.target is torch.amp.autocast_mode._enter_autocast:
            regions[node] = switch_autocast(node.target, node.args)
        else:
            switch_autocast(node.target, (regions.pop(node.args[0]),))
        return True

    try:
        yield follow
    finally:
        for region in reversed(regions.values()):
            region.__exit__(None, None, None)


def is_autocast_active(device: str) -> bool:
    """Whether autocast casts operands on devices of this type."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


@contextlib.contextmanager
def casts_resolved(target: Any, expected: Any, args: tuple, kwargs: dict) -> Iterator[tuple[tuple, dict]]:
    """Operands of an ATen operator as autocast gives them to its kernel, with autocast off in the body.

    What stands for the operator (a custom one, a sum of several) has no autocast rule of its own. Every policy of
    autocast (lower precision, float32, widest) computes with operands of one dtype, that of the result, which the fake
    result tells.

    Args:
        expected: fake result, recorded under the same autocast; None or no tensor: nothing is cast.
    """
    devices = {a.device.type for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)}
    active = [d for d in sorted(devices) if is_autocast_active(d)]
    if not active:
        yield args, kwargs
        return
    if target.namespace == "aten" and isinstance(expected, torch.Tensor) and expected.is_floating_point():

        def cast(x: torch.Tensor) -> torch.Tensor:
            return x.to(expected.dtype) if x.is_floating_point() else x

        args, kwargs = pytree.tree_map_only(torch.Tensor, cast, (args, kwargs))
    with contextlib.ExitStack() as stack:
        for device in active:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield args, kwargs
