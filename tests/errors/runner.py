"""A row is a wrong input, how it is given, and the words that its message must have: what was wrong and what is right.

    ROWS = [row("a level that is none", lambda: Options(level=3), '"level" is 3', "0, 1, 2")]
    test_options = table(ROWS)

In Python the error is one of the package's own, one line; of the command it is one line on stderr, a status that is not
0 and no traceback. A row runs in an empty directory; one whose call takes an argument gets pytest's ``monkeypatch``.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import pathlib
import re
import warnings
from dataclasses import dataclass
from typing import Any, Callable

import pytest

from mindspeed_fx import cli
from mindspeed_fx.errors import OptionError
from mindspeed_fx.megatron.flags import FlagError

LONGEST = 1500
"""Letters of a message: lists of valid names are long, the text of a graph is longer."""

LOGGED = re.compile(r"[EWI]\d{4} \d\d:\d\d:\d\d")
"""A line of torch's own log, which goes to what stderr was at its first import, or is at the moment (torch 2.14)."""


@dataclass(frozen=True)
class Row:
    name: str
    call: Callable[..., Any]
    words: tuple[str, ...]
    error: type[BaseException] | tuple[type[BaseException], ...] = OptionError
    status: int = 2
    is_command: bool = False


def row(name: str, call: Callable[..., Any], *words: str, error: Any = OptionError) -> Row:
    """A wrong input of a function; ``error`` is the class that its docstring names."""
    return Row(name, call, words, error)


def command(name: str, arguments: str | Callable[..., list[str]], *words: str, status: int = 2) -> Row:
    """Wrong arguments of ``mindspeed-fx``; a function of them may write files first."""
    return Row(name, arguments if callable(arguments) else arguments.split, words, status=status, is_command=True)


def file(name: str, text: str | bytes = "") -> str:
    """Writes a file and returns its name, for a call."""
    path = pathlib.Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return name


def folder(name: str) -> str:
    """Makes a directory and returns its name, for a call."""
    pathlib.Path(name).mkdir(parents=True)
    return name


def table(rows: list[Row]) -> Callable[..., None]:
    """The test of some rows."""
    names = [r.name for r in rows]
    assert len(set(names)) == len(names), f"two rows have one name: {sorted(n for n in names if names.count(n) > 1)}"

    @pytest.mark.parametrize("wrong", rows, ids=names)
    def test(wrong: Row, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        outcome = run_command(wrong, monkeypatch) if wrong.is_command else catch(wrong, monkeypatch)
        problem = complain(wrong, outcome)
        assert not problem, f"{problem}\n{outcome}"

    return test


def catch(wrong: Row, monkeypatch: pytest.MonkeyPatch) -> str | Exception:
    """The error of a call, without what torch.compile wraps it in; a text where there is none."""
    try:
        result = _call(wrong, monkeypatch)
    except Exception as error:
        return getattr(error, "inner_exception", error)
    return f"taken in silence: {type(result).__name__} came back"


def run_command(wrong: Row, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the command wrote to stderr and its status, or why that is not known."""
    arguments = _call(wrong, monkeypatch)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            status = cli.main(arguments)
        except SystemExit as end:
            status = end.code
    own = "\n".join(line for line in err.getvalue().rstrip().splitlines() if not LOGGED.match(line))
    return f"{own}\nstatus {status}"


def _call(wrong: Row, monkeypatch: pytest.MonkeyPatch) -> Any:
    takes_one = inspect.isfunction(wrong.call) and inspect.signature(wrong.call).parameters
    return wrong.call(monkeypatch) if takes_one else wrong.call()


def complain(wrong: Row, outcome: str | Exception) -> str:
    """What is wrong with a message; "" when it is as it has to be."""
    text = str(outcome)
    if wrong.is_command:
        text, _, status = text.rpartition("\nstatus ")
        if status != str(wrong.status):
            return f"the status is {status}, not {wrong.status}"
        if not text.startswith("mindspeed-fx"):
            return "the line does not say which command wrote it"
    elif isinstance(outcome, str):
        return outcome
    elif not isinstance(outcome, wrong.error):
        return f"{type(outcome).__name__}, not {wrong.error}"
    if not isinstance(outcome, FlagError) and "\n" in text or "Traceback" in text:  # which has a line for each flag
        return "more than one line"
    if len(text) > LONGEST:
        return f"{len(text)} letters"
    missing = [word for word in wrong.words if word not in text]
    return f"without {missing}" if missing else ""
