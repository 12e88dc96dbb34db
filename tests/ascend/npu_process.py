"""Run something in a process that has torch_npu, where the tool chain is installed."""

import functools
import json
import os
import pathlib
import subprocess
import sys

import pytest

from mindspeed_fx.ascend import stub, toolchain

HERE = pathlib.Path(__file__).parent
MISSING = toolchain.missing("torch_npu")


def needs_npu(test):
    """Mark a test: of the npu tier, skipped with the reason where torch_npu is not installed in the tool chain."""
    return pytest.mark.npu(pytest.mark.skipif(MISSING is not None, reason=str(MISSING))(test))


@functools.cache
def worker(*arguments, script="npu_worker.py"):
    """What ``script`` prints as JSON on its last line."""
    environment = stub.environment()
    environment["PYTHONPATH"] = os.pathsep.join([environment["PYTHONPATH"], str(HERE.parents[1])])
    run = subprocess.run(
        [sys.executable, str(HERE / script), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])
