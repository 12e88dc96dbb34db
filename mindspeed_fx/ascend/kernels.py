"""Triton kernels of the operators compiled for an Ascend SoC, in a process that has triton-ascend: compiled, never
run.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any, Iterable

import torch

import mindspeed_fx
import mindspeed_fx.kernels
from mindspeed_fx.ascend import toolchain
from mindspeed_fx.compat import fake
from mindspeed_fx.errors import nearest
from mindspeed_fx.kernels.triton import PARTS, generate
from mindspeed_fx.partition.regions import Region, names

SOCS = (
    "Ascend910B1",
    "Ascend910B2",
    "Ascend910B2C",
    "Ascend910B3",
    "Ascend910B4",
    "Ascend910B4-1",
    "Ascend910_9391",
    "Ascend910_9392",
    "Ascend910_9382",
    "Ascend910_9381",
    "Ascend910_9372",
    "Ascend910_9362",
)
"""What bishengir-compile takes of the A2 and A3 generations."""


def has_triton(operator: str) -> bool:
    """True when ``mindspeed::<operator>`` has a Triton kernel, or is one that an operator launches on its way."""
    return operator in PARTS or hasattr(torch.ops.mindspeed, f"{operator}_triton")


def call(operator: str, *arguments: Any) -> dict[str, Any]:
    """A call of ``mindspeed::<operator>`` by its arguments, of whose tensors only shape, strides and type matter."""
    if not has_triton(operator):
        raise ValueError(f"mindspeed::{operator} has no Triton kernel")
    return {"operator": operator, "arguments": [_describe(a) for a in arguments]}


def region_call(region: Region) -> dict[str, Any]:
    """A kernel made of a region of a graph, for :func:`compile_kernels`.

    Raises:
        NotImplementedError: an operator of it has no translation.
    """
    described = {k: [_describe(n.meta["val"]) for n in getattr(region, k)] for k in ("inputs", "outputs")}
    return {
        "operator": "region",
        "what": names(region),
        "source": generate.source(region),
        "shape": list(region.shape),
        **described,
    }


def compile_kernels(
    calls: Iterable[dict[str, Any]], soc: str = "Ascend910B2", directory: str | os.PathLike | None = None
) -> dict[str, Any]:
    """Compile the kernels that ``calls`` (of :func:`call`) would launch, choosing tiles by compiling them.

    Returns:
        compiler: its version. calls: one row for each call: operator, problem ("" when all compiled) and kernels:
        kernel, tile, outcome ("ok" or "single-buffered"), on_chip bytes by memory, dynamic transfers, scalar_loops,
        work of a trip by loop depth, modelled cycles a row, and the other tiles that were tried. Kept beside the tool
        chain for the next time.

    Raises:
        ToolchainError: triton-ascend is not installed in the tool chain, or the process failed.
        ValueError: unknown SoC.
    """
    if soc not in SOCS:
        raise ValueError(f'no SoC "{soc}"{nearest(soc, SOCS)}; valid: {", ".join(SOCS)}')
    home = toolchain.path("triton_ascend", directory)
    # Only what is asked for: an upstream triton of the user's environment comes after triton-ascend on the path.
    path = os.pathsep.join(
        [str(home), str(pathlib.Path(mindspeed_fx.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    environment = {
        **{k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        "PYTHONPATH": path,
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    with tempfile.TemporaryDirectory(prefix="mindspeed_fx-") as folder:
        asked, answered = pathlib.Path(folder, "request"), pathlib.Path(folder, "result")
        asked.write_text(json.dumps({"soc": soc, "calls": list(calls)}))
        done = subprocess.run(
            [sys.executable, "-m", "mindspeed_fx.ascend.kernel_worker", str(home), str(asked), str(answered)],
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
        )
        if not answered.is_file():
            raise toolchain.ToolchainError(f"the process that has triton-ascend failed: {done.stderr.strip()[-2000:]}")
        return json.loads(answered.read_text())


def _describe(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        sizes = {"shape": value.shape, "stride": value.stride()}
        return {
            **{k: [fake.hint(s) for s in v] for k, v in sizes.items()},
            "dtype": str(value.dtype).removeprefix("torch."),
        }
    return fake.hint(value) if isinstance(value, torch.SymInt) else value
