"""What torch_npu itself says: its schemas, the shapes its meta kernels give to every lowering, and a model's training
step on fake npu tensors. In a process of its own, over stub libraries (mindspeed-fx toolchain install)."""

import functools
import json
import os
import pathlib
import subprocess
import sys

import pytest

from mindspeed_fx.ascend import stub, toolchain

HERE = pathlib.Path(__file__).parent
pytestmark = [
    pytest.mark.npu,
    pytest.mark.skipif(toolchain.missing("torch_npu") is not None, reason=str(toolchain.missing("torch_npu"))),
]


@functools.cache
def found():
    env = {**os.environ, **stub.environment()}
    env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], str(HERE.parents[2])])
    run = subprocess.run([sys.executable, str(HERE / "torch_npu_worker.py")], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_the_pinned_schemas_are_torch_npus():
    assert found()["schemas"] == []


def test_every_lowering_has_the_same_shapes_on_npu():
    assert found()["count"] > 500 and found()["cases"] == []


@pytest.mark.parametrize("dtype", ["torch.float32", "torch.bfloat16"])
def test_a_model_calls_the_same_kernels_on_npu_and_loses_no_gradient(dtype):
    model = found()["model"][dtype]
    assert (
        model["calls"]["npu"] == model["calls"]["cpu"]
        and model["calls"]["npu"]["backward"]["npu_fusion_attention_grad_v3"] == 2
    )
    assert model["unlowered"] == [] and model["lost"] == []
