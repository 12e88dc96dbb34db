"""Which of many globs match a name. A plan has one for every layer's weights, so that they are not tried one by one."""

from __future__ import annotations

import fnmatch
import functools
import re
from typing import Iterable


def matching(patterns: Iterable[str], name: str) -> list[str]:
    """The patterns that match ``name``, in their order."""
    return _matcher(tuple(patterns)).matching(name)


def matching_alternatives(patterns: Iterable[str], name: str) -> list[str]:
    """The same where a pattern may be several ("a|b"), one of which matches."""
    return _matcher(tuple(patterns), "|").matching(name)


def of_operator(pattern: str) -> tuple[str, str]:
    """Module glob and operators of "layers.*.attn/mindspeed.attention|aten.mm"; the glob "" where all modules' are
    meant."""
    module, _, operators = pattern.rpartition("/")
    return module, operators


@functools.lru_cache(maxsize=1024)
def matching_operators(patterns: tuple[str, ...], name: str, module: str) -> list[str]:
    """The patterns that match operator ``name`` where ``module`` calls it; those that name modules come last."""
    parts = [of_operator(p) for p in patterns]
    known = set(matching_alternatives(dict.fromkeys(operators for _, operators in parts), name))
    met = [(m, p) for p, (m, o) in zip(patterns, parts) if o in known and (not m or matching([m], module))]
    return [p for _, p in sorted(met, key=lambda pair: bool(pair[0]))]


def is_glob(pattern: str) -> bool:
    """Whether ``pattern`` can match more than itself."""
    return any(wildcard in pattern for wildcard in "*?[")


class _Matcher:
    """Patterns without wildcards are looked up, the others tried."""

    def __init__(self, patterns: tuple[str, ...], separator: str | None):
        self.patterns = patterns
        self.literal: dict[str, list[int]] = {}
        self.globs: list[tuple[int, re.Pattern[str]]] = []
        for place, pattern in enumerate(patterns):
            for one in pattern.split(separator) if separator else [pattern]:
                if is_glob(one):
                    self.globs.append((place, re.compile(fnmatch.translate(one))))
                else:
                    self.literal.setdefault(one, []).append(place)

    def matching(self, name: str) -> list[str]:
        places = {*self.literal.get(name, ()), *(place for place, glob in self.globs if glob.match(name))}
        return [self.patterns[place] for place in sorted(places)]


@functools.lru_cache(maxsize=64)
def _matcher(patterns: tuple[str, ...], separator: str | None = None) -> _Matcher:
    return _Matcher(patterns, separator)
