"""mindspeed-fx calibrate: fits find the constants that made the timings, noise is refused, a processor is measured."""

import dataclasses
import json
import os
import random

import pytest
import torch
import torch.distributed as dist

from mindspeed_fx import cli
from mindspeed_fx.cost import calibrated
from mindspeed_fx.cost.device import Constant
from mindspeed_fx.cost.hardware import hardware
from mindspeed_fx.cost.operators import Cost, cost_of
from mindspeed_fx.errors import OptionError
from mindspeed_fx.planning.calibrate import (
    NoisyError,
    calibrate,
    cases,
    check_noise,
    collectives,
    fitting,
    page,
    timing,
)
from mindspeed_fx.planning.calibrate.cases import KINDS, Case, Row, cases_for, chain
from tests import forks, ranks

TRUE = {
    "matrix.bfloat16": 2.1e14,
    "matrix.float32": 4e13,
    "product_ramp": 300.0,
    "attention_forward": 0.6,
    "attention_backward": 0.4,
    "attention_ramp": 700.0,
    "memory_bandwidth": 9e11,
    "vector.float32": 5e12,
    "launch": 2e-5,
    "host_bandwidth": 1.5e10,
    "tiers.hccs.bandwidth": 1.1e10,
    "tiers.hccs.latency": 4e-5,
}


def synthetic_rows():
    """Rows of every kind, whose times come from the device that is to be found."""
    rows = []
    for dtype in ("bfloat16", "float32"):
        for n in (512, 1024, 2048, 4096):
            cost = Cost(matrix=2 * n**3, read=4 * n * n, write=2 * n * n, dtype=dtype, kind="product", shape=(n, n, n))
            rows.append(Row("product", f"{n}", dtype, "forward", 0.0, 0.01, (cost,)))
    for s in (1024, 4096, 16384):
        for stage, kind in (("forward", "attention"), ("backward", "attention_backward")):
            cost = Cost(matrix=64 * 128 * s * s, dtype="bfloat16", kind=kind, shape=(s, 128, 16, s, s / 2))
            rows.append(Row("attention", f"{s}", "bfloat16", stage, 0.0, 0.01, (cost,)))
    for n in (2**22, 2**24, 2**26):
        rows.append(
            Row("vector", f"copy {n}", "bfloat16", "forward", 0.0, 0.01, (Cost(vector=n, read=2 * n, write=2 * n),))
        )
        rows.append(
            Row("vector", f"exp {n}", "bfloat16", "forward", 0.0, 0.01, (Cost(vector=99 * n, read=n, write=n),))
        )
    rows.append(Row("launch", "24", "bfloat16", "forward", 0.0, 0.01, (Cost(vector=8),) * 24))
    rows.append(Row("copy", "to the host", "uint8", "", 0.0, 0.01))
    rows += [
        Row("collective", f"{kind} {size} {n} {n}", "float32", "", 0.0, 0.01)
        for kind in collectives.KINDS
        for size in collectives.SIZES
        for n in (2, 8)
    ]
    base = hardware("ascend910b2")
    true = calibrated.with_constants(
        fitting.reached(base, rows), {k: Constant(v, "", "the truth", "high") for k, v in TRUE.items()}
    )
    draw = random.Random(0)
    return [dataclasses.replace(r, seconds=fitting.modelled_seconds(r, true) * draw.uniform(0.98, 1.02)) for r in rows]


def test_a_fit_finds_the_constants_that_made_the_times():
    rows = synthetic_rows()
    result = fitting.fit(hardware("ascend910b2"), rows, "a test")
    assert set(fitting.free_constants(fitting.reached(hardware("ascend910b2"), rows), rows)) == set(TRUE)
    for path, value in TRUE.items():
        assert result.constants[path] == pytest.approx(value, rel=0.12), path
        assert 0 < result.constants[path].spread < 0.5, path
    assert result.median_error() < 0.02
    assert result.hardware.memory_efficiency == result.hardware.matrix_efficiency == 1
    # what was not measured stays
    assert result.hardware.tiers[-1] == hardware("ascend910b2").tiers[-1]


