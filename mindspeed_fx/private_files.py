"""Folders whose files are run: who may write into them, and new ones that nobody else may.

What is loaded as code (libraries, packages) is as trustworthy as everybody who can write where it lies. A folder that
nobody named belongs to this user or to root, and nobody else writes into it; of a folder that the user named only the
latter is asked, for a group's shared one may belong to another.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import pathlib
import shutil
import stat
import tempfile


def distrust(folder: str | os.PathLike, is_named: bool = False) -> str | None:
    """Why what lies in ``folder`` is not run; None where it is, or where there is no such folder yet.

    Args:
        folder: it.
        is_named: the user chose it.
    """
    if not hasattr(os, "getuid"):
        return None
    try:
        status = os.stat(folder)
    except OSError:
        return None
    if status.st_mode & stat.S_IWOTH:
        return f"anybody may write into {folder} (chmod o-w {folder})"
    if not is_named and status.st_uid not in (os.getuid(), 0):
        return f"{folder} belongs to another user ({status.st_uid})"
    return None


def make_private(folder: str | os.PathLike) -> pathlib.Path:
    """``folder``, made where it is missing: each new one for this user alone.

    Raises:
        OSError: it cannot be made.
    """
    path = pathlib.Path(folder)
    for each in (*reversed(path.parents), path):
        if not each.exists():
            each.mkdir(mode=0o700, exist_ok=True)
    return path


def write_whole(path: str | os.PathLike, data: str | bytes, mode: int = 0o600) -> None:
    """A file that no reader ever sees half of, nor a later run after this one was killed.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    path = pathlib.Path(path)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def process_folder() -> pathlib.Path:
    """An empty folder for this process and user alone, removed at its end; a fork has one of its own."""
    return _process_folder(os.getpid())


@functools.cache
def _process_folder(process: int) -> pathlib.Path:
    folder = pathlib.Path(tempfile.mkdtemp(prefix="mindspeed_fx-"))
    atexit.register(_remove, folder, process)
    return folder


def _remove(folder: pathlib.Path, process: int) -> None:
    if os.getpid() == process:  # a fork runs what its parent registered, too
        shutil.rmtree(folder, ignore_errors=True)
