"""Traces hold the iterations that were asked for, and fused operators by their names."""

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import mindspeed_fx


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(16)
        self.up, self.gate, self.down = (nn.Linear(16, 16, bias=False) for _ in range(3))

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


def events(path: Path, rank: int = 0) -> list[str]:
    """Names in the one trace of a rank."""
    (file,) = path.glob(f"rank{rank}.*.json")
    names = [event["name"] for event in json.loads(file.read_text())["traceEvents"] if event.get("ph") == "X"]
    return [re.sub("^graph_[0-9]+_", "", name) for name in names]


def train(profile, iterations: int, **options) -> None:
    model = torch.compile(Layer(), backend="mindspeed", options=options)
    for _ in range(iterations):
        model(torch.ones(4, 16)).sum().backward()
        profile.step()


@pytest.mark.parametrize(
    "codegen, expected",
    [
        ("eager", ["mindspeed::rms_norm", "mindspeed::swiglu", "mindspeed::swiglu_backward"]),
        pytest.param("inductor", ["cpp_fused_rms_norm_0", "cpp_fused_swiglu_1"], marks=pytest.mark.slow),
    ],
)
def test_fused_operators_bear_their_names(tmp_path, codegen, expected):
    torch._dynamo.reset()
    with mindspeed_fx.Profile(tmp_path, start=2, end=4) as profile:
        train(profile, 6, codegen=codegen)
    names = events(tmp_path)
    assert sorted({n for n in names if n.startswith("ProfilerStep")}) == ["ProfilerStep#1", "ProfilerStep#2"]
    for name in expected:
        assert names.count(name) == 2, (name, sorted(set(names)))


def test_what_is_not_asked_for_is_not_recorded(tmp_path, monkeypatch):
    def run(path, iterations=3, **settings):
        with mindspeed_fx.Profile(tmp_path / path, **{"start": 2, "end": 3, **settings}) as profile:
            for _ in range(iterations):
                torch.ones(3).exp()
                profile.step()
        return tmp_path / path

    assert events(run("later", start=12, end=13, first=11)).count("aten::exp") == 1
    assert events(run("short", start=2, end=9)).count("aten::exp") == 2, "the loop ends before the profile does"
    assert not run("done", first=4).exists() and not run("never", start=4, end=5, iterations=1).exists()
    assert not run("other", ranks=[1]).exists()
    monkeypatch.setenv("RANK", "1")
    assert "aten::exp" in events(run("own", ranks=[1]), rank=1) and "aten::exp" in events(
        run("all", ranks=None), rank=1
    )


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(start=3, end=3), "start 3, end 3"),
        (dict(start=0, end=3), "they count from 1"),
        (dict(level="level3"), "level is 'level3'; valid: level_none, level0"),
        (dict(device="cpu", export="db"), "export is 'db'; valid: text"),
        (dict(device="tpu"), "device is 'tpu'"),
    ],
)
def test_what_cannot_be_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        mindspeed_fx.Profile(**settings)


class StandIn(types.ModuleType):
    """``torch_npu.profiler`` as its documentation has it; every call is kept."""

    ExportType = types.SimpleNamespace(Text="text", Db="db")
    ProfilerActivity = types.SimpleNamespace(NPU="NPU", CPU="CPU")
    AiCMetrics = types.SimpleNamespace(PipeUtilization="pipes", AiCoreNone="none")
    ProfilerLevel = types.SimpleNamespace(Level_none=-1, Level0=0, Level1=1, Level2=2)

    def __init__(self):
        super().__init__("torch_npu.profiler")
        self.steps = []

    def _ExperimentalConfig(self, *, export_type, profiler_level, aic_metrics, data_simplification):
        return {"export": export_type, "level": profiler_level, "pipes": aic_metrics, "simplify": data_simplification}

    def schedule(self, *, wait, active, warmup=0, repeat=0, skip_first=0):
        return wait, warmup, active, repeat, skip_first

    def tensorboard_trace_handler(self, dir_name, worker_name=None, analyse_flag=True, async_mode=False):
        return dir_name, worker_name

    def profile(
        self,
        *,
        activities=None,
        schedule=None,
        on_trace_ready=None,
        record_shapes=False,
        profile_memory=False,
        with_stack=False,
        experimental_config=None,
    ):
        self.arguments = dict(locals())
        call = self.steps.append
        return types.SimpleNamespace(start=lambda: call("start"), step=lambda: call("step"), stop=lambda: call("stop"))


@pytest.mark.parametrize(
    "level, number, pipes", [("level_none", -1, "none"), ("level0", 0, "none"), ("level2", 2, "pipes")]
)
def test_torch_npus_profiler_is_called_as_its_documentation_has_it(monkeypatch, level, number, pipes):
    profiler = StandIn()
    monkeypatch.setitem(sys.modules, "torch_npu", types.SimpleNamespace(profiler=profiler))
    settings = dict(device="npu", level=level, with_cpu=False, record_shapes=True, export="db", simplify=True)
    with mindspeed_fx.Profile("traces", start=5, end=8, first=2, **settings) as profile:
        profile.step()
    assert profiler.steps == ["start", "step", "stop"]
    expected = {
        "activities": ["NPU"],
        "schedule": (0, 1, 3, 1, 2),
        "on_trace_ready": ("traces", "rank0"),
        "record_shapes": True,
        "profile_memory": False,
        "with_stack": False,
        "experimental_config": {"export": ["db"], "level": number, "pipes": pipes, "simplify": True},
    }
    assert {k: profiler.arguments[k] for k in expected} == expected