def test_an_outlier_does_not_rule():
    rows = synthetic_rows()
    rows[1] = dataclasses.replace(rows[1], seconds=20 * rows[1].seconds)
    result = fitting.fit(hardware("ascend910b2"), rows, "a test")
    assert result.constants["matrix.bfloat16"] == pytest.approx(TRUE["matrix.bfloat16"], rel=0.15)


@pytest.mark.parametrize("kind, count", [("launch", 1), ("vector", 2), ("product", 3), ("attention", 3)])
def test_a_kind_frees_its_constants_alone(kind, count):
    rows = [r for r in synthetic_rows() if r.kind == kind]
    start = fitting.reached(hardware("ascend910b2"), rows)
    free = fitting.free_constants(start, rows)
    assert len(free) == count and set(free) <= set(TRUE)
    result = fitting.fit(hardware("ascend910b2"), rows, "a test")
    untouched = set(hardware("ascend910b2").constants()) - set(result.constants)
    assert all(result.hardware.constants()[p] == hardware("ascend910b2").constants()[p] for p in untouched)


def test_noise_is_refused_by_name():
    rows = [Row("vector", "quiet", "float32", "forward", 1.0, 0.01)] * 3
    noisy = Row("product", "8 x 8 x 8", "float32", "forward", 1.0, 0.7, is_noisy=True)
    check_noise([*rows, noisy], accept=False)
    with pytest.raises(NoisyError, match="2 of 5 timings .*product 8 x 8 x 8, 70%.*--accept-noise"):
        check_noise([*rows, noisy, noisy], accept=False)
    check_noise([noisy], accept=True)


def test_timings_taken_while_others_compute_are_noisy(monkeypatch):
    readings = iter([(0.0, 0.0, 0.0), (10.0, 9.0, 1.0)])
    monkeypatch.setattr(timing, "_busy_seconds", lambda: next(readings))
    monkeypatch.setattr(timing.os, "cpu_count", lambda: 2)
    assert timing.ProcessorWatch().share_of_others() == pytest.approx(0.4)
    assert timing.summarize([1.0, 1.0, 1.0], 0.4).is_noisy and not timing.summarize([1.0, 1.0, 1.0]).is_noisy
    assert timing.summarize([1.0, 2.0, 3.0, 9.0]).is_noisy


def test_a_system_without_that_record_is_taken_for_quiet(monkeypatch):
    monkeypatch.setattr(timing, "_busy_seconds", lambda: None)
    assert timing.ProcessorWatch().share_of_others() == 0.0


