"""Memory over the step and time against peak, as people see them."""

import pytest

from mindspeed_fx import cli
from mindspeed_fx.report import memory

SCRIPT = """
import torch

def case():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[m for _ in range(6) for m in (torch.nn.Linear(32, 32), torch.nn.Tanh())])
    return model, (torch.randn(64, 32),)
"""


def test_the_command_prints_plans_from_fast_to_small(tmp_path, capsys):
    script = tmp_path / "net.py"
    script.write_text(SCRIPT)
    assert (
        cli.main(
            [
                "explain",
                f"{script}:case",
                "--memory-curve",
                "--options",
                '{"codegen": "eager"}',
                "--save",
                str(tmp_path / "out"),
            ]
        )
        == 0
    )
    text = capsys.readouterr().out
    rows = [line.split() for line in text[text.index("peak MiB    step ms") :].splitlines()[1:] if "#" in line]
    peaks, times = [float(r[0]) for r in rows], [float(r[1]) for r in rows]
    assert len(rows) >= 3 and peaks == sorted(peaks, reverse=True) and times == sorted(times)
    folder = tmp_path / "out" / "rank0" / "graph0"
    names = {p.name.split("recompute.budget.")[1] for p in folder.glob("*recompute.budget.*")}
    assert names == {"activations.md", "memory.svg", "memory.png", "pareto.txt"}
    assert "<polyline" in (folder / "report.html").read_text()
    (table,) = folder.glob("*activations.md")
    assert "| recompute |" in table.read_text() and "recomputed in" in table.read_text()


def test_a_script_has_no_curve_of_its_own(tmp_path, capsys):
    script = tmp_path / "net.py"
    script.write_text(SCRIPT)
    assert cli.main(["explain", str(script), "--memory-curve"]) == 2
    assert "SCRIPT.py:FUNCTION" in capsys.readouterr().err


@pytest.mark.parametrize("length", [0, 1, 7, 9001])
def test_the_picture_keeps_the_peak_of_any_length(length):
    values = [t % 13 for t in range(length)]
    if length > 5:
        values[5] = 99 * memory.MIB
    curve = memory.Curve(values, [("layers.1.mlp", "aten.mm")] * length, length // 2)
    svg = memory.picture({"a": curve})
    assert svg.count("<polyline") == 1 and svg.count("<svg") == 1
    if length > 5:
        assert f"{memory._TOP:.1f}" in svg and "peak 99.00 MiB at aten.mm of layers.1.mlp" in svg
        assert svg.count(",") < 3000
