"""The error of a bad option, and the nearest valid name for it."""

from __future__ import annotations

import difflib
from typing import Any


class OptionError(ValueError):
    """A bad option: the message names the option, the value and the valid values."""


def nearest(name: str, valid: Any) -> str:
    """ " (did you mean ...?)" when a valid name is close to ``name``, else ""."""
    close = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return f' (did you mean "{close[0]}"?)' if close else ""
