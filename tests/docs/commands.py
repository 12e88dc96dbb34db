"""Commands of shell blocks and of prose: what runs is run, what does not is held to what exists."""

from __future__ import annotations

import argparse
import functools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from mindspeed_fx import cli
from tests.docs.blocks import ROOT

VARIABLE = re.compile(r"[A-Z_]+=")


class CommandError(Exception):
    """A command that would not work for the reader."""


@functools.cache
def make_targets() -> frozenset[str]:
    """Targets of the Makefile."""
    return frozenset(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@functools.cache
def extras() -> frozenset[str]:
    """Extras of pyproject.toml."""
    table = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
    return frozenset(re.findall(r"^(\w+) = \[", table, re.MULTILINE))


def run_command(line: str, folder: Path) -> None:
    """Run a command of a page in the page's folder: ours and Python's; others are looked at."""
    words = shlex.split(line, comments=True)
    variables = [word for word in words if VARIABLE.match(word)]
    words = [word for word in words if not VARIABLE.match(word)]
    check_words(words, folder)
    program = {"mindspeed-fx": ["-m", "mindspeed_fx.cli"], "python": []}.get(words[0])
    if program is None or words[1:2] == ["-m"]:
        return
    if words[0] == "mindspeed-fx" and not variables:
        code = cli.main(words[1:])
    else:
        environment = {**os.environ, **dict(v.split("=", 1) for v in variables)}
        done = subprocess.run([sys.executable, *program, *words[1:]], cwd=folder, env=environment, capture_output=True)
        code = done.returncode
        if code:
            raise CommandError(f"{line}: {done.stderr.decode()[-2000:]}")
    if code:
        raise CommandError(f"{line} ends with {code}")


def check_command(line: str, folder: Path, is_elsewhere: bool = False) -> None:
    """What can be known of a command without running it; scripts of another repository are elsewhere."""
    check_words([w for w in shlex.split(line, comments=True) if not VARIABLE.match(w)], folder, is_elsewhere)


def check_words(words: list[str], folder: Path, is_elsewhere: bool = False) -> None:
    """The program is known, and what it is given exists."""
    program, rest = Path(words[0]).name, words[1:]
    if program == "mindspeed-fx":
        _check_ours(rest)
    elif program == "make":
        unknown = [w for w in rest if not VARIABLE.match(w) and w not in make_targets()]
        if unknown:
            raise CommandError(f"make {unknown[0]}: the Makefile has {', '.join(sorted(make_targets()))}")
    elif program == "pip":
        named = [e for w in rest for e in re.findall(r"\[([\w,]+)\]", w)]
        unknown = [e for group in named for e in group.split(",") if e not in extras()]
        if unknown or rest[:1] != ["install"]:
            raise CommandError(f"pip {' '.join(rest)}: extras are {', '.join(sorted(extras()))}")
    elif program in ("python", "torchrun"):
        if not is_elsewhere:
            _check_script(program, rest, folder)
    else:
        raise CommandError(f"{program} is no program that the pages' tests know")


def _check_ours(words: list[str]) -> None:
    own = words[: words.index("--")] if "--" in words else words
    try:
        _, unknown = cli._parser().parse_known_args(own)
    except SystemExit as e:
        raise CommandError(f"mindspeed-fx {' '.join(own)} is refused") from e
    if unknown:
        raise CommandError(f"mindspeed-fx {' '.join(own)}: {unknown[0]} is no argument of it")


def _check_script(program: str, words: list[str], folder: Path) -> None:
    if "-m" in words:
        name = words[words.index("-m") + 1]
        path = ROOT / name.replace(".", "/")
        if not path.with_suffix(".py").is_file() and not (path / "__main__.py").is_file():
            raise CommandError(f"{program} -m {name}: no such module here")
        return
    script = next((w for w in words if w.endswith(".py")), None)
    if script is None or not ((folder / script).is_file() or (ROOT / script).is_file()):
        raise CommandError(f"{program} {' '.join(words)}: no such script here, and the page writes none")


def check_synopsis(text: str) -> None:
    """The command and its options in a line that shows how it is called: brackets and names of values are no matter."""
    words = re.sub(r"[\[\]|`]", " ", text).split()
    choices = _subparsers()
    if len(words) < 2 or words[1].startswith("-"):
        return
    for name in words[1].split(","):
        if name not in choices and re.fullmatch(r"[a-z-]+", name):
            raise CommandError(f"{text}: {name} is no command")
    known = choices[words[1]]._option_string_actions if words[1] in choices else {}
    own = words[: words.index("--")] if "--" in words else words
    unknown = [w for w in own if w.startswith("--") and w.split("=")[0] not in known]
    if unknown:
        raise CommandError(f"{text}: {unknown[0]} is no option of mindspeed-fx {words[1]}")


@functools.cache
def _subparsers() -> dict[str, argparse.ArgumentParser]:
    return dict(next(a for a in cli._parser()._actions if isinstance(a, argparse._SubParsersAction)).choices)
