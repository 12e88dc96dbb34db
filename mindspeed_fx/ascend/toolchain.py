"""The Ascend tool chain in a directory of its own: torch_npu, triton-ascend and its compiler, an MLIR to run the IR on
a CPU.

None of it may enter the user's environment: torch_npu beside a plain torch breaks ``import torch``, triton-ascend
overwrites ``triton``. Each component gets a folder ``<name>-<version>-<python>-<machine>`` that only processes started
by :mod:`mindspeed_fx.ascend` have on their path. Versions are pinned; a folder is complete or absent, so that
installing again does nothing, and an upgrade of torch or of this package installs beside what is there.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any, Callable, Iterable

from mindspeed_fx.ascend.wheel_hashes import HASHES
from mindspeed_fx.errors import nearest
from mindspeed_fx.private_files import distrust, make_private, write_whole

VARIABLE = "MINDSPEED_FX_TOOLCHAIN"
_MARK = "mindspeed_fx.json"

TORCH_NPU = {"2.11": "2.11.0.post3", "2.12": "2.12.0.post3", "2.13": "2.13.0", "2.14": "2.14.0"}
"""torch's minor version -> the torch_npu built for it. Checked: 2.13."""


class ToolchainError(OSError):
    """The tool chain is missing or cannot be installed; the message says what to do."""


@dataclass(frozen=True)
class Component:
    """One folder of the tool chain."""

    name: str
    packages: tuple[str, ...]
    """Pinned requirements; the first gives the folder its version. Installed without their dependencies."""
    serves: str

    @property
    def folder(self) -> str:
        python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
        return f"{self.name}-{self.packages[0].split('==')[1]}-{python}-{platform.machine()}"


def components() -> tuple[Component, ...]:
    """What the installed torch needs.

    Raises:
        ToolchainError: no torch_npu is known for this torch.
    """
    version = ".".join(importlib.metadata.version("torch").split(".")[:2])
    if version not in TORCH_NPU:
        raise ToolchainError(f"no torch_npu is known for torch {version}; known: {', '.join(TORCH_NPU)}")
    return (
        Component(
            "torch_npu", (f"torch_npu=={TORCH_NPU[version]}",), "schemas, shapes and gradients of the npu operators"
        ),
        Component(
            "triton_ascend",
            ("triton-ascend==3.2.0", "ascendnpu-ir==1.2.0", "pybind11==3.1.0"),
            "Triton kernels compiled for a SoC",
        ),
        Component("torch_mlir", ("torch-mlir==20261001",), "the kernels' IR run on a CPU"),
    )


def root(directory: str | os.PathLike | None = None) -> pathlib.Path:
    """``directory``, else $MINDSPEED_FX_TOOLCHAIN, else ``mindspeed_fx/toolchain`` in the user's cache directory."""
    if directory or os.environ.get(VARIABLE):
        where = pathlib.Path(directory or os.environ[VARIABLE]).expanduser().absolute()
        if where.exists() and not where.is_dir():
            raise ToolchainError(
                f"{directory or f'{VARIABLE}={where}'} is a file; the tool chain's directory is expected"
            )
        return where
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(cache, "mindspeed_fx", "toolchain")


def _is_named(directory: str | os.PathLike | None) -> bool:
    """Whether the user says where the tool chain is."""
    return bool(directory or os.environ.get(VARIABLE))


def path(name: str, directory: str | os.PathLike | None = None) -> pathlib.Path:
    """The folder of an installed component, for the path of a process of its own.

    Raises:
        ToolchainError: the component is not installed; the message has the command that installs it.
    """
    component = _component([name])[0]
    folder = root(directory) / component.folder
    for place in (folder.parent, folder):
        if reason := distrust(place, _is_named(directory)):
            raise ToolchainError(f"what is installed there is not run: {reason}")
    if _read_mark(folder) is None:
        where = f" --dir {directory}" if directory else ""
        raise ToolchainError(
            f"{component.packages[0]} is not installed in {folder.parent}; run: mindspeed-fx toolchain install{where}"
        )
    return folder


def missing(*names: str) -> str | None:
    """Why these components cannot be used; None when all are there."""
    for name in names:
        try:
            path(name)
        except ToolchainError as e:
            return str(e)
    return None


def status(directory: str | os.PathLike | None = None, names: Iterable[str] = ()) -> list[dict[str, Any]]:
    """One row per component: name, packages, serves, folder, and whether it is ``installed``, with ``bytes`` and
    ``seconds`` of its installation.
    """
    rows = []
    for component in _component(names):
        folder = root(directory) / component.folder
        row = {
            "name": component.name,
            "packages": list(component.packages),
            "serves": component.serves,
            "folder": str(folder),
            "installed": False,
        }
        if (mark := _read_mark(folder)) is not None:
            row.update(mark, installed=True)
        rows.append(row)
    return rows


