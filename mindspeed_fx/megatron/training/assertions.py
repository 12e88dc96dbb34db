"""Megatron-LM's checks of arguments say by assertions what they miss, many without a word: those get words here."""

from __future__ import annotations

import ast
import linecache
import re
import traceback
from argparse import Namespace
from typing import Any, Callable


def with_words(check: Callable, args: Namespace, *rest: Any, **kwargs: Any) -> Any:
    """``check(args, ...)``.

    Raises:
        ValueError: an assertion without a text fails; the message has the flags that it reads, and itself.
    """
    try:
        return check(args, *rest, **kwargs)
    except AssertionError as error:
        if str(error):
            raise
        source = _source(traceback.extract_tb(error.__traceback__)[-1])
        names = dict.fromkeys(n for n in re.findall(r"\bargs\.(\w+)", source) if hasattr(args, n))
        flags = ", ".join(f"--{n.replace('_', '-')} (now {getattr(args, n)})" for n in names) or "arguments"
        raise ValueError(f"{flags}: Megatron-LM asks for `{source}`") from error


def _source(frame: traceback.FrameSummary) -> str:
    """The assertion of a frame, in one line."""
    line = frame.lineno or 1
    whole = ast.parse("".join(linecache.getlines(frame.filename)))
    assertions = (n for n in ast.walk(whole) if isinstance(n, ast.Assert))
    assertion = next((n for n in assertions if n.lineno <= line <= (n.end_lineno or 0)), None)
    return ast.unparse(assertion.test) if assertion else linecache.getline(frame.filename, line).strip()
