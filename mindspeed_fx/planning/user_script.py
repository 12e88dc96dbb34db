"""Scripts of users that a command runs: where they are, what they return, and in one line why they failed."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import runpy
import traceback
from typing import Iterator

from mindspeed_fx.arguments import format_value
from mindspeed_fx.errors import nearest

LONGEST = 600
"""Letters of a failure: torch's texts hold whole calls with their tensors."""
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class ScriptError(ValueError):
    """A script that is not there, returns something else, or failed; says where."""


def split_source(source: str, needs_function: bool = True) -> tuple[str, str]:
    """(script, function) of "SCRIPT.py:FUNCTION"; function is "" where it may be left out.

    Raises:
        ScriptError: something else, or no such file.
    """
    path, colon, function = source.partition(":")
    if not path.endswith(".py") or not function and (colon or needs_function):
        wanted = "SCRIPT.py:FUNCTION" if needs_function else "SCRIPT.py or SCRIPT.py:FUNCTION"
        raise ScriptError(f"{source!r} is not {wanted}")
    if os.path.isdir(path):
        raise ScriptError(f"{path} is a directory; a script is expected")
    if not os.path.isfile(path):
        raise ScriptError(f"there is no file {path} in {os.getcwd()}")
    return path, function


def build_model(path: str, function: str) -> tuple:
    """Model, args and kwargs that a function of a script returns.

    Raises:
        ScriptError: no such function, or it returns something else, or fails.
    """
    with failures(path):
        # absolute, since Python remembers what kind of thing a path was
        namespace = runpy.run_path(os.path.abspath(path))
    make = namespace.get(function)
    if not inspect.isroutine(make):
        functions = [n for n, v in namespace.items() if inspect.isfunction(v)]
        what = f"{function!r} is no function" if function in namespace else f"there is no function {function!r}"
        raise ScriptError(f"{path}: {what}{nearest(function, functions)}; it has {', '.join(functions) or 'none'}")
    needed = [p.name for p in inspect.signature(make).parameters.values() if _is_needed(p)]
    if needed:
        raise ScriptError(f"{path}: {function} takes {', '.join(needed)}; a function without arguments is expected")
    with failures(path):
        result = make()
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        raise ScriptError(
            f"{path}: {function} returned {format_value(result)}; (model, args) or (model, args, kwargs) is expected"
        )
    return (*result, {})[:3]


def _is_needed(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind not in (
        parameter.VAR_POSITIONAL,
        parameter.VAR_KEYWORD,
    )


@contextlib.contextmanager
def failures(path: str) -> Iterator[None]:
    """What a script raises, as an error of one line with the script's line; what the package itself fails with passes
    through, since its traceback tells more.

    Raises:
        ScriptError: the script failed, or ended with a status.
    """
    try:
        yield
    except SystemExit as end:
        if end.code not in (None, 0):
            what = f"status {end.code}" if isinstance(end.code, int) else str(end.code)
            raise ScriptError(f"{path} ended with {what}") from end
    except Exception as error:
        # torch.compile wraps what a backend raises
        cause = getattr(error, "inner_exception", None) or error
        inside, line = _is_inside(cause), _line(error, path)
        about_input = inside and isinstance(cause, (ValueError, ImportError, OSError))
        if inside and (not about_input or cause is error and line is None):
            raise
        text = " ".join(line.strip() for line in itertools.takewhile(str.strip, str(cause).strip().splitlines()))
        kind = "" if about_input else f"{type(cause).__name__}: "
        raise ScriptError(f"{path}{f':{line}' if line else ''}: {kind}{text[:LONGEST]}".rstrip(": ")) from error


def _is_inside(error: BaseException) -> bool:
    """Whether the package raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and os.path.abspath(frames[-1].filename).startswith(PACKAGE + os.sep)


def _line(error: BaseException, path: str) -> int | None:
    """The last line of the script that the error passed."""
    own = os.path.abspath(path)
    if isinstance(error, SyntaxError) and error.filename == own:
        return error.lineno
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if os.path.abspath(f.filename) == own]
    return lines[-1] if lines else None