def install(
    directory: str | os.PathLike | None = None, names: Iterable[str] = (), log: Callable[[str], None] = print
) -> list[dict[str, Any]]:
    """Install what is missing; returns :func:`status`.

    Args:
        directory: see :func:`root`.
        names: components; none names all.
        log: told what happens, a line at a time.

    Raises:
        ToolchainError: unknown component, no pip, no such wheel for this Python and machine, or no network.
    """
    where = root(directory)
    for component in _component(names):
        folder = where / component.folder
        if _read_mark(folder) is not None:
            log(f"{component.name}: there already, {folder}")
            continue
        log(f"{component.name}: installing {', '.join(component.packages)}")
        row = _install(component, where, _is_named(directory))
        log(f"{component.name}: {row['bytes'] / 2**20:.0f} MiB in {row['seconds']:.0f} s, {folder}")
    return status(directory, names)


def require_pip() -> None:
    """That this Python has pip: by its metadata, since looking for its module has setuptools think that pip runs, and
    what imports it later (Inductor) fails.

    Raises:
        ToolchainError: it has none.
    """
    try:
        importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError:
        raise ToolchainError(f"{sys.executable} has no pip; install it there (python -m ensurepip)") from None


def _read_mark(folder: pathlib.Path) -> dict[str, Any] | None:
    """What an installation says when it is complete; None where there is none, or not a whole one."""
    try:
        mark = json.loads((folder / _MARK).read_text())
    except (OSError, ValueError):
        return None
    return mark if isinstance(mark, dict) else None


def _component(names: Iterable[str]) -> tuple[Component, ...]:
    known, names = {c.name: c for c in components()}, tuple(names)
    for name in names:
        if name not in known:
            raise ToolchainError(f'no component "{name}"{nearest(name, known)}; valid: {", ".join(known)}')
    return tuple(known[n] for n in names) or tuple(known.values())


def _install(component: Component, where: pathlib.Path, is_named: bool) -> dict[str, Any]:
    require_pip()
    try:
        where.mkdir(parents=True, exist_ok=True) if is_named else make_private(where)
        scratch = pathlib.Path(tempfile.mkdtemp(dir=where, prefix=f".{component.name}-"))
    except OSError as e:
        raise ToolchainError(f"cannot write to {where}: {e.strerror}") from None
    start = time.perf_counter()
    try:
        # PYTHONPATH and a --user or --target of the user's pip settings must not decide where this goes.
        environment = {
            k: v
            for k, v in os.environ.items()
            if k not in ("PYTHONPATH", "PIP_USER", "PIP_TARGET", "PIP_REQUIRE_VIRTUALENV")
        }
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            "--no-deps",
            "--require-hashes",
            "--only-binary",
            ":all:",
            "--target",
            str(scratch),
        ]
        wheels = scratch.with_name(f"{scratch.name}.txt")
        write_whole(wheels, _requirements(component))
        try:
            command += ["-r", str(wheels)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
        finally:
            wheels.unlink()
        if done.returncode:
            raise ToolchainError(_explain(component, done.stderr))
        for tool in scratch.glob("ascendnpuir/bin/*"):
            tool.chmod(tool.stat().st_mode | 0o111)  # pip keeps the mode only if the wheel was packed with it
        size = sum(f.stat().st_size for f in scratch.rglob("*") if f.is_file())
        row = {"packages": list(component.packages), "bytes": size, "seconds": round(time.perf_counter() - start, 1)}
        (scratch / _MARK).write_text(json.dumps(row))
        scratch.chmod(0o755)  # of a shared directory others may use it
        _publish(scratch, where / component.folder)
        return row
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _requirements(component: Component) -> str:
    """Lines of a requirements file: each package with the sha256 of every wheel that is accepted for it."""
    return "".join(
        f"{package} {' '.join(f'--hash=sha256:{digest}' for digest in HASHES[package].values())}\n"
        for package in component.packages
    )


def _publish(scratch: pathlib.Path, folder: pathlib.Path) -> None:
    """A rename, so that no process ever sees half a folder; another that was faster wins."""
    if folder.is_dir() and _read_mark(folder) is None:
        shutil.rmtree(folder)
    try:
        os.rename(scratch, folder)
    except OSError:
        if _read_mark(folder) is None:
            raise


def _explain(component: Component, stderr: str) -> str:
    lines = (
        [line for line in stderr.strip().splitlines() if line.startswith("ERROR")]
        or stderr.strip().splitlines()[-1:]
        or ["pip said nothing"]
    )
    wanted = " ".join(component.packages)
    if any(
        word in stderr
        for word in (
            "Could not fetch",
            "ConnectionError",
            "NewConnectionError",
            "Temporary failure",
            "Max retries",
            "timed out",
        )
    ):
        return (
            f"the package index cannot be reached, so {wanted} cannot be downloaded; with the wheels at hand set "
            f"PIP_NO_INDEX=1 and PIP_FIND_LINKS=DIR. pip: {lines[-1]}"
        )
    if "DO NOT MATCH THE HASHES" in stderr:
        return (
            f"what was downloaded as {wanted} is not the wheel that mindspeed_fx knows (its sha256 differs); nothing "
            f"was installed. Another index, a proxy or a changed file may be the cause. pip: {lines[-1]}"
        )
    if "No matching distribution" in stderr:
        return (
            f"no wheel of {wanted} for Python {platform.python_version()} on {platform.machine()} "
            f"{platform.system()}. pip: {lines[-1]}"
        )
    return f"pip could not install {wanted}: {lines[-1]}"