def test_repetitions_end_for_slow_calls(monkeypatch):
    calls = []

    def sample():
        calls.append(1)
        return 3.0, 4.0

    first, second = timing.repeat(sample, 0.0)
    assert (first.seconds, second.seconds, len(calls)) == (3.0, 4.0, 3)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"device": "cqu"}, "device is 'cqu'; valid: cpu, cuda, npu .did you mean .cpu"),
        ({"device": "npu"}, 'device is "npu", and there is none here'),
        (
            {"device": "cpu", "kinds": ("products",)},
            r"kinds is \('products',\); valid: product, .*did you mean .product",
        ),
        ({"device": "cpu", "dtypes": ()}, r"dtypes is \(\); valid: float32, bfloat16"),
        ({"device": "cpu", "seconds": 0}, "seconds is 0; valid: a number above 0"),
        ({"device": "cpu", "base": "h100"}, 'base is "h100", a cuda; valid: a table of a cpu'),
        ({"device": "cpu", "base": "h1000"}, "option \"hardware\" is 'h1000'"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(OptionError, match=message):
        calibrate(**arguments)


def test_a_processor_is_measured(tmp_path, capsys, monkeypatch):
    """The command on this machine: products and launches, saved, with their page; the fit explains what it saw."""
    monkeypatch.setenv("MINDSPEED_FX_OPTIONS", json.dumps({"codegen": "eager"}))
    out, html = tmp_path / "table.json", tmp_path / "page.html"
    words = ["calibrate", "--device", "cpu", "--small", "--seconds", "0.4", "--kinds", "product,launch", "--dtypes"]
    assert cli.main([*words, "float32", "--accept-noise", "--out", str(out), "--page", str(html)]) == 0
    table = calibrated.read(out)
    assert set(table.constants) == {"matrix.float32", "product_ramp", "launch"}
    assert table.fitted == ("product", "launch") and table.base == "cpu" and table.node == hardware("cpu").node
    check_measured(table)
    assert 1e9 < table.constants["matrix.float32"] < 1e13 and 1e-8 < table.constants["launch"] < 1e-3
    printed = capsys.readouterr().out
    assert table.name in printed and str(out) in printed and "product_ramp" in printed
    assert "2 measured products and attention kernels" in printed
    text = html.read_text()
    assert "512 x 512 x 512" in text and "matrix.float32" in text and table.name in text


def check_measured(table):
    """The timed products are in the file, and the cost model takes them; the launches' small ones are not."""
    rows = {row.sizes: row for row in table.measured}
    assert set(rows) == {(256, 256, 256), (512, 512, 512)} and all(r.dtype == "float32" for r in rows.values())
    hw = table.hardware(hardware("cpu"))
    cost = cost_of(rows[512, 512, 512])
    assert float(cost.seconds(hw)) == pytest.approx(rows[512, 512, 512].seconds, rel=1e-6)
    text = str(cost.correction(hw))
    assert text.startswith("product 512 x 512 x 512 float32, measured ") and "(calibrated on " in text
    alone = dataclasses.replace(hw, measured=())
    assert cost.correction(alone) is None
    without = dataclasses.replace(table, measured=())
    assert without.name != table.name and calibrated.with_constants(hardware("cpu"), {}).measured == ()


def test_timed_kernels_are_those_of_the_rows_that_are_not_noisy():
    rows = [r for r in synthetic_rows() if r.kind in ("product", "attention", "vector")]
    rows[0] = dataclasses.replace(rows[0], is_noisy=True)
    result = fitting.fit(hardware("ascend910b2"), rows, "a test")
    products = [r for r in result.measured("a test") if r.operator == "product"]
    assert len(products) == 7 and (512, 512, 512) not in {r.sizes for r in products if r.dtype == "bfloat16"}
    assert len([r for r in result.measured("a test", noisy=True) if r.operator == "product"]) == 8
    by_size = {(r.dtype, r.sizes[0]): r.seconds for r in products}
    assert all(by_size[r.dtype, int(r.label)] == pytest.approx(r.seconds) for r in rows[1:8])


def test_a_shape_timed_twice_has_the_mean_of_both():
    cost = Cost(matrix=2 * 512**3, read=8 * 512**2, write=4 * 512**2, kind="product", shape=(512, 512, 512))
    rows = [Row("product", "512", "float32", s, t, 0.01, (cost,)) for s, t in (("forward", 1e-3), ("backward", 4e-3))]
    (one,) = fitting.fit(hardware("cpu"), rows, "a test").measured("a test")
    assert one.seconds == pytest.approx(2e-3)


def test_kernels_timed_together_share_the_time_as_the_formulas_do():
    first, second = (
        Cost(matrix=2 * n**3, read=8 * n * n, write=4 * n * n, kind="product", shape=(n, n, n)) for n in (512, 1024)
    )
    rows = [Row("product", "both", "float32", "backward", 3e-3, 0.01, (first, second))]
    result = fitting.fit(hardware("cpu"), rows, "a test")
    one, two = result.measured("a test")
    assert one.seconds + two.seconds == pytest.approx(3e-3)
    shares = [float(c.seconds(result.hardware)) for c in (first, second)]
    assert two.seconds / one.seconds == pytest.approx(shares[1] / shares[0])


def test_a_page_without_a_place_is_refused_before_the_work(capsys):
    assert cli.main(["calibrate", "--page", "/nowhere/page.html"]) == 2
    assert "there is no directory /nowhere" in capsys.readouterr().err


def test_text_of_a_page_is_escaped():
    rows = [dataclasses.replace(r, label="<b>&") for r in synthetic_rows() if r.kind == "launch"]
    base = hardware("ascend910b2")
    result = fitting.fit(base, rows, "a test")
    table = calibrated.CalibratedTable("npu", "a <device>", base.name, result.constants, ("launch",), 8, "note")
    calibration = page.Calibration(table, result, base, None)
    assert "&lt;b&gt;&amp;" in page.html(calibration) and "<b>&" not in page.html(calibration)
    assert "a &lt;device&gt;" in page.html(calibration) and "not saved" in page.text(calibration)


def test_cases_of_every_kind_compile_and_count(monkeypatch):
    """What is counted of a case is what its name says."""
    monkeypatch.setenv("MINDSPEED_FX_OPTIONS", json.dumps({"codegen": "eager"}))
    from mindspeed_fx.planning.calibrate import measure

    monkeypatch.setattr(measure, "wait_until_quiet", lambda: None)
    tiny = {
        "product": (4, 8, 16),
        "attention": (1, 2, 16, 8),
    }
    seen = {}
    for case in {c.function: c for c in cases_for("cpu", KINDS, ("float32",), small=True)}.values():
        if case.kind == "product":
            m, k, n = tiny["product"]
            case = dataclasses.replace(case, shapes=((m, k), (n, k)))
        elif case.kind == "attention":
            case = dataclasses.replace(case, shapes=(tiny["attention"],) * 3)
        elif case.kind == "launch":
            case = dataclasses.replace(case, shapes=case.shapes[:4])
        elif case.kind == "vector":
            case = dataclasses.replace(case, shapes=tuple((4, 8)[-len(s) :] for s in case.shapes))
        forward, backward = measure.measure_case(case, torch.device("cpu"), 0.0)
        assert (
            forward.seconds > 0 and backward.seconds > 0 and (forward.stage, backward.stage) == ("forward", "backward")
        )
        seen[case.kind] = sum(c.flops for c in forward.kernels), sum(c.flops for c in backward.kernels)
    assert set(seen) == set(KINDS)
    assert seen["product"] == (2 * 4 * 8 * 16, 4 * 4 * 8 * 16) and seen["vector"] == (0, 0)
    assert seen["attention"][0] == 4 * 2 * 16 * 16 * 8


def test_a_chain_is_as_many_kernels_as_it_says():
    case = next(c for c in cases_for("cpu", ("launch",)))
    assert isinstance(case, Case) and len(case.shapes) == 25
    x, *weights = case.inputs(torch.device("cpu"))
    assert chain(x, *weights).shape == (8, 8)


def measure_on_rank(rank, folder, port):
    import unittest.mock

    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    few = unittest.mock.patch.multiple(collectives, SIZES=(2**12, 2**16), ROUNDS=3)
    assert collectives.start_group("cpu") and not collectives.start_group("cpu")
    with few:
        rows = collectives.measure_collectives(torch.device("cpu"), lambda text: None)
    dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps([[r.label, r.seconds] for r in rows]))


