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
    sys.path.insert(0, os.environ["TESTS"])
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

    torch.manual_seed(0)
    model = Model()
    torch.compile(model, backend="mindspeed", options=json.loads(sys.argv[1]))(torch.randn(4, 16)).backward()
    counters = torch._dynamo.utils.counters
    print(json.dumps({"aot_hit": counters["aot_autograd"]["autograd_cache_hit"], "aot_miss": counters["aot_autograd"]["autograd_cache_miss"],
                      "aot_bypass": counters["aot_autograd"]["autograd_cache_bypass"], "fx_hit": counters["inductor"]["fxgraph_cache_hit"],
                      "fx_miss": counters["inductor"]["fxgraph_cache_miss"], "grad": model.gate.weight.grad.sum().item()}))
"""


def run(cache, options=None, extra=""):
    code = textwrap.dedent(PROGRAM).replace("EXTRA", extra)
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "TESTS": os.path.dirname(__file__)}
    done = subprocess.run([sys.executable, "-c", code, json.dumps(options or {})], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


OWN_PASS = """
from mindspeed_fx import passes
@passes.register("mine.nothing", stage="captured")
def nothing(gm, context):
    "VERSION"
    return passes.PassReport("mine.nothing")
"""


def test_second_process_hits_and_any_change_misses(tmp_path):
    first, second = run(tmp_path), run(tmp_path)
    assert first["aot_miss"] == 1 and first["aot_bypass"] == 0 and first["fx_miss"] == 2
    assert second["aot_hit"] == 1 and second["aot_miss"] == 0 and second["fx_hit"] == 2 and second["fx_miss"] == 0
    assert second["grad"] == pytest.approx(first["grad"], rel=1e-6)
    for change in ({"disable": ["fusion.swiglu"]}, {"level": 0}, {"memory_budget": 0.5}):
        assert run(tmp_path, change)["aot_hit"] == 0, change
    with_pass = OWN_PASS.replace("VERSION", "one")
    assert run(tmp_path, extra=with_pass)["aot_hit"] == 0
    assert run(tmp_path, extra=with_pass)["aot_hit"] == 1
    assert run(tmp_path, extra=OWN_PASS.replace("VERSION", "two"))["aot_hit"] == 0


def test_dump_turns_caches_off_and_says_so(tmp_path):
    from mindspeed_fx.backend import Compilation
    from mindspeed_fx.options import Options

    run(tmp_path / "cache")
    dumped = run(tmp_path / "cache", {"dump": str(tmp_path / "dump")})
    assert dumped["aot_hit"] == dumped["fx_hit"] == 0
    assert "off: dump was asked for" in (tmp_path / "dump/rank0/graph0/index.md").read_text()
    assert Compilation(Options(codegen="eager", check="each").resolve("cpu")).record.effective["caches"] == "off: check was asked for"
