"""Edits of a command line: what is not named stays word for word and in its place."""

from __future__ import annotations

from typing import Sequence


def _span(words: Sequence[str], start: int) -> int:
    """Position after the values of the flag at ``start``."""
    stop = start + 1
    while stop < len(words) and not words[stop].startswith("--"):
        stop += 1
    return stop


def without_flag(words: Sequence[str], flag: str) -> list[str]:
    """``words`` without ``flag`` and its values, wherever it stands."""
    result: list[str] = []
    position = 0
    while position < len(words):
        stop = _span(words, position)
        if words[position].partition("=")[0] != flag:
            result += words[position:stop]
        position = stop
    return result


def with_flag(words: Sequence[str], flag: str, value: "str | None") -> list[str]:
    """``words`` with ``flag`` set to ``value``, None for a switch: in its place where it stands, else at the end."""
    places = [n for n, word in enumerate(words) if word.partition("=")[0] == flag]
    if not places:
        return [*words, flag, *([] if value is None else [value])]
    result = list(words)
    for place in reversed(places):
        stop = _span(result, place)
        if value is None:
            continue
        result[place:stop] = [f"{flag}={value}"] if "=" in result[place] else [flag, value]
    return result


def changed_flags(old: Sequence[str], new: Sequence[str]) -> tuple[list[list[str]], list[str]]:
    """(flags of ``new`` with their values that ``old`` has not so, flags of ``old`` that ``new`` has not)."""
    before, after = _groups(old), _groups(new)
    return [group for group in after if group not in before], [
        group[0] for group in before if group[0] not in {g[0] for g in after}
    ]


def _groups(words: Sequence[str]) -> list[list[str]]:
    """Every flag with its values; ``--flag=value`` as ``--flag value``."""
    result, position = [], 0
    while position < len(words):
        stop = _span(words, position)
        if words[position].startswith("--"):
            name, _, text = words[position].partition("=")
            result.append([name, *([text] if text else []), *words[position + 1 : stop]])
        position = stop
    return result
