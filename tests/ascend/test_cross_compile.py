"""``mindspeed_fx.cross_compile`` and ``mindspeed-fx cross``: from a model here to NPU graphs over there, or a clear
error.
"""

import json
import pathlib
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

import mindspeed_fx
from mindspeed_fx import cli
from mindspeed_fx.ascend import toolchain
from mindspeed_fx.ascend.compile import CrossError
from mindspeed_fx.ascend.ship import ShipError
from mindspeed_fx.errors import OptionError
from tests import models
from tests.ascend.npu_models import Gpt2
from tests.ascend.npu_process import HERE, needs_npu


class ReadsAValue(nn.Module):
    def forward(self, x):
        return x * x.sum().item()


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.idle = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.used(x)


def test_errors_before_anything_is_started(monkeypatch, capsys):
    model, args = nn.Linear(4, 4), (torch.zeros(2, 4),)
    with pytest.raises(OptionError, match="levle"):
        mindspeed_fx.cross_compile(model, args, options={"levle": 1})
    with pytest.raises(OptionError, match='"codegen" is \'inductor\'; cross-compiling knows only "eager"'):
        mindspeed_fx.cross_compile(model, args, options={"codegen": "inductor"})
    with pytest.raises(OptionError, match="soc is 'Ascend910'; valid: Ascend910B1"):
        mindspeed_fx.cross_compile(model, args, soc="Ascend910")
    with pytest.raises(ShipError, match="makes its own inputs"):
        mindspeed_fx.cross_compile(f"{__file__}:f", args)
    with pytest.raises(OptionError, match="cross_compile: args is a tensor of shape"):
        mindspeed_fx.cross_compile(model, args[0])
    assert cli.main(["cross", f"{HERE}/npu_models.py:llama", "--html", "/nowhere/a.html"]) == 2
    assert "--html /nowhere/a.html: there is no directory /nowhere" in capsys.readouterr().err
    monkeypatch.setenv("MINDSPEED_FX_TOOLCHAIN", "/nowhere")
    with pytest.raises(OSError, match="run: mindspeed-fx toolchain install"):
        mindspeed_fx.cross_compile(model, args)
    assert cli.main(["cross", f"{HERE}/npu_models.py:llama"]) == 2


@pytest.mark.slow
@needs_npu
def test_a_module_from_python(tmp_path):
    report = mindspeed_fx.cross_compile(
        Gpt2(dropout=0.1).bfloat16(),
        models.tokens(),
        soc="Ascend910B3",
        options={"disable": ["fusion.attention", "fusion.add_layer_norm"]},
    )
    assert report.counts["fusion.cross_entropy"] == 1 and report.counts.get("fusion.attention", 0) == 0
    assert report.operators["aten.addmm"] == 8 and report.without_gradient == [] and len(report.graphs) == 1
    assert {s["side"] for s in report.graphs[0]["sides"]} == {"forward", "backward"}
    # Not fewer kernels: at this size launches are everything, and those that treat ignored tokens count as much as the
    # fused ones.
    assert 0 < report.total("bytes") < report.total("bytes", unfused=True) and report.unlowered == []
    assert 0 < report.total("seconds") and report.hardware == "ascend910b3" and report.total("flops") > 0
    assert "bf16[2, 16, 32]" in report.code["graph0.forward"] and report.graphs[0]["saved"] > 0
    assert {r["operator"] for r in report.lowered + report.unlowered} >= {
        "mindspeed.cross_entropy",
        "mindspeed.cross_entropy_backward",
    }
    assert all(r["reason"] for r in report.unlowered)
    made = {r["operator"]: r for r in report.kernels}
    if toolchain.missing("triton_ascend") is None:
        assert (
            made["mindspeed.cross_entropy_backward"]["outcome"] == "ok"
            and made["mindspeed.cross_entropy_backward"]["on_chip"]["UB"] > 0
        )
        for name in (
            "mindspeed.dropout_add_seeded",
            "mindspeed.dropout_add_seeded_backward",
        ):  # torch_npu has none: ours is called
            assert made[name]["in_graph"] and made[name]["outcome"] == "ok" and made[name]["on_chip"]["UB"] > 0
            assert report.operators[f"{name}_triton"] == 2
        assert not made["mindspeed.cross_entropy_backward"]["in_graph"]
        assert all(
            not r["in_graph"] and (r["problem"] or r["on_chip"]["UB"] > 0) for r in report.kernels if r["generated"]
        )
        assert "Triton kernels that the graphs call, compiled for Ascend910B3" in str(report)
    page, values = (
        report.save(str(tmp_path / "a.html")).read_text(),
        json.loads(report.save(str(tmp_path / "a.json")).read_text()),
    )
    assert (
        page.startswith("<!doctype html>")
        and "mindspeed.cross_entropy" in page
        and "http" not in page.split("<body>")[0]
    )
    assert "fitted to matrix products" in page and re.search(r"ms \([\d.]+ to [\d.]+\)", page)
    assert values["soc"] == "Ascend910B3" and "Ascend910B3" in str(report) and "nothing ran on an NPU" in str(report)


