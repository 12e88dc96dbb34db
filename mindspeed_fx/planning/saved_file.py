"""The file of :func:`mindspeed_fx.save_compiled`: a zip archive of what it was made by, the program and its libraries.

made_by.json             versions, machine, options, digests: read and compared before anything else is touched
program                  torch's bytes: forward, backward, guards (code, as are the libraries)
libraries/ab/cab...so    compiled kernels, by their places in Inductor's cache
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pathlib
import platform
import re
import zipfile
from typing import Any, Iterable, Mapping

import torch

from mindspeed_fx._version import __version__
from mindspeed_fx.compat import ahead, cpp
from mindspeed_fx.private_files import distrust, make_private, write_whole

HEADER, PROGRAM, LIBRARIES = "made_by.json", "program", "libraries/"
FORMAT = 1
_LIBRARY = re.compile(r"([a-z0-9]{2}|mindspeed_fx)/[A-Za-z0-9_.-]+\.so")
"""Places that a library may have in the cache: nothing else of a file is ever written."""


class StaleFile(Exception):
    """A file that is not taken, with the reason."""


def describe_machine(device: str) -> dict[str, Any]:
    """What compiled code depends on. Generated code for cpu has its number of threads in it."""
    if device == "cpu":
        flags = hashlib.sha256(cpp.processor().encode()).hexdigest()[:16]
        name = f"{platform.machine()}, instructions {flags}, {torch.backends.cpu.get_cpu_capability()}"
        return {"processor": name, "threads": torch.get_num_threads()}
    module = getattr(torch, device, None)
    return {"accelerator": module.get_device_name() if module is not None and module.is_available() else "none"}


def describe_versions() -> dict[str, str]:
    return {
        "mindspeed_fx": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": str(torch.version.cuda),
    }


def digest_code(functions: Iterable[tuple[str, int, int]]) -> list[list[Any]]:
    """Module, first line, line after the last and digest of every function that was traced; those without a source
    (of a console) are left out."""
    rows = []
    for module, first, end in sorted(functions):
        if (digest := _digest_lines(module, first, end)) is not None:
            rows.append([module, first, end, digest])
    return rows


def _digest_lines(module: str, first: int, end: int) -> str | None:
    lines = ahead.module_lines(module)
    return None if lines is None else hashlib.sha256("".join(lines[first - 1 : end - 1]).encode()).hexdigest()


def write(
    path: str | os.PathLike, made_by: Mapping[str, Any], program: bytes, libraries: Mapping[str, pathlib.Path]
) -> None:
    """A file that no reader sees half of.

    Args:
        path: the file.
        made_by: what :func:`compare` reads.
        program: torch's bytes.
        libraries: place in Inductor's cache -> file.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    header = {"format": FORMAT, **made_by, "program": hashlib.sha256(program).hexdigest()}
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(HEADER, json.dumps(header, indent=1, default=str))
        archive.writestr(PROGRAM, program)
        for place, library in libraries.items():
            archive.write(library, LIBRARIES + place)
    write_whole(path, whole.getvalue())


def read_header(path: str | os.PathLike) -> dict[str, Any]:
    """What a file says of itself; nothing of it runs.

    Raises:
        StaleFile: there is none, it is torn, or it is another kind of file.
    """
    path = pathlib.Path(path)
    if not path.exists():
        raise StaleFile("there is no such file")
    for place in (path.parent, path):
        if reason := distrust(place, is_named=True):
            raise StaleFile(f"{reason}, and it is code")
    try:
        with zipfile.ZipFile(path) as archive:
            header = json.loads(archive.read(HEADER))
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise StaleFile(f"it is torn, or no file of save_compiled ({error})") from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise StaleFile("it has another format")
    return header


def compare(header: Mapping[str, Any], made_by: Mapping[str, Any]) -> None:
    """Raise :class:`StaleFile` with the first difference, whose two sides it names."""
    for group in ("versions", "machine", "options"):
        before, now = header.get(group), json.loads(json.dumps(made_by[group], default=str))
        for key in sorted({*(before or {}), *now}):
            if (was := (before or {}).get(key)) != now.get(key):
                where = f'option "{key}"' if group == "options" else key
                raise StaleFile(f"{where} was {was!r} and is {now.get(key)!r}")
    if header.get("identity") != made_by["identity"]:
        raise StaleFile("the sources of mindspeed_fx, or of a registered pass, are not those that it was made by")
    for module, first, end, digest in header.get("code", ()):
        if _digest_lines(module, first, end) != digest:
            raise StaleFile(f"{module}, lines {first} to {end - 1}, is not the code that it was made from")


def read_program(path: str | os.PathLike, header: Mapping[str, Any]) -> bytes:
    """The program, whole, with its libraries put into Inductor's cache where they are missing.

    Raises:
        StaleFile: a part is torn.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            program = archive.read(PROGRAM)
            if hashlib.sha256(program).hexdigest() != header.get("program"):
                raise StaleFile("its program is torn")
            for name in archive.namelist():
                if name.startswith(LIBRARIES) and _LIBRARY.fullmatch(place := name.removeprefix(LIBRARIES)):
                    _put(pathlib.Path(ahead.cache_directory(), place), archive, name)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise StaleFile(f"it is torn ({error})") from None
    return program


def _put(target: pathlib.Path, archive: zipfile.ZipFile, name: str) -> None:
    """A cache that cannot be written costs the time to compile, nothing else."""
    if target.exists():
        return
    with contextlib.suppress(OSError):
        make_private(target.parent)
        write_whole(target, archive.read(name), 0o700)
