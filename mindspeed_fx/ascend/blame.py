"""An error of the user's model in few lines: what was said, and where in the user's own files. Standard library
only.
"""

from __future__ import annotations

import pathlib
import re
import sys
import traceback

PACKAGE = pathlib.Path(__file__).parents[1]
LONGEST = 600
"""Characters of a message that are shown in one line: dynamo's may hold a whole graph."""

_FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+), in (\S+)', re.M)
_GOT = re.compile(r"\bgot (\w+)\((['\"])(.*?)\2\)(?:\s|$)", re.S)


def describe_error(e: BaseException) -> dict[str, str]:
    """What a report of ``e`` needs.

    Returns:
        type: of the exception. message: in one line. where: "FILE:LINE in FUNCTION" of the last of the user's lines, ""
            where
        none took part. frames: the user's lines, as a traceback shows them. traceback: all of it.
    """
    text = str(e).split("\n\nSet TORCHDYNAMO_VERBOSE")[0].strip()
    said, _, inside = text.partition("from user code:")
    kind, message = type(e).__name__, _line(said) or "no message"
    if inside and (got := _GOT.search(said.strip())):  # torch.compile wraps what an operator said
        kind, message = got[1], _line(got[3].encode().decode("unicode_escape") if "\\" in got[3] else got[3])
    frames = [f for f in traceback.extract_tb(e.__traceback__) if _users(f.filename)]
    shown = "".join(traceback.format_list(frames))
    if isinstance(e, SyntaxError) and e.filename:
        where, shown = f"{e.filename}:{e.lineno}", "".join(traceback.format_exception_only(e)[:-1])
        message = e.msg
    elif inside:
        result = _FRAME.findall(inside)
        own = [f for f in result if _users(f[0])] or result
        where, shown = (f"{own[-1][0]}:{own[-1][1]} in {own[-1][2]}" if own else ""), inside.strip("\n") + "\n"
    else:
        where = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    return {
        "type": kind,
        "message": message[:LONGEST],
        "where": where,
        "frames": shown,
        "traceback": "".join(traceback.format_exception(e)),
    }


def _users(file: str) -> bool:
    """A file that is neither ours nor torch's nor Python's."""
    if file.startswith("<"):
        return False
    path = pathlib.Path(file).absolute()
    foreign = (
        PACKAGE,
        pathlib.Path(sys.prefix),
        pathlib.Path(sys.base_prefix, "lib"),
        pathlib.Path(traceback.__file__).parent,
    )
    return not any(path.is_relative_to(p) for p in foreign) and "site-packages" not in path.parts


def _line(text: str) -> str:
    return " ".join(text.split())