def test_collectives_of_two_ranks(tmp_path):
    """Every rank has the same rows, and the fit finds the tier that they crossed."""
    ranks.spawn(measure_on_rank, (tmp_path, str(forks.free_port())))
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second and len(first) == 2 * len(collectives.KINDS)
    assert {label.split()[0] for label, _ in first} == set(collectives.KINDS) and all(s > 0 for _, s in first)
    rows = [Row("collective", label, "float32", "", seconds, 0.0) for label, seconds in first]
    base = dataclasses.replace(hardware("cpu"), node=2)
    result = fitting.fit(base, rows, "a test")
    assert set(result.constants) == {f"tiers.memory.{n}" for n in ("bandwidth", "latency", "efficiency")}
    assert result.hardware.tiers[1] == base.tiers[1]


@pytest.mark.parametrize(
    "world, local, groups",
    [(2, 2, [(2, 2)]), (8, 8, [(2, 2), (8, 8)]), (16, 8, [(2, 2), (8, 8), (16, 8)]), (4, 1, [(4, 1)])],
)
def test_groups_that_are_measured(world, local, groups):
    assert collectives.groups_of(world, local) == groups


def test_one_rank_has_no_collectives():
    assert not dist.is_initialized()
    assert collectives.measure_collectives(torch.device("cpu"), lambda text: None) == []


def test_the_rotation_that_is_measured_is_one():
    x, cos, sin = torch.randn(2, 3, 4, 8), torch.randn(4, 8), torch.randn(4, 8)
    torch.testing.assert_close(cases.rotation(x, cos, sin), torch.ops.mindspeed.rope(x, cos, sin, False))
