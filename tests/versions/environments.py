"""Versions to try, and an environment for each."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Sequence

ROOT = Path(__file__).parents[2]
TESTS = (
    "pytest pytest-timeout pytest-xdist coverage expecttest hypothesis pydantic transformers accelerate "
    "megatron-core einops sentencepiece six pyyaml scipy highspy matplotlib tqdm jinja2 rich pyelftools numpy"
).split()
"""What the usual tests import, but for torch, the linters and the documentation's packages."""


@dataclass(frozen=True)
class Versions:
    """One environment: a Python, and versions of packages in place of those in constraints.txt."""

    python: str
    packages: dict[str, str] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        return "-".join([f"py{self.python}", *(f"{p}{v}" for p, v in self.packages.items())])


MATRIX = (
    Versions("3.10"),
    Versions("3.12"),
    Versions("3.13"),
    Versions("3.11", {"torch": "2.11.0"}),
    Versions("3.11", {"torch": "2.12.0"}),
    Versions("3.11", {"torch": "2.14.1"}),
    Versions("3.12", {"torch": "2.11.0"}),
    Versions("3.10", {"torch": "2.11.0", "transformers": "4.57.6", "megatron-core": "0.16.0"}),
    Versions("3.13", {"torch": "2.14.1"}),
    Versions("3.11", {"transformers": "5.0.0"}),
    Versions("3.11", {"transformers": "4.57.6"}),
    Versions("3.11", {"megatron-core": "0.16.0"}),
)
"""Python 3.11 with constraints.txt is what every other command runs. Two rows are the ends of what the package claims:
the oldest Python with the oldest of all, the newest with the newest torch."""


class Missing(RuntimeError):
    """An environment cannot be had; says why."""


def interpreter(version: str) -> str:
    """A Python of that version, of the path or of pyenv.

    Raises:
        Missing: there is none.
    """
    paths = [
        shutil.which(f"python{version}"),
        *map(str, sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))),
    ]
    for path in filter(None, paths):
        told = subprocess.run(
            [path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True, text=True
        )
        if told.returncode == 0 and told.stdout.strip() == version:
            return path
    raise Missing(f"no python{version} on this machine")


def constraints(text: str, versions: Versions) -> str:
    """constraints.txt without what ``versions`` says otherwise. A package that is asked for in another version may need
    others of its own, so that with transformers those of Hugging Face are free."""
    free = set(versions.packages)
    if "transformers" in free:
        free |= {"huggingface_hub", "huggingface-hub", "tokenizers", "accelerate", "typer", "httpx2", "httpcore2"}
    lines = [line for line in text.splitlines() if re.split(r"[=<>; \[]", line, maxsplit=1)[0] not in free]
    return "\n".join([*lines, *(f"{p}=={v}" for p, v in versions.packages.items())]) + "\n"


def make(versions: Versions, folder: Path) -> Path:
    """The environment's Python; an environment that is ready is taken as it is.

    Raises:
        Missing: no such Python, or the index has no such packages for it.
    """
    place = folder / versions.name
    python = place / "bin/python"
    if (place / "ready").exists():
        return python
    folder.mkdir(parents=True, exist_ok=True)
    _run([interpreter(versions.python), "-m", "venv", "--clear", place], "venv")
    allowed = place / "constraints.txt"
    allowed.write_text(constraints((ROOT / "constraints.txt").read_text(), versions))
    pip = [python, "-m", "pip", "install", "-q", "--no-compile", "--disable-pip-version-check"]
    torch = next(line for line in allowed.read_text().splitlines() if line.startswith("torch=="))
    _run([*pip, torch], torch)  # alone and first, so that nothing pulls another build
    _run([*pip, "-c", allowed, *TESTS], "the tests' packages")
    _run([*pip, "--no-deps", "-e", ROOT], "the package")
    (place / "ready").touch()
    return python


def _run(command: Sequence[object], what: str) -> None:
    result = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or result.stderr.splitlines()
        raise Missing(f"{what}: {lines[-1] if lines else 'pip failed'}")
