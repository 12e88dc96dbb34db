"""The option ``hardware`` and the modelled cost in reports and dumps."""

import json
import re

import pytest
import sympy
import torch

import mindspeed_fx
from mindspeed_fx.ascend.stub_source import CORES
from mindspeed_fx.cost.hardware import canonical
from mindspeed_fx.errors import OptionError
from mindspeed_fx.options import Options

NAMES = {"b": 2, "s": 24, "h": 32, "4*h": 128}
b, s, h = sympy.symbols("b s h", positive=True)


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = (
            torch.nn.RMSNorm(32),
            torch.nn.Linear(32, 128, bias=False),
            torch.nn.Linear(128, 32, bias=False),
        )

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def explained(**options):
    torch._dynamo.reset()
    return mindspeed_fx.explain(Mlp(), torch.randn(2, 24, 32, requires_grad=True), options=options)


@pytest.fixture(scope="module")
def eager():
    return explained(hardware="Ascend910B2", codegen="eager")


def test_the_option_takes_names_as_users_type_them():
    assert Options.parse({"hardware": "Ascend910B2"}, {}).hardware == "ascend910b2"
    assert Options.parse({}, {"MINDSPEED_FX_OPTIONS": '{"hardware": "h200"}'}).resolve("cpu").hardware == "h200"
    assert Options.parse({}, {}).resolve("cpu").hardware == "cpu"
    with pytest.raises(OptionError, match='option "hardware" is "?\'?ascend910b22.*did you mean "ascend910b2"'):
        Options.parse({"hardware": "ascend910b22"}, {})
    with pytest.raises(OptionError, match="hardware"):
        Options.parse({"hardware": 910}, {})


def test_every_soc_of_the_stub_has_a_table():
    assert [soc for soc in CORES if canonical(soc) is None] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_table_the_report_says_why():
    from mindspeed_fx.report.modelled import Modelled, about
    from mindspeed_fx.report.records import GraphRecord

    assert Options().resolve("cuda").hardware is None
    from mindspeed_fx.backend import Compilation

    record = Compilation(Options().resolve("cuda")).record
    assert record.effective["hardware"].startswith("none: no cuda device is here")
    assert "not modelled: no cuda device" in about(record) and Modelled([record]).rows() == []
    record.calls["forward"] = None
    with pytest.raises(OptionError, match="no cuda device"):
        Modelled([record]).estimate("forward")
    assert isinstance(record, GraphRecord)


def test_totals_before_and_after(eager):
    rows = {r["stage"]: r for r in eager.cost.rows()}
    assert set(rows) == {"captured", "forward", "backward"} and all(
        r["hardware"] == "ascend910b2" and not r["fused"] for r in rows.values()
    )
    assert rows["captured"]["flops"] == rows["forward"]["flops"] == 2 * 2 * 24 * 2 * 32 * 128
    assert rows["backward"]["flops"] == 2 * rows["forward"]["flops"]
    assert (
        rows["forward"]["kernels"] <= rows["captured"]["kernels"]
        and eager.effective_options["hardware"] == "ascend910b2"
    )
    assert (
        eager.cost.total("flops") == 3 * rows["forward"]["flops"]
        and eager.cost.total("seconds", "captured") == rows["captured"]["seconds"]
    )


def test_totals_in_named_sizes(eager):
    assert eager.cost.expression("flops", NAMES, stage="captured") == 16 * b * s * h**2
    assert eager.cost.expression("flops", NAMES) == 48 * b * s * h**2
    moved = eager.cost.expression("bytes", NAMES, stage="forward")
    assert moved.subs({b: 2, s: 24, h: 32}) == eager.cost.total("bytes", "forward") and moved.free_symbols == {b, s, h}
    with pytest.raises(KeyError, match="captured, forward, backward"):
        eager.cost.estimate("joint")


def test_other_hardware_without_compiling_again(eager):
    slow, fast = (eager.cost.estimate("backward", hardware=name) for name in ("ascend910b4", "h200"))
    assert fast.bytes == slow.bytes and fast.seconds < slow.seconds


def test_text_dump_and_html(eager, tmp_path):
    assert "modelled for ascend910b2 (fitted to matrix products, attention," in str(eager)
    assert "), not measured: a kernel for every operator" in str(eager)
    eager.save(str(tmp_path))
    assert re.search(r"step, modelled: [\d.]+ ms \([\d.]+ to [\d.]+\)", str(eager))
    folder = tmp_path / "rank0" / "graph0"
    index, page, values = (
        (folder / "index.md").read_text(),
        (folder / "report.html").read_text(),
        json.loads((folder / "metadata.json").read_text()),
    )
    assert (
        "## Modelled cost" in index
        and "| forward, before the passes |" in index
        and "Modelled cost" in page
        and "modelled us" in page
    )
    assert re.search(r"The step is\s+[\d.]+ ms \([\d.]+ to [\d.]+\); constants fitted to", page)
    assert [r["stage"] for r in values["modelled"]] == ["captured", "forward", "backward"] and values["modelled"][0][
        "operators"
    ]
    assert "calls" not in values and json.loads(eager.to_json())["graphs"][0]["modelled"]


@pytest.mark.slow
def test_generated_code_is_modelled_as_grouped():
    report = explained(hardware="h100")
    rows = {r["stage"]: r for r in report.cost.rows()}
    assert all(r["fused"] for r in rows.values()) and "grouped as Inductor would" in str(report)
    # Norm, product, GELU, product, sum.
    assert rows["forward"]["kernels"] == 5


def test_nothing_is_read_unless_asked_for(monkeypatch):
    from mindspeed_fx import backend

    monkeypatch.setattr(backend, "read", lambda gm: pytest.fail("the cost model ran"))
    torch._dynamo.reset()
    torch.compile(lambda x: x * 2 + 1, backend="mindspeed", options={"codegen": "eager"})(torch.ones(3))
