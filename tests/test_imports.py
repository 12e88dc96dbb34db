"""What importing the package imports, and what it does not: one process of its own, in which no test has imported
anything.
"""

import functools
import json
import subprocess
import sys
from pathlib import Path

import mindspeed_fx

ROOT = Path(mindspeed_fx.__file__).parent
CODE = """
import json, sys, time
import torch
sys.modules["triton"] = None  # as if it were not installed
distributed = "torch.distributed.tensor" in sys.modules
start = time.perf_counter()
import mindspeed_fx
seconds = time.perf_counter() - start
imported = {"package": [m for m in sys.modules if m.startswith("mindspeed_fx")]}
import mindspeed_fx.megatron.flags.table
imported["flags"] = list(sys.modules)
import mindspeed_fx.passes
imported["passes"] = list(sys.modules)
import mindspeed_fx.kernels, mindspeed_fx.megatron
imported["all"] = list(sys.modules)
print(json.dumps({"seconds": seconds, "distributed": distributed, "imported": imported}))
"""


@functools.cache
def fresh():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_import_is_cheap():
    assert fresh()["seconds"] < 0.05


def test_every_pass_is_registered_by_the_package_alone():
    """Here a test may have imported the file of a pass that nobody else does."""
    files = {
        f"mindspeed_fx.{'.'.join(p.relative_to(ROOT).with_suffix('').parts)}"
        for p in (ROOT / "passes").rglob("*.py")
        if "\n@register(" in p.read_text()
    }
    assert len(files) > 40 and files <= set(fresh()["imported"]["passes"])


def test_rules_are_registered_only_when_sharding():
    assert "mindspeed_fx.compat.dtensor" not in fresh()["imported"]["passes"]


def test_without_triton_kernels_are_imported():
    assert "mindspeed_fx.kernels.triton" in fresh()["imported"]["all"]


def test_importing_mindspeed_fx_does_not_import_megatron():
    assert "mindspeed_fx.megatron" in fresh()["imported"]["all"]
    assert not [m for m in fresh()["imported"]["all"] if m.split(".")[0] == "megatron"]


def test_the_table_of_flags_does_not_import_inductor():
    assert "mindspeed_fx.megatron.flags.tools" in fresh()["imported"]["flags"]
    assert "torch._inductor" not in fresh()["imported"]["flags"]
