"""Warm starts: a second process hits Inductor's FX-graph cache and AOTAutograd's, and any change misses."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
    import json, os, sys
    import torch, torch.nn.functional as F
    EXTRA

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 3

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.gate, self.up = torch.nn.RMSNorm(16), torch.nn.Linear(16, 32), torch.nn.Linear(16, 32)

        def forward(self, x):
            h = self.norm(x)
            return Scale.apply(F.silu(self.gate(h)) * self.up(h)).sum()

    for options in json.loads(sys.argv[1]):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        model = Model()
        torch.compile(model, backend="mindspeed", options=options)(torch.randn(4, 16)).backward()
        aot, inductor = (torch._dynamo.utils.counters[name] for name in ("aot_autograd", "inductor"))
        print(json.dumps({
            "aot_hit": aot["autograd_cache_hit"],
            "aot_miss": aot["autograd_cache_miss"],
            "aot_bypass": aot["autograd_cache_bypass"],
            "fx_hit": inductor["fxgraph_cache_hit"],
            "fx_miss": inductor["fxgraph_cache_miss"],
            "grad": model.gate.weight.grad.sum().item(),
        }))
"""


def run(cache, *options, extra=""):
    """What a process of its own counts, compiling once with each of ``options``."""
    code = textwrap.dedent(PROGRAM).replace("EXTRA", extra)
    # what the processor has is asked of /proc/cpuinfo; three compilations would ask for it in each new folder
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCHINDUCTOR_VEC_ISA_OK": "1"}
    done = subprocess.run([sys.executable, "-c", code, json.dumps(options)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()[-len(options) :]]


OWN_PASS = """
from mindspeed_fx import passes
@passes.register("mine.nothing", stage="captured")
def nothing(gm, context):
    "VERSION"
    return passes.PassReport("mine.nothing")
"""


def test_a_second_process_hits(tmp_path):
    (first,), (second,) = run(tmp_path, {}), run(tmp_path, {})
    assert first["aot_miss"] == 1 and first["aot_bypass"] == 0 and first["fx_miss"] == 2
    assert second["aot_hit"] == 1 and second["aot_miss"] == 0 and second["fx_hit"] == 2 and second["fx_miss"] == 0
    assert second["grad"] == pytest.approx(first["grad"], rel=1e-6)


@pytest.mark.slow
def test_any_change_misses(tmp_path):
    changes = ({"disable": ["fusion.swiglu"]}, {"level": 0}, {"memory_budget": 0.5})
    _, dumped, *changed = run(tmp_path, {}, {"dump": str(tmp_path / "dump")}, *changes)
    assert dumped["aot_hit"] == dumped["fx_hit"] == 0
    assert "off: dump was asked for" in next((tmp_path / "dump/rank0").glob("graph*/index.md")).read_text()
    for change, found in zip(changes, changed, strict=True):
        assert (found["aot_hit"], found["aot_miss"]) == (0, 1), change
    own, again = run(tmp_path, {}, {}, extra=OWN_PASS.replace("VERSION", "one"))
    assert own["aot_hit"] == 0 and again["aot_hit"] == 1
    assert run(tmp_path, {}, extra=OWN_PASS.replace("VERSION", "two"))[0]["aot_hit"] == 0


def test_check_turns_caches_off_and_says_so():
    from mindspeed_fx.backend import Compilation
    from mindspeed_fx.options import Options

    assert (
        Compilation(Options(codegen="eager", check="each").resolve("cpu")).record.effective["caches"]
        == "off: check was asked for"
    )