@needs_npu
def test_a_script_from_the_command(tmp_path, capsys):
    assert (
        cli.main(
            [
                "cross",
                f"{HERE}/npu_models.py:llama",
                "--no-baseline",
                "--no-kernels",
                "--json",
                str(tmp_path / "a.json"),
                "--options",
                '{"level": 1}',
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "fusion.swiglu" in out and "bytes moved" not in out
    (row,) = [line.split() for line in out.splitlines() if line.startswith("  aten.mm ")]
    assert int(row[1]) > 20 and row[-1] == "ms" and "modelled on ascend910b2" in out
    assert re.search(r"modelled time of the step on ascend910b2: [\d.,]+ ms \([\d.,]+ to [\d.,]+\)", out)
    assert "cost model: ascend910b2, fitted to matrix products" in out
    values = json.loads((tmp_path / "a.json").read_text())
    assert (
        values["options"]["level"] == 1
        and values["graphs"][0]["counts"] | models.LLAMA_COUNTS == values["graphs"][0]["counts"]
    )
    assert not [r for r in values["graphs"][0]["lowered"] if r["kernel"].startswith("reference")]
    calls = {o["operator"]: o["calls"] for s in values["graphs"][0]["sides"] for o in s["operators"]}
    assert all(o["made"] >= 0 for s in values["graphs"][0]["sides"] for o in s["operators"])
    assert (
        next(o["made"] for o in values["graphs"][0]["sides"][0]["operators"] if o["operator"] == "npu.npu_swiglu")
        == 2 * 2 * 16 * 64 * 2
    )  # layers, tokens, columns, bytes
    assert (
        calls["npu.npu_fusion_attention_v3"] == calls["npu.npu_fusion_attention_grad_v3"] == 2
        and calls["npu.npu_rms_norm_backward"] == 5
    )
    assert values["parameter_bytes"] > 0 and values["peak_memory"] < 2**30


@pytest.mark.slow
@needs_npu
def test_parameters_without_a_gradient_are_named(capsys):
    report = mindspeed_fx.cross_compile(Unused(), (torch.zeros(2, 8),), baseline=False, kernels=False)
    assert report.without_gradient == ["idle.weight", "idle.bias"] and "WITHOUT A GRADIENT: 2" in str(report)


@pytest.mark.slow
@needs_npu
def test_an_error_over_there_is_an_error_here():
    with pytest.raises(CrossError, match="the model reads a value of a tensor") as error:
        mindspeed_fx.cross_compile(ReadsAValue(), (torch.zeros(4),), baseline=False, kernels=False)
    assert (
        "Traceback" in error.value.details
        and "in forward" in str(error.value)
        and "x * x.sum().item()" in error.value.frames
    )


@pytest.mark.slow
@needs_npu
def test_classes_of_the_users_own_script(tmp_path):
    script = tmp_path / "user.py"
    script.write_text(
        "import torch, mindspeed_fx\nclass Mine(torch.nn.Linear):\n    pass\n"
        "if __name__ == '__main__':\n    report = mindspeed_fx.cross_compile(Mine(8, 8), (torch.zeros(2, 8),), "
        "baseline=False, kernels=False)\n    print(report.operators['aten.addmm'])\n"
    )
    run = subprocess.run(
        [sys.executable, str(script)],
        env={**__import__("os").environ, "PYTHONPATH": str(pathlib.Path(mindspeed_fx.__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert run.stdout.strip() == "1", run.stderr[-2000:]
