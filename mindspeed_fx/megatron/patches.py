"""A patch replaces one name in Megatron-core, everywhere it was copied to, for a stated reason, and can be undone."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from dataclasses import dataclass
from typing import Any, Callable

import torch

PREFIX = "megatron.core"
IN_GRAPH, WITHOUT_CUDA, WITHOUT_ACCELERATOR, EVERYWHERE = (
    "in a captured graph",
    "without CUDA",
    "without CUDA or NPU",
    "everywhere",
)
_KEEP = ("torch", "mindspeed_fx")
"""Packages whose own references to a replaced function are left alone."""


@dataclass(frozen=True)
class Patch:
    """One replacement.

    Args:
        target: "module:name" or "module:Class.method" below ``megatron.core``; "torch.module:name" and
            "megatron.module:name" as they are.
        replacement: what takes its place.
        reason: why, in one line.
        where: ``IN_GRAPH``: only while torch.compile traces, so eager Megatron stays what it was;
            ``WITHOUT_CUDA``: only where torch has no CUDA: a CPU, or an NPU without transfer_to_npu;
            ``WITHOUT_ACCELERATOR``: only on a machine with neither CUDA nor NPU; ``EVERYWHERE``: always.
        copies: also where ``from x import y`` has copied the name, in any loaded module.
        also: what else, asked of the arguments of a call, calls for a replacement that is ``IN_GRAPH``.
        is_absent: the module imports the name from a package that is not installed, and goes without it.
    """

    target: str
    replacement: Any
    reason: str
    where: str = IN_GRAPH
    copies: bool = True
    also: Callable[..., bool] | None = None
    is_absent: bool = False


@dataclass(frozen=True)
class _Change:
    owner: Any
    name: str
    original: Any
    replacement: Any
    inherited: bool = False
    copies: bool = True


_changes: list[_Change] = []
_applied: list[Patch] = []
_originals: dict[str, Any] = {}


def apply(patches: list[Patch]) -> None:
    """Apply ``patches``; functions are also replaced where ``from x import y`` has copied them.

    Raises:
        ImportError: Megatron-core has no such name; nothing has been changed then.
    """
    results = [(patch, *_locate(patch.target, patch.is_absent)) for patch in patches]
    targets = [*_originals, *(patch.target for patch in patches)]
    if twice := {t for t in targets if targets.count(t) > 1}:
        raise RuntimeError(f"{', '.join(sorted(twice))}: patched twice, so that neither replacement knows the original")
    swaps: dict[int, tuple[Any, Any]] = {}
    for patch, owner, name in results:
        original = inspect.getattr_static(owner, name, None)
        replacement = patch.replacement
        if patch.where == IN_GRAPH:
            replacement = in_graph(patch.replacement, original, patch.also)
        inherited = name not in owner.__dict__
        setattr(owner, name, replacement)
        _changes.append(_Change(owner, name, original, replacement, inherited, patch.copies))
        if patch.copies and callable(original) and not isinstance(owner, type):
            swaps[id(original)] = (original, replacement)
        _applied.append(patch)
        _originals[patch.target] = original
    sweep(swaps)


def in_graph(replacement: Callable, original: Callable, also: Callable[..., bool] | None = None) -> Callable:
    """``replacement`` while torch.compile traces, and where ``also`` says so of the arguments; else ``original``."""

    @functools.wraps(original)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        is_replaced = torch.compiler.is_compiling() or (also is not None and also(*args, **kwargs))
        return replacement(*args, **kwargs) if is_replaced else original(*args, **kwargs)

    if hasattr(original, "cache_clear"):  # a constructor clears it
        chosen.cache_clear = original.cache_clear
    return chosen


def sweep(swaps: dict[int, tuple[Any, Any]], classes_of: str = "") -> None:
    """Replace, in every loaded module, each value that is the first of a pair by the second.

    Args:
        swaps: pairs by the ``id`` of the first.
        classes_of: also in the classes of the modules whose name starts so.
    """
    if not swaps:
        return
    for module_name, module in list(sys.modules.items()):
        names = getattr(module, "__dict__", None)
        if not isinstance(names, dict) or module_name.partition(".")[0] in _KEEP:
            continue
        _swap(module, names, swaps)
        if classes_of and module_name.startswith(classes_of):
            for value in list(names.values()):
                if isinstance(value, type) and value.__module__ == module_name:
                    _swap(value, vars(value), swaps)


def _swap(owner: Any, names: Any, swaps: dict[int, tuple[Any, Any]]) -> None:
    for name, value in list(names.items()):
        pair = swaps.get(id(value))
        if pair is not None and pair[0] is value:
            setattr(owner, name, pair[1])


def undo() -> None:
    """Restore everything, last change first, also in modules that copied a replacement while it was in force."""
    swaps = {
        id(c.replacement): (c.replacement, c.original)
        for c in _changes
        if c.copies and callable(c.original) and not isinstance(c.owner, type)
    }
    while _changes:
        change = _changes.pop()
        if change.inherited:
            delattr(change.owner, change.name)
        else:
            setattr(change.owner, change.name, change.original)
    sweep(swaps)
    _applied.clear()
    _originals.clear()


def applied() -> list[Patch]:
    """Every patch in force."""
    return list(_applied)


def original(target: str) -> Any:
    """What ``target`` was before its patch."""
    return _originals[target]


def is_whole(module_name: str) -> bool:
    """Whether a target's module stands as it is, not below Megatron-core."""
    return module_name.partition(".")[0] in ("torch", "megatron")


def _locate(target: str, is_absent: bool = False) -> tuple[Any, str]:
    module_name, path = target.split(":")
    owner: Any = importlib.import_module(module_name if is_whole(module_name) else f"{PREFIX}.{module_name}")
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent, None)
    if not is_absent and not hasattr(owner, name):
        raise ImportError(f"this megatron-core has no {target}, which mindspeed_fx.megatron_adaptor patches")
    return owner, name
