"""The code of the pages: README.md and docs/, as a reader would run it, block by block in one namespace for each page.

A fence has a language. Beside "python" and "bash", "yaml" and "json" are read, and "text" is looked at for commands.
A block with a title is a file: it is written where the page runs, for a later command. Comments say the rest:

    <!-- setup
    model = ...                 code that runs at that place and is not shown
    -->
    <!-- slow: why -->          the next block runs in the slow tier alone
    <!-- npu: why -->           the next block runs where the Ascend tool chain is
    <!-- not run: why -->       the next block runs nowhere; the reason names what it would need
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(p.relative_to(ROOT).as_posix() for p in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
LANGUAGES = ("python", "bash", "yaml", "json", "text")
TAGS = ("slow", "npu", "not run")

PART = re.compile(
    r"^<!-- setup\n(?P<setup>.*?)^-->$"
    r"|^<!-- (?P<tag>[a-z ]+?)(?::(?P<reason>[^\n]*?))?\s*-->$"
    r"|^(?P<fence>`{3,})(?P<info>[^\n`]*)\n(?P<code>.*?)^(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)


class PageError(Exception):
    """A page that breaks the rules above."""


@dataclass
class Block:
    """One fence, or one hidden setup."""

    page: str
    line: int
    """Of the first line of the code, from 1."""
    language: str
    title: str
    code: str
    tag: str = ""
    reason: str = ""
    is_setup: bool = False

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    def runs_in(self, tier: str) -> bool:
        """Whether it runs in the tier "usual", "slow" or "npu"."""
        return self.tag in ("", tier)


def read_page(page: str) -> list[Block]:
    """The blocks of a page of the repository."""
    return read_text((ROOT / page).read_text(), page)


def read_text(text: str, page: str) -> list[Block]:
    """The blocks of a page's text, each with the tag that stands before it."""
    blocks: list[Block] = []
    tag, reason = "", ""
    for match in PART.finditer(text):
        line = text.count("\n", 0, match.start()) + 2
        if match["setup"] is not None:
            blocks.append(Block(page, line, "python", "", match["setup"], is_setup=True))
        elif match["tag"] is not None:
            if match["tag"] in TAGS:
                tag, reason = match["tag"], (match["reason"] or "").strip()
                if len(reason.split()) < 3:
                    raise PageError(f'{page}:{line - 1} "{tag}" without a reason; <!-- {tag}: why --> is expected')
        else:
            blocks.append(_block(match, page, line, tag, reason))
            tag, reason = "", ""
    if tag:
        raise PageError(f'{page}: "{tag}: {reason}" stands before no block')
    return blocks


def _block(match: re.Match[str], page: str, line: int, tag: str, reason: str) -> Block:
    language, _, rest = match["info"].strip().partition(" ")
    title = re.fullmatch(r'title="([^"]+)"', rest.strip())
    if language not in LANGUAGES or (rest.strip() and title is None):
        raise PageError(f'{page}:{line - 1} is a block of "{match["info"]}"; of {", ".join(LANGUAGES)} is expected')
    return Block(page, line, language, title[1] if title else "", match["code"], tag, reason)


def commands(block: Block) -> list[str]:
    """The commands of a shell block, continued lines joined."""
    lines = block.code.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
