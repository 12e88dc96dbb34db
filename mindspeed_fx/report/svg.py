"""Elements of SVG pictures as text; what comes from a model (names, lines of code) is escaped here and nowhere else."""

from __future__ import annotations

from html import escape
from typing import Any, Iterable


def element(tag: str, content: str = "", **attributes: Any) -> str:
    """One element around ``content``, which is SVG. Attribute names have "_" for "-"; None leaves one out; floats have
    one decimal."""
    words = (
        f' {name.rstrip("_").replace("_", "-")}="{escape(_word(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    return f"<{tag}{''.join(words)}>{content}</{tag}>" if content else f"<{tag}{''.join(words)}/>"


def text(x: float, y: float, words: str, fill: str = "currentColor", **attributes: Any) -> str:
    """Words whose baseline begins at (x, y)."""
    return element("text", escape(words), x=x, y=y, fill=fill, **attributes)


def rect(x: float, y: float, width: float, height: float, fill: str, title: str = "", **attributes: Any) -> str:
    """A rectangle; ``title`` is shown when it is pointed at."""
    content = element("title", escape(title)) if title else ""
    return element("rect", content, x=x, y=y, width=width, height=height, fill=fill, **attributes)


def picture(width: float, height: float, parts: Iterable[str], label: str) -> str:
    """The whole picture, as wide as the page lets it be.

    Args:
        label: what it shows, for readers that cannot see it.
    """
    return element(
        "svg",
        "".join(parts) or " ",
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_word(width)} {_word(height)}",
        width="100%",
        font_family="system-ui, sans-serif",
        font_size=11,
        role="img",
        aria_label=label,
    )


def _word(value: Any) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)
