"""Answers by operator, remembered."""

from __future__ import annotations

from typing import Any, Callable


def by_target(function: Callable) -> Callable:
    """``function`` of what a node calls, and of whatever else, remembered. By identity: torch hashes an operator in
    Python, which takes as long as most answers.
    """
    known: dict[tuple, tuple[Any, Any]] = {}

    def remembered(target: Any, *rest: Any) -> Any:
        result = known.get((id(target), rest))
        if result is None:
            if len(known) > 4096:
                known.clear()
            result = known[id(target), rest] = (
                target,
                function(target, *rest),
            )  # the target stays alive, and so its identity its own
        return result[1]

    return remembered
