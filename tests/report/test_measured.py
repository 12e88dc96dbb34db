"""What a measured step says in print, in Markdown and on the page."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mindspeed_fx.report.measured import FamilyGain, KernelTime, Measured, StepTime, family_rows, lines
from tests.models import explain


@pytest.fixture
def measured():
    return Measured(
        device="cpu",
        hardware="ascend910b2",
        is_here=False,
        has_backward=True,
        rounds=7,
        steps=[StepTime("eager", 9e-3, 1e-4), StepTime("compiled", 5e-3, 2e-4, 4e-3)],
        families=[
            FamilyGain("norms", ("fusion.rms_norm",), 2, 6e-3, 1e-3, 2e-4, 5e-4),
            FamilyGain("gates", ("fusion.swiglu",), 1, 5e-3, -1e-4, 2e-4, None),
            FamilyGain("losses", ("fusion.cross_entropy",), 1, error="MemoryError: out of it"),
        ],
        kernels=[
            KernelTime("aten::mm", "forward", "blocks.*.q", 2, 2e-3, 1e-3),
            KernelTime("mindspeed::rope", "backward", "", 1, 1e-3, 2e-5),
            KernelTime("cpp_fused_add", "forward", "", 1, 1e-6, 1e-9),
        ],
        profiled_seconds=6e-3,
        unmapped={"aten::t": 1e-3},
        notes=["a note"],
    )


def test_lines_say_what_is_within_the_spread_and_what_was_not_measured(measured):
    assert lines(measured) == [
        "measured: forward and backward on cpu, medians of 7 rounds in which all forms of the step take turns "
        "(modelled for ascend910b2, which is not the device measured)",
        "  step: eager 9 ms (spread 0.1), compiled 5 ms (spread 0.2, modelled 4)",
        "  what each family of rewrites bought: measured (modelled)",
        "    norms               2 sites  1 (0.5) ms of 6, spread 0.2",
        "    gates               1 sites  -0.1 ms of 5: within the spread 0.2",
        "    losses              1 sites  not measured: MemoryError: out of it",
        "  kernels: 4 of 6 ms under the profiler; 75% of it mapped to nodes of the graphs, not aten::t",
        "    aten::mm                               forward blocks.*.q           2 x  2,000.0 us  (1,000.0)",
        "    mindspeed::rope                        backward                     1 x  1,000.0 us     (20.0)",
        "    cpp_fused_add                          forward                      1 x      1.0 us      (0.0)",
        "  model and measurement part most in: mindspeed::rope (backward) 50 x of its modelled time; aten::mm (forward "
        "blocks.*.q) 2 x of its modelled time",
        "  note: a note",
    ]
    assert max(len(line) for line in lines(measured)[7:10]) <= 100
    assert [row[-1] for row in family_rows(measured)] == [
        "",
        "within the spread",
        "not measured: MemoryError: out of it",
    ]


def test_print_dump_and_page_have_it(measured, tmp_path):
    torch._dynamo.reset()
    report = explain(nn.RMSNorm(8), torch.randn(2, 8))
    assert report.measured is None and report.to_dict()["measured"] is None and "\nmeasured: " not in str(report)
    report.measured = report.graphs[0].measured = measured
    assert "    norms               2 sites  1 (0.5) ms of 6, spread 0.2" in str(report).splitlines()
    report.save(str(tmp_path))
    folder = tmp_path / "rank0" / "graph0"
    index = (folder / "index.md").read_text()
    assert "## Measured step" in index and "| norms | 2 | 1,000.0 | 16.7% | 200.0 | 500.0 |  |" in index
    page = (folder / "report.html").read_text()
    assert '<section id="view-measured">' in page and "within the spread" in page and "not mapped" in page
    assert "mindspeed::rope" in page and '"measured": {' in (folder / "metadata.json").read_text()
