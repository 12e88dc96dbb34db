"""Folders whose files register themselves: a new operator or pass is one new file, and no list that names it. And what
caches know the files of the package by."""

from __future__ import annotations

import functools
import hashlib
import importlib
import pathlib
import pkgutil

from mindspeed_fx._version import __version__


def import_all(package: str, prefix: str = "", without: str | None = None) -> None:
    """Import the modules of a package in the order of their names; folders inside it are left alone.

    Args:
        package: dotted name; it may be the package that is being imported.
        prefix: only modules whose names start with it.
        without: no modules whose names start with it.
    """
    path = importlib.import_module(package).__path__
    for name in sorted(m.name for m in pkgutil.iter_modules(path) if not m.ispkg):
        if name.startswith(prefix) and not (without and name.startswith(without)):
            importlib.import_module(f"{package}.{name}")


@functools.cache
def package_hash() -> str:
    """Of the version and of the sources of the package."""
    digest = hashlib.sha256(__version__.encode())
    for path in sorted(pathlib.Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
