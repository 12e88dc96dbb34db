"""Moves saved activations to host memory: copies out are put into the forward, copies back into the backward.

A copy out starts right behind the last reader of the value or of any view of it, and the forward waits for it where the
plan says that it is over, at the latest at its end. A copy back starts where the plan says and is waited for right
before the first reader. Places are names of nodes; one that a graph does not have, or that comes too late, gives way to
the nearest that is right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping

import torch
import torch.fx as fx

from mindspeed_fx.compat import fake, tracing
from mindspeed_fx.graph.storage import views_of


@dataclass(frozen=True)
class Move:
    """Where the copies of one value are waited for and started."""

    free: str | None
    """Node of the forward before which the value's memory is given back; None: at the end."""
    back: str | None
    """Node of the backward before which the copy back starts; None: at the beginning."""


def move(forward: fx.GraphModule, backward: fx.GraphModule, moves: Mapping[str, Move]) -> dict[str, str]:
    """Rewrites both graphs in place.

    Args:
        moves: name of a saved value -> its places.

    Returns:
        name -> why, of the values that stay where they are.
    """
    from mindspeed_fx.kernels import copies  # noqa: F401  the operators

    kept = {}
    for name, places in moves.items():
        saved = next((n for n in forward.graph.nodes if n.name == name), None)
        arg = next((n for n in backward.graph.nodes if n.name == name and n.op == "placeholder"), None)
        if saved is None or arg is None:
            kept[name] = "the cut saves something else in its place"
        elif reason := refusal(saved, forward):
            kept[name] = reason
        else:
            host = _out(forward, saved, places.free)
            _back(backward, arg, host.meta["val"], places.back)
    for gm in (forward, backward):
        gm.graph.lint()
        gm.recompile()
    return kept


def refusal(saved: fx.Node, forward: fx.GraphModule) -> str:
    """Why a value cannot be moved; "" when it can."""
    value = saved.meta.get("val")
    if not dense(value):
        return "not a dense tensor"
    output = next(n for n in reversed(forward.graph.nodes) if n.op == "output")
    if sum(n in views_of(saved) for n in output.args[0] if isinstance(n, fx.Node)) > 1:
        return "the forward returns it, or a view of it, beside"
    return ""


def dense(value: object) -> bool:
    """True for strided tensors whose elements fill their memory."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return False
    sizes = [(fake.hint(n), fake.hint(s)) for n, s in zip(value.shape, value.stride())]
    return sum((n - 1) * s for n, s in sizes) + 1 == fake.hint(value.numel())


def _out(gm: fx.GraphModule, saved: fx.Node, free: str | None) -> fx.Node:
    """Puts in the copy out and its wait; returns the wait, which the forward now returns."""
    place = {n: i for i, n in enumerate(gm.graph.nodes)}
    output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
    last = max((u for n in views_of(saved) for u in (n, *n.users) if u is not output), key=place.__getitem__)
    until = next((n for n in gm.graph.nodes if n.name == free and place[n] > place[last]), output)
    with gm.graph.inserting_after(last):
        host = _call(gm, torch.ops.mindspeed.offload.default, (saved,), f"{saved.name}_to_host")
    with gm.graph.inserting_before(until):
        done = _call(gm, torch.ops.mindspeed.wait_copy.default, (host, saved), f"{saved.name}_on_host")
    output.replace_input_with(saved, done)
    return done


def _back(gm: fx.GraphModule, arg: fx.Node, host: torch.Tensor, back: str | None) -> None:
    place = {n: i for i, n in enumerate(gm.graph.nodes)}
    device = arg.meta["val"].device
    readers = list(arg.users)
    first = min(readers, key=place.__getitem__)
    start = next(n for n in gm.graph.nodes if n.op != "placeholder")
    begin = (
        start
        if back is None
        else next(
            (n for n in gm.graph.nodes if n.name == back and n.op != "placeholder" and place[n] < place[first]), first
        )
    )
    arg.meta["val"] = host
    arg.meta.pop("tensor_meta", None)
    with gm.graph.inserting_before(begin):
        coming = _call(gm, torch.ops.mindspeed.reload.default, (arg, device), f"{arg.name}_from_host")
    with gm.graph.inserting_before(first):
        existing = _call(gm, torch.ops.mindspeed.wait_copy.default, (coming, arg), f"{arg.name}_on_device")
    for reader in readers:
        reader.replace_input_with(arg, existing)


def _call(gm: fx.GraphModule, target: torch._ops.OpOverload, args: tuple, name: str) -> fx.Node:
    node = gm.graph.create_node("call_function", target, args, name=name)
    values = fx.map_arg(args, lambda n: n.meta["val"])
    with tracing.fake_mode_of([values[0]]):
        node.meta["val"] = target(*values)
    return node
