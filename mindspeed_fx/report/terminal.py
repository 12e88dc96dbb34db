"""Text with colours on a terminal, where rich is installed and NO_COLOR is not set; elsewhere as it is.

Colours only repeat what the words say.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any, Callable

STYLES = {
    "title": r"(?P<title>^\S.*\?.*$|^(fused|measured|nothing to do|most time|step|forward)\b[^:]*:)",
    "name": r"(?P<name>\b(fusion|canonicalize|lowering|overlap|recompute|sharding)\.\w+)",
    "number": r"(?P<number>(?<![\w.-])[+-]?\d[\d,.]*( (us|ms|s|KiB|MiB|GiB|MB|kernels|sites)\b|%)?)",
    "bad": r"(?P<bad>\b(does not fit|exposed|not modelled|not measured|near misses|costs)\b)",
    "good": r"(?P<good>\b(fits|hidden under compute|saves|rewrites)\b)",
}
COLOURS = {"title": "bold", "name": "cyan", "number": "bold blue", "bad": "yellow", "good": "green"}


def show(text: str, stream: Any = None) -> None:
    """Print ``text``; what it says does not depend on where."""
    stream = stream or sys.stdout
    if not is_coloured(stream):
        print(text, file=stream)
        return
    from rich.console import Console

    Console(file=stream, soft_wrap=True, highlight=False, theme=_theme()).print(highlighted(text))


def is_coloured(stream: Any) -> bool:
    """Whether colours are shown on ``stream``."""
    is_terminal: Callable[[], bool] = getattr(stream, "isatty", lambda: False)
    return is_terminal() and not os.environ.get("NO_COLOR") and importlib.util.find_spec("rich") is not None


def highlighted(text: str) -> Any:
    """``text`` as rich's, with styles."""
    from rich.text import Text

    result = Text(text)
    for name in ("number", "name", "good", "bad", "title"):
        result.highlight_regex(f"(?m){STYLES[name]}", style_prefix="mindspeed.")
    return result


def _theme() -> Any:
    from rich.theme import Theme

    return Theme({f"mindspeed.{name}": colour for name, colour in COLOURS.items()})
