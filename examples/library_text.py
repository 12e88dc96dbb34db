"""Text that every machine has: the source of Python's own library."""

from __future__ import annotations

import pathlib
import sysconfig


def find_standard_library() -> list[pathlib.Path]:
    """Source files of the Python that runs this, in a fixed order; tests, caches and installed packages left out."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"}
    return sorted(p for p in root.rglob("*.py") if not skipped & set(p.relative_to(root).parts))


def find_text(files: list[str] | None) -> tuple[str, list[pathlib.Path]]:
    """(name, paths) of ``files``, or of the standard library's source.

    Raises:
        FileNotFoundError: names those that do not exist.
    """
    if not files:
        version = sysconfig.get_python_version()
        return f"source text of the Python {version} standard library", find_standard_library()
    paths = [pathlib.Path(f) for f in files]
    absent = [str(p) for p in paths if not p.is_file()]
    if absent:
        raise FileNotFoundError(f"there is no file {', '.join(absent)}")
    return ", ".join(files), paths
