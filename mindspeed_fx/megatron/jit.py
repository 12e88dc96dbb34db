"""Megatron compiles small functions at import (``jit_fuser`` is ``torch.compile``); inside a compiled model, and on a
CPU without it, the plain functions are wanted.
"""

from __future__ import annotations

import sys
from typing import Any, Callable

from mindspeed_fx.megatron import patches

_compiled: list[tuple[Any, Any]] = []
"""(plain, compiled) of functions that were compiled before the adaptor came."""
_plain: list[Callable] = []
"""Functions that Megatron decorated while the adaptor was in force."""


def jit_fuser(function: Callable) -> Callable:
    """Takes the place of Megatron's decorator: leaves ``function`` plain, and remembers it for :func:`restore`."""
    _plain.append(function)
    return function


def unwrap() -> None:
    """Put the plain function in the place of every function compiled at import."""
    results: dict[int, tuple[Any, Any]] = {}
    for module_name, module in list(sys.modules.items()):
        if module is None or not module_name.startswith(patches.PREFIX):
            continue
        for holder in (
            module,
            *(c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module_name),
        ):
            for value in vars(holder).values():
                plain = getattr(value, "_torchdynamo_orig_callable", None) if callable(value) else None
                if plain is not None:
                    results[id(value)] = (value, plain)
    _compiled.extend((plain, compiled) for compiled, plain in results.values())
    patches.sweep(results, classes_of=patches.PREFIX)


def restore() -> None:
    """Compiled again what Megatron compiles; call after the decorator itself is restored."""
    from megatron.core import jit

    back = {id(plain): (plain, compiled) for plain, compiled in _compiled}
    back |= {id(plain): (plain, jit.jit_fuser(plain)) for plain in _plain}
    patches.sweep(back, classes_of=patches.PREFIX)
    _compiled.clear()
    _plain.clear()
