"""torch_npu without CANN: stub libraries that answer what torch_npu asks while it is imported.

torch_npu links against CANN (libascendcl, libhccl ...), which no laptop has. :func:`environment` builds libraries that
define every symbol it needs, from the ELF tables of the installed torch_npu, and returns the environment for a process
of its own, in which torch_npu can be imported and gives schemas, shapes and gradients of fake ``npu:0`` tensors. This
process is never touched: ``torch.npu.is_available()`` would be true in it, and every kernel would fail.
"""

from __future__ import annotations

import ctypes
import glob
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import tempfile

from mindspeed_fx.ascend import elf, stub_source, toolchain
from mindspeed_fx.errors import nearest
from mindspeed_fx.kernels.triton import STUBBED

_LIBRARIES = re.compile(r"lib(acl|ge_|graph|hccl|ascend|msprof|runtime)")
_SYMBOLS = re.compile(r"(acl|Msprof|rt[A-Z]|Hccl)")

SOCS = tuple(stub_source.CORES)


class StubError(toolchain.ToolchainError):
    """CANN cannot, or must not, be stubbed; the message says why."""


def real_cann() -> str | None:
    """The sign that CANN or an NPU is here; None without one."""
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_OPP_PATH"):
        if os.environ.get(name):
            return f"{name} is set"
    if glob.glob("/dev/davinci[0-9]*"):
        return "there is an NPU device node"
    try:
        ctypes.CDLL("libascendcl.so")
    except OSError:
        return None
    return "libascendcl.so can be loaded"


def environment(
    soc: str = "Ascend910B2", devices: int = 1, directory: str | os.PathLike | None = None
) -> dict[str, str]:
    """What to change in the environment of a process in which ``import torch_npu`` shall work: PYTHONPATH (torch_npu
    first), LD_LIBRARY_PATH (the stubs first), TORCH_DEVICE_BACKEND_AUTOLOAD, and a word that says what the process is.

    Args:
        soc: the SoC that torch_npu is told, one of :data:`SOCS`.
        devices: NPUs that it is told of, at least 1.
        directory: of the tool chain.

    Raises:
        StubError: CANN is here, an unknown SoC, or no C compiler.
        ToolchainError: torch_npu is not installed in the tool chain.
    """
    if soc not in SOCS:
        raise StubError(f'no SoC "{soc}"{nearest(soc, SOCS)}; valid: {", ".join(SOCS)}')
    if why := real_cann():
        raise StubError(f"CANN is never stubbed where it is real: {why}")
    home = toolchain.path("torch_npu", directory)
    stubs = build(home / "torch_npu", soc, devices)
    python = [str(home), *filter(None, [os.environ.get("PYTHONPATH")])]
    libraries = [str(stubs), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(python),
        "LD_LIBRARY_PATH": os.pathsep.join(libraries),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        STUBBED: soc,
    }


def build(package: pathlib.Path, soc: str, devices: int) -> pathlib.Path:
    """The folder of stubs for the torch_npu in ``package``, beside it; built once for each source text and
    torch_npu.
    """
    binary = (package / "lib" / "libtorch_npu.so").stat()
    sources = [pathlib.Path(module.__file__).read_bytes() for module in (elf, stub_source)] + [
        pathlib.Path(__file__).read_bytes()
    ]
    key = hashlib.sha256(repr((binary.st_size, binary.st_mtime_ns, soc, devices, sources)).encode()).hexdigest()[:12]
    folder = package.parent / "stubs" / f"{soc}-{key}"
    if not folder.is_dir():
        try:
            folder.parent.mkdir(exist_ok=True)
            scratch = tempfile.mkdtemp(dir=folder.parent, prefix=".")
        except OSError as e:
            raise StubError(f"the stubs of CANN cannot be built in {folder.parent}: {e.strerror}") from None
        try:
            _compile(package, pathlib.Path(scratch), soc, devices)
            os.rename(scratch, folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _compile(package: pathlib.Path, out: pathlib.Path, soc: str, devices: int) -> None:
    libraries, symbols = {"libascendcl.so"}, set()
    # libop_plugin_atb needs a library of CANN's that torch_npu itself does not.
    for path in [
        *package.glob("_C*.so"),
        *(p for p in (package / "lib").glob("*.so") if p.name != "libop_plugin_atb.so"),
    ]:
        needed, undefined = elf.read_needed(path)
        libraries |= {n for n in needed if _LIBRARIES.match(n)}
        symbols |= {s for s in undefined if _SYMBOLS.match(s)}
    (out / "stub.c").write_text(stub_source.text(soc, devices, symbols))
    (out / "empty.c").write_text("int mindspeed_fx_stub;\n")
    _link(out, "libascendcl.so", "stub.c", [])
    # A lookup in any of CANN's libraries searches what that library needs: so every other one needs the one with the
    # code.
    for name in sorted(libraries - {"libascendcl.so"}):
        _link(out, name, "empty.c", ["-Wl,--no-as-needed", f"-L{out}", "-lascendcl"])


def _link(out: pathlib.Path, name: str, source: str, extra: list[str]) -> None:
    compiler = os.environ.get("CC", "cc")
    command = [
        compiler,
        "-w",
        "-shared",
        "-fPIC",
        str(out / source),
        "-o",
        str(out / name),
        f"-Wl,-soname,{name}",
        *extra,
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise StubError(f"no C compiler: {compiler} is not on the PATH (install gcc or set CC)") from None
    if done.returncode:
        raise StubError(f"{compiler} could not build {name}: {done.stderr.strip()[-500:]}")
