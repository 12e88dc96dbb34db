"""Globs of a plan beside the names of a model, and the names that it has."""

from __future__ import annotations

import fnmatch
from typing import Iterable

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
