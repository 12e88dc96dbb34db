"""A patch replaces one name in Megatron-core, everywhere it was copied to, for a stated reason, and can be undone."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import Any, Callable

PREFIX = "megatron.core"


@dataclass(frozen=True)
class Patch:
    """One replacement: ``target`` is "module:name" or "module:Class.method" below ``megatron.core``."""

    target: str
    replacement: Any
    reason: str


_undo: list[tuple[Any, str, Any]] = []
_applied: list[tuple[str, str]] = []


def apply(patches: list[Patch]) -> None:
    """Apply ``patches``; functions are also replaced where ``from x import y`` has copied them."""
    for patch in patches:
        module_name, path = patch.target.split(":")
        owner: Any = importlib.import_module(f"{PREFIX}.{module_name}")
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        original = owner.__dict__[name]
        _set(owner, name, patch.replacement)
        if not parents:
            sweep(original, lambda _: patch.replacement)
        _applied.append((patch.target, patch.reason))


def sweep(original: Any, make: Callable[[Any], Any]) -> None:
    """Replace ``original`` in every loaded Megatron module that holds it under whatever name."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(PREFIX) and module is not None:
            for name, value in list(vars(module).items()):
                if value is original:
                    _set(module, name, make(value))


def unwrap_compiled() -> None:
    """Replace functions that were wrapped by ``torch.compile`` at import (``jit_fuser``) by the plain functions."""
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith(PREFIX) or module is None:
            continue
        for holder in [module, *(c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module_name)]:
            for name, value in list(vars(holder).items()):
                plain = getattr(value, "_torchdynamo_orig_callable", None) if callable(value) else None
                if plain is not None:
                    _set(holder, name, plain)


def record(target: str, reason: str) -> None:
    """Note a change that is not a :class:`Patch`, for :func:`applied`."""
    _applied.append((target, reason))


def on_undo(owner: Any, name: str, original: Any) -> None:
    """Restore ``owner.name`` to ``original`` when the patches are undone."""
    _undo.append((owner, name, original))


def _set(owner: Any, name: str, value: Any) -> None:
    _undo.append((owner, name, owner.__dict__[name]))
    setattr(owner, name, value)


def undo() -> None:
    """Restore everything, last change first."""
    while _undo:
        owner, name, original = _undo.pop()
        setattr(owner, name, original)
    _applied.clear()


def applied() -> list[tuple[str, str]]:
    """(target, reason) of every change in force."""
    return list(_applied)
