"""What is installed, which targets work, and why the others do not. Nothing is imported that could fail or hang:
torch_npu is looked up, never loaded."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
from typing import Any

_PACKAGES = ("mindspeed-fx", "torch", "torch_npu", "megatron-core", "transformers", "triton", "sympy")


def examine() -> dict[str, Any]:
    """Findings as plain values: ``installed``, ``targets`` (target, codegen, works, reason), ``cpu_kernels``,
    ``torch_compile``, ``entry_point``, ``megatron_patches``, ``caches``.
    """
    import torch

    from mindspeed_fx import torch_compile
    from mindspeed_fx.compat import cpp, inductor_cache

    compiler = compiler_problem()
    cuda = None if torch.cuda.is_available() else "no CUDA device (torch.cuda.is_available() is False)"
    triton = None if importlib.util.find_spec("triton") else "triton is not installed"
    npu = npu_problem()
    targets = [
        ("cpu", "inductor", compiler),
        ("cpu", "eager", None),
        ("cuda", "inductor", cuda or triton),
        ("cuda", "eager", cuda),
        ("npu", "eager", npu),
        ("npu", "inductor", npu or triton_ascend_problem()),
        ("npu", "npugraph_ex", npu or npugraph_ex_problem()),
    ]
    return {
        "installed": {
            "python": platform.python_version(),
            **{p: _version(p) for p in _PACKAGES},
            "C++ compiler": shutil.which(os.environ.get("CXX", "g++")) and os.environ.get("CXX", "g++"),
        },
        "targets": [{"target": t, "codegen": c, "works": why is None, "reason": why or ""} for t, c, why in targets],
        "cpu_kernels": cpp.problem() or "are built on first use, into Inductor's cache",
        "torch_compile": torch_compile.torch_compile_replaced() or "is torch's own",
        "entry_point": "registered"
        if _entry_point()
        else "missing: install the package (pip install mindspeed-fx), or import mindspeed_fx.backend and pass the "
        "function",
        "megatron_patches": _megatron_patches(),
        "caches": inductor_cache.cache_directory(),
    }


def compiler_problem() -> str | None:
    """Why Inductor cannot build C++ here; None when a small program compiles."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return f"no C++ compiler ({compiler} is not on the PATH; install g++ or set CXX)"
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder, "probe.cpp")
        source.write_text("#include <cmath>\nint main() { return std::isnan(0.0); }\n")
        done = subprocess.run(
            [compiler, "-fopenmp", "-shared", "-fPIC", str(source), "-o", str(source.with_suffix(".so"))],
            capture_output=True,
            text=True,
        )
    return (
        None
        if done.returncode == 0
        else f"{compiler} fails: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else 'no message'}"
    )


def npu_problem() -> str | None:
    """Why no NPU can be used; None when torch_npu and CANN are there (the device itself is not touched)."""
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed"
    if not (os.environ.get("ASCEND_HOME_PATH") or os.path.isdir("/usr/local/Ascend")):
        return "CANN is not installed (ASCEND_HOME_PATH is not set)"
    return None


def triton_ascend_problem() -> str | None:
    """Why torch_npu's Inductor has nothing to compile its code with; None when triton-ascend is installed."""
    installed = _version("triton-ascend") or _version("triton_ascend")
    return None if installed else "triton-ascend is not installed, which compiles what torch_npu's Inductor generates"


def npugraph_ex_problem() -> str | None:
    """Why codegen "npugraph_ex" has nothing to run on; None when this torch_npu brings it."""
    result = importlib.util.find_spec("torch_npu")
    brought = result and any(
        pathlib.Path(p, "npu", "npugraph_ex").is_dir() for p in result.submodule_search_locations or ()
    )
    return None if brought else "this torch_npu has no torch.npu.npugraph_ex"


def text(results: dict[str, Any]) -> str:
    """What :func:`examine` found, for a person."""
    lines = ["installed"] + [f"  {k:<16} {v or '-'}" for k, v in results["installed"].items()]
    lines += ["targets"] + [f"  {t['target']:<5} {t['codegen']:<12} {_outcome(t)}" for t in results["targets"]]
    lines += ["kernels in C++ for cpu", f"  {results['cpu_kernels']}"]
    lines += [
        "torch.compile",
        f"  {results['torch_compile']}",
        f"  entry point {results['entry_point']}",
        f"  caches in {results['caches']}",
    ]
    lines += ["patches of Megatron-core"] + [
        f"  {p}"
        for p in results["megatron_patches"]
        or ("none in this process: importing mindspeed_fx.megatron_adaptor applies them",)
    ]
    lines += [
        "what runs here",
        "  mindspeed-fx verify-device executes every operator, kernel and fusion against its reference, in ten minutes",
    ]
    return "\n".join(lines)


def _outcome(target: dict[str, Any]) -> str:
    """In words: of an NPU packages are looked up and nothing is run, so that nothing is said to work."""
    if not target["works"]:
        return f"no: {target['reason']}"
    return "installed, not tried" if target["target"] == "npu" else "works"


def _megatron_patches() -> list[str]:
    """Patches that the Megatron adaptor has in force in this process."""
    adaptor = sys.modules.get("mindspeed_fx.megatron")
    return [f"{target}: {reason}" for target, reason in adaptor.applied()] if adaptor else []


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _entry_point() -> bool:
    return any(e.name == "mindspeed" for e in importlib.metadata.entry_points(group="torch_dynamo_backends"))
