"""What a step frees, the next one has without asking the system."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import mindspeed_fx
from mindspeed_fx import host_heap

STEPS = """
import ctypes, resource, runpy, sys
keep = runpy.run_path(sys.argv[1])["keep"]
print(keep() if sys.argv[2] == "keep" else None)
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
def step():
    blocks = [libc.malloc(4 << 20) for _ in range(6)]
    for block in blocks: libc.memset(block, 1, 4 << 20)
    for block in blocks: libc.free(block)
for _ in range(3): step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
FILE = Path(mindspeed_fx.__file__).parent / "host_heap.py"


def faults(how, **environ):
    """What ``keep`` returned, and page faults of a step of 24 MiB."""
    command = [sys.executable, "-S", "-c", STEPS, str(FILE), how]
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    lines = subprocess.run(command, env={**plain, **environ}, capture_output=True, text=True, check=True).stdout.split()
    return lines[0], int(lines[1])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux for page faults")
def test_a_second_step_has_no_page_faults():
    kept, number = faults("keep")
    if kept == "False":
        pytest.skip("the C library is not glibc")
    assert number < 100 < faults("leave")[1]


def test_a_users_own_setting_of_malloc_stays():
    assert faults("keep", MALLOC_TRIM_THRESHOLD_="100000")[0] == "False"
    assert faults("keep", GLIBC_TUNABLES="glibc.malloc.trim_threshold=100000")[0] == "False"


def test_a_compiled_graph_for_the_cpu_sets_it(monkeypatch):
    import torch

    seen = []
    monkeypatch.setattr(host_heap, "keep", lambda: seen.append(1))
    torch.compile(lambda x: x + 1, backend="mindspeed", options={"codegen": "eager"})(torch.ones(2))
    assert seen
