"""The linalg IR that bishengir-compile is given, run on CPU in float32 and bfloat16, against float64 references."""

import functools
import json
import os
import subprocess
import sys

import pytest

from mindspeed_fx.ascend import toolchain
from tests.ascend.npu_process import HERE
from tests.kernels import triton_cases as cases

COMPONENTS = ("triton_ascend", "torch_mlir")
MISSING = toolchain.missing(*COMPONENTS)
needs_compiler = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

FIRST = ("dropout_add_seeded-odd", "glu-gelu")
"""Cases of the default tier; every other is slow."""
IN_ORDER = {"float32": 8, "bfloat16": 2}
"""Tolerances allowed: sums run element after element here, so that the error of float32 grows with the row, which that
of pairs or trees does not; float32 statistics are results of bfloat16 cases too."""


@functools.cache
def executed(names):
    path = [*(str(toolchain.path(c)) for c in COMPONENTS), str(HERE.parents[1])]
    env = {
        **{k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        "PYTHONPATH": os.pathsep.join(path),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    run = subprocess.run(
        [sys.executable, str(HERE / "execute_worker.py"), *names], env=env, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def check(name, dtype, found):
    row = found[f"{name}-{dtype}"]
    assert "error" not in row, row["trace"]
    assert len(row["distances"]) >= 2 and row["kernels"]
    assert max(row["distances"].values()) <= IN_ORDER[dtype], row


@pytest.mark.npu
@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FIRST)
def test_the_ir_of_two_kernels(name, dtype):
    check(name, dtype, executed(FIRST))


@pytest.mark.npu
@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [c.name for c in cases.CASES if c.name not in FIRST])
def test_the_ir_of_every_kernel(name, dtype):
    check(name, dtype, executed(tuple(c.name for c in cases.CASES if c.name not in FIRST)))


@pytest.mark.npu
@pytest.mark.slow
@needs_compiler
def test_the_ir_of_an_optimizer_step():
    check("adamw", "float32", executed(("adamw",)))


@pytest.mark.npu
@pytest.mark.slow
@needs_compiler
def test_the_ir_of_generated_kernels():
    found = executed(("regions",))
    assert all(d < 2e-6 for d in found["regions-float32"].values()) and all(
        d < 1.2e-2 for d in found["regions-bfloat16"].values()
    ), found
