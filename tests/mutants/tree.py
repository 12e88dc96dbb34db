"""The private copy of a checkout in which faults are planted. The checkout itself is never written to."""

from __future__ import annotations

import contextlib
import filecmp
import importlib.util
import pathlib
import shutil
from dataclasses import dataclass
from typing import Iterator

from tests.mutants.faults import Fault, plant

IGNORED = shutil.ignore_patterns(".*", "build", "dist", "runs", "__pycache__", "*.egg-info")


@dataclass(frozen=True)
class Tree:
    """``package`` is the name of the package in ``root``; everything that is written lies in ``folder``."""

    root: pathlib.Path
    package: str
    folder: pathlib.Path

    @property
    def copy(self) -> pathlib.Path:
        return self.folder / "copy"

    def make(self, anew: bool = False) -> None:
        """Copies what is not there, and tests as they are now.

        Raises:
            SystemExit: the package is not the one that was copied: what was recorded of that one names other lines.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("copy", "recording") if anew else ():
            shutil.rmtree(self.folder / name, ignore_errors=True)
        if not self.copy.exists():
            shutil.copytree(self.root, self.copy, ignore=IGNORED)
            return
        changed = self.changed()
        if changed:
            raise SystemExit(
                f"{', '.join(changed[:5])}: changed since {self.copy} was made; `--anew` records it all anew"
            )
        for path in sorted(p for p in self.root.glob("test*/**/*") if p.is_file() and "__pycache__" not in p.parts):
            target = self.copy / path.relative_to(self.root)
            if not (target.exists() and filecmp.cmp(path, target, shallow=False)):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, target)

    def changed(self) -> list[str]:
        """Files of the package that are not as in the copy."""
        ours = {p.relative_to(self.root) for p in (self.root / self.package).rglob("*.py")}
        theirs = {p.relative_to(self.copy) for p in (self.copy / self.package).rglob("*.py")}
        differ = [p for p in ours & theirs if not filecmp.cmp(self.root / p, self.copy / p, shallow=False)]
        return sorted(str(p) for p in [*differ, *(ours ^ theirs)])

    def path(self, fault: Fault) -> pathlib.Path:
        return self.copy / self.package / fault.file

    @contextlib.contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        """The fault is in the copy within the block. Byte code of before and of within is not taken for the other's:
        it is told apart by time and size alone, which may be equal."""
        path = self.path(fault)
        source = path.read_bytes()
        try:
            path.write_text(plant(source.decode(), fault))
            _forget(path)
            yield
        finally:
            path.write_bytes(source)
            _forget(path)


def _forget(path: pathlib.Path) -> None:
    pathlib.Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
