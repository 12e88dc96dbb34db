"""Globs of a plan beside the names of a model, and the names that it has."""

from __future__ import annotations

import fnmatch
from typing import Any, Callable, Iterable, Sequence

from torch import nn

from mindspeed_fx.errors import nearest
from mindspeed_fx.sharding.patterns import is_glob
from mindspeed_fx.sharding.plan import ShardingError


def check_patterns(patterns: Iterable[str], names: Iterable[str], what: str, plan: str) -> None:
    """Refuse patterns that name nothing.

    Raises:
        ShardingError: with the nearest name.
    """
    names = list(names)
    known = set(names)
    for pattern in patterns:
        if not (fnmatch.filter(names, pattern) if is_glob(pattern) else pattern in known):
            raise ShardingError(f'plan "{plan}" names no {what}: "{pattern}"{nearest(pattern, names)}')


def names_of_parameters(model: nn.Module) -> dict[str, list[str]]:
    """Name of a parameter -> all its names, of which tied ones have several."""
    by_identity: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        by_identity.setdefault(id(p), []).append(name)
    return {name: names for names in by_identity.values() for name in names}


def module_meant(
    reader: Any, modules: Sequence[str], readers: Iterable[Any], is_inside: Callable[[Any, str], bool]
) -> str:
    """Which of the modules that have a parameter is meant where ``reader`` uses it: one around it, else one whose code
    uses it nowhere, as an output layer that was fused with the loss.

    Args:
        modules: all that have it; several where it is tied.
        readers: all that use it.
        is_inside: whether a reader's code is in a module.
    """
    if len(modules) == 1:
        return modules[0]
    read = {m: [r for r in readers if is_inside(r, m)] for m in modules}
    mine = [m for m in modules if reader in read[m]] or [m for m in modules if not read[m]]
    return (mine or modules)[0]
