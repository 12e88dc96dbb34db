"""Forty published runs, of which the model may not get worse, and the benchmark that reads such tables.

The rows, with their sources, are in ``published_ascend.csv`` and ``published_gpu.csv``: every so-many-th of the tables
that the constants are fitted to.
"""

import dataclasses
import re
import statistics
from pathlib import Path

import pytest

from benchmarks import published_runs
from benchmarks.fit_runs import PARAMETERS, with_values
from benchmarks.published_rows import read_cases
from benchmarks.published_scripts import KEPT, kept_flags, launch_of, scripts

HERE = Path(__file__).parent
MEDIANS = {"ascend": 0.0684, "gpu": 0.0108, "memory": 0.0452}
"""Median size of the error when the constants were fitted."""


def errors():
    result = {kind: [] for kind in MEDIANS}
    for name in ("ascend", "gpu"):
        cases = read_cases(str(HERE / f"published_{name}.csv"))
        assert not [c.reason for c in cases if c.reason]
        for r in published_runs.predict_all(cases, [], leave_out=False):
            result["memory" if r.case.kind == "memory" else name].append(abs(r.error))
    return result


def test_forty_runs_are_predicted_as_well_as_when_the_constants_were_fitted():
    sizes = errors()
    assert sum(len(v) for v in sizes.values()) == 40
    now = {kind: statistics.median(values) for kind, values in sizes.items()}
    assert all(now[kind] <= 1.1 * MEDIANS[kind] for kind in now), now
    assert all(now[kind] >= 0.5 * MEDIANS[kind] for kind in now), f"much better: write the new medians here: {now}"


def test_the_benchmark_ends_in_a_line_for_each_file_and_kind(capsys):
    published_runs.main(["--ascend", str(HERE / "published_ascend.csv"), "--gpu", str(HERE / "published_gpu.csv")])
    out = capsys.readouterr().out
    assert "ascend time: median error" in out and "ascend memory: median error" in out
    assert "gpu time (H100 and H200, bfloat16): median error" in out and "% of 10 rows within 15 %" in out


def test_rows_that_cannot_be_read_have_a_reason(tmp_path):
    head = "kind,what,shape_or_config,value,unit,hardware,source\n"
    rows = [
        "e2e_pretrain,LLaMA2-7B,npus=8;layers=32;hidden=4096,10,tokens/s/NPU,Atlas 900 A2 PODc (910B),here",
        "e2e_pretrain,Nobody-7B,gpus=8;seq=2048;precision=BF16,10,tokens/s/GPU,DGX-H100,here",
        "e2e_pretrain,LLaMA3_8B,gpus=8;seq=2048;precision=BF16,10,tokens/s/GPU,DGX-B200,here",
        "matmul,torch.matmul,m=1,1,us,Ascend 910B2,here",
    ]
    (tmp_path / "t.csv").write_text(head + "\n".join(rows) + "\n")
    reasons = [c.reason for c in read_cases(str(tmp_path / "t.csv"))]
    assert len(reasons) == 3 and "seq not stated" in reasons[0] and "nobody7b" in reasons[1] and "B200" in reasons[2]


def test_rows_that_contradict_each_other_are_doubtful(tmp_path):
    text = (HERE / "published_ascend.csv").read_text().splitlines()
    row = next(line for line in text if line.startswith("e2e_pretrain"))
    value = row.split(",tokens/s")[0].rpartition(",")[2]
    other = row.replace(f",{value},tokens/s", f",{float(value) * 3},tokens/s")
    (tmp_path / "t.csv").write_text("\n".join([text[0], row, other]) + "\n")
    assert [c.doubtful for c in read_cases(str(tmp_path / "t.csv"))] == [True, True]


@pytest.mark.parametrize("group", PARAMETERS)
def test_what_a_fit_changes_changes_the_device(group):
    import numpy as np

    name = {"ascend": "ascend910b2"}.get(group, group)
    parameters = PARAMETERS[group]
    low, high = (with_values(name, parameters, np.log([p.prior * f for p in parameters])) for f in (0.5, 0.9))
    assert low[0].matrix_efficiency < high[0].matrix_efficiency and low[0].launch < high[0].launch
    assert low[0].tiers[0].efficiency < high[0].tiers[0].efficiency and low[1].host < high[1].host


def test_gains_of_single_features_are_those_that_their_pages_claim(capsys):
    path = str(HERE / "published_gains.csv")
    misses = published_runs.print_gains(path, read_cases(path))
    out = capsys.readouterr().out
    assert len(misses) == 10 and "no run of" not in out and "sign right in 10 of 10" in out
    assert statistics.median(misses) <= 2.0, out


def test_a_run_that_the_model_refuses_is_named_and_the_others_are_predicted(tmp_path):
    head, row, *_ = (HERE / "published_ascend.csv").read_text().splitlines()
    (tmp_path / "t.csv").write_text("\n".join((head, row, row)))
    first, second = cases = read_cases(str(tmp_path / "t.csv"))
    first.run = dataclasses.replace(first.run, tp=1, pp=first.run.devices, vpp=99)
    assert [r.case for r in published_runs.predict_all(cases, [], leave_out=False)] == [second]
    assert first.reason.startswith("refused: settings: pp=") and "layers" in first.reason


def test_a_row_that_names_a_script_has_the_scripts_settings(tmp_path):
    """The table has four layers; its script has two of them without work, and a layer of further tokens."""
    text = (HERE / "published_ascend.csv").read_text().splitlines()
    row = next(line for line in text if "deepseek_v3_mcore_tp1_pp2_ep4" in line)
    (tmp_path / "named.csv").write_text("\n".join((text[0], row)))
    (tmp_path / "unnamed.csv").write_text("\n".join((text[0], row.partition("; script")[0] + '"' * row.count('"'))))
    (named,), (unnamed,) = (read_cases(str(tmp_path / f"{name}.csv")) for name in ("named", "unnamed"))
    assert (named.model.layers, named.model.mtp_layers, named.run.empty_layers) == (2, 1, (2, 3))
    assert (unnamed.model.layers, unnamed.model.mtp_layers, unnamed.run.empty_layers) == (4, 0, ())


def test_scripts_are_kept_as_the_flags_that_a_prediction_reads():
    words = "--num-layers 2 --lr 1e-5 --bf16 --data-path data --hidden-size 64".split()
    assert kept_flags(words) == "--bf16 --hidden-size 64 --num-layers 2"
    assert launch_of("github.com/Ascend/MindSpeed-LLM tests/x.json @0000000 (2026); script tests/none.sh") is None
    assert all(devices > 0 and "--num-layers" in flags for devices, flags in scripts().values())
    assert [flag for flag in KEPT if not re.fullmatch(r"--[\w-]*\w", flag)] == []
