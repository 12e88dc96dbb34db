"""Fake values: their mode, their memory, and their layout as far as it means something."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from mindspeed_fx.compat import autocast

# --------------------------------------------------------------------------- fake values


def storage_of(tensor: torch.Tensor) -> int:
    """Identity of the memory behind a fake tensor: views of one tensor share it."""
    return tensor.untyped_storage()._cdata


def fake_like(value: Any) -> Any:
    """The fake mode that ``value`` was made under, as a context; nothing when it is real."""
    from torch._subclasses.fake_tensor import FakeTensor

    mode = next((v.fake_mode for v in pytree.tree_leaves(value) if isinstance(v, FakeTensor)), None)
    return mode if mode is not None else contextlib.nullcontext()


def is_fake(value: Any) -> bool:
    """Whether ``value`` is a tensor without numbers, on whatever device."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor)


def layout(tensor: torch.Tensor) -> tuple:
    """Strides that mean something: those of dimensions longer than one, as text, so that symbols compare without
    guards.
    """
    return tuple(0 if isinstance(n, int) and n <= 1 else str(s) for n, s in zip(tensor.shape, tensor.stride()))


def hint(size: Any) -> int:
    """A plausible integer for a symbolic size, also for a ragged one, which has no number; adds no guard."""
    if isinstance(size, int):
        return size
    known = size.node.hint if hasattr(size, "node") else None
    return 4096 if known is None or isinstance(known, torch.SymInt) else int(known)


def refresh_values(gm: fx.GraphModule) -> None:
    """Recompute the fake value of every ATen call whose inputs' layout changed, so that strides stay true; under the
    autocast that is in force there, which gives an ``einsum`` its dtype.
    """
    stale: set[fx.Node] = set()
    with autocast.following_autocast() as follow:
        for node in gm.graph.nodes:
            if node.op != "call_function" or follow(node) or not isinstance(node.target, torch._ops.OpOverload):
                continue
            old = node.meta.get("val")
            if not isinstance(old, torch.Tensor) or node.target._schema.is_mutable:
                continue
            if not node.meta.get("fresh") and not any(a in stale for a in node.all_input_nodes):
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            with fake_like(old), torch.no_grad():
                new = node.target(*args, **kwargs)
            if new.stride() != old.stride() or new.dtype != old.dtype or node.meta.pop("fresh", False):
                node.meta["val"] = new
                stale.add(node)


def layout_key(value: Any) -> tuple:
    """Equal for fake values that every trace treats alike."""
    if isinstance(value, torch.Tensor):
        return (str(value.shape), str(value.stride()), value.dtype, value.device, str(value.storage_offset()))
    return (str(value),)
