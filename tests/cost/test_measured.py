"""Measured kernels beside the formulas: a shape of the table, one between two rows, one far from all, and files."""

import dataclasses
import math

import pytest
import torch

import mindspeed_fx
from mindspeed_fx.cost import measured
from mindspeed_fx.cost.hardware import hardware
from mindspeed_fx.cost.measured import COLUMNS, MeasuredRow, read_rows
from mindspeed_fx.cost.operators import Cost, Spec, attention, cost_of, product
from mindspeed_fx.planning.predict import predict

FORMULA = dataclasses.replace(hardware("ascend910b2"), measured=())


def matmul(m, n, k, dtype="bfloat16", item=2):
    return product(Spec((m, n), dtype, item), k, Spec((m, k), dtype, item), Spec((k, n), dtype, item))


def row(m, n, k, seconds, dtype="bfloat16"):
    return MeasuredRow("product", dtype, (m, n, k), seconds, "a test")


def device(*rows):
    return dataclasses.replace(FORMULA, measured=rows)


def formula(*sizes):
    return float(matmul(*sizes).seconds(FORMULA))


@pytest.mark.parametrize("name", ["ascend910b2", "h100"])
def test_a_shape_of_the_table_has_its_measured_time(name):
    hw = hardware(name)
    assert len(hw.measured) > 15
    for kernel in hw.measured:
        cost = cost_of(kernel)
        assert float(cost.seconds(hw)) == pytest.approx(kernel.seconds, rel=1e-6), kernel.name
        found = cost.correction(hw)
        assert (found.row, found.distance, found.share) == (kernel, 0, 1) and kernel.source in str(found)


def test_the_published_value_is_in_the_name():
    text = str(matmul(4096, 4096, 4096).correction(hardware("ascend910b2")))
    assert text.startswith("product 4096 x 4096 x 4096 bfloat16, measured 315.4 TFLOP/s (") and "near" not in text


def test_speeds_are_in_the_unit_that_fits():
    texts = [str(measured.Correction(row(1, 1, 1, 1.0), rate, 0, 1.0, 1.0)) for rate in (1e12, 9.99e11)]
    assert ["measured 1 TFLOP/s" in texts[0], "measured 999 GFLOP/s" in texts[1]] == [True, True]


def test_a_shape_that_a_kernel_of_one_row_is_limited_by_memory():
    """The whole of the work is corrected, not the products alone."""
    hw = device(row(8192, 8192, 16, 4e-4))
    assert float(matmul(8192, 8192, 16).seconds(hw)) == pytest.approx(4e-4, rel=1e-9)


def test_between_two_rows_it_lies_between():
    small, large = [2048] * 3, [4096] * 3
    hw = device(row(*small, 1.5 * formula(*small)), row(*large, 0.8 * formula(*large)))
    before = 0.0
    factors = []
    for n in range(2048, 4097, 256):
        seconds = float(matmul(n, n, n).seconds(hw))
        assert seconds > before
        before = seconds
        factors.append(matmul(n, n, n).correction(hw).factor)
    assert factors == sorted(factors, reverse=True) and factors[0] > 1.4 and factors[-1] < 0.85
    assert matmul(2304, 2304, 2304).correction(hw).row.sizes[0] == 2048
    assert matmul(3840, 3840, 3840).correction(hw).row.sizes[0] == 4096


def test_the_worked_example_of_the_module():
    at = {1.0: 0.97, math.sqrt(2): 1.02}
    rows = [((d,), ratio, row(1, 1, 1, 1.0), 1.0) for d, ratio in at.items()]
    found = measured.interpolate((0.0,), rows)
    assert found.factor == pytest.approx(0.988, abs=5e-4) and found.row is rows[0][2]


def test_far_from_every_row_it_is_the_formula():
    hw = device(row(4096, 4096, 4096, 9.0))
    for sizes in ((128, 128, 128), (4096, 4096, 64), (65536, 4096, 4096)):
        assert matmul(*sizes).seconds(hw) == matmul(*sizes).seconds(FORMULA)
        assert matmul(*sizes).correction(hw) is None
    near, farther = (matmul(n, 4096, 4096).correction(hw) for n in (6000, 12000))
    assert near.share > 0.7 > 0.2 > farther.share > 0 and near.factor > farther.factor > 1


def test_without_a_row_the_next_one_is_named():
    two, four = row(2048, 2048, 2048, 1e-4), row(4096, 4096, 4096, 6e-4)
    shape = matmul(3000, 3000, 3000)
    assert shape.correction(device(two, four)).row is four
    assert shape.correction(device(two)).row is two
    assert shape.correction(device()) is None


def test_another_type_says_nothing_but_for_the_other_of_16_bits():
    kernel = row(4096, 4096, 4096, 1e-3, "float16")
    assert matmul(4096, 4096, 4096, "float32", 4).correction(device(kernel)) is None
    assert matmul(4096, 4096, 4096).correction(device(kernel)).row is kernel
    own = row(2048, 2048, 2048, 1e-4)
    assert matmul(3000, 3000, 3000).correction(device(kernel, own)).row is own


def heads(count, length, dtype="float16"):
    return Spec((1, count, length, 128), dtype, 2)


def test_a_row_without_a_mask_says_nothing_of_a_causal_one():
    full = MeasuredRow("attention", "float16", (16, 8192, 8192, 128), 5e-3, "a test")
    q = heads(16, 8192)
    assert attention(q, q, q, q, False).correction(device(full)).row is full
    assert attention(q, q, q, q, True).correction(device(full)) is None
    assert attention([q] * 3, q, q, q, False, q, q, backward=True).correction(device(full)) is None
    causal = dataclasses.replace(full, causal=True)
    assert attention(q, q, q, q, True).correction(device(causal)).distance == 0
    assert attention(q, q, q, q, True, window=512).correction(device(causal)) is None
    longer = heads(16, 12000)
    assert 0 < attention(longer, longer, longer, longer, True).correction(device(causal)).distance < 1


def test_one_head_does_not_stand_for_many():
    q = heads(32, 16384)
    assert attention(q, q, q, q, False).correction(hardware("ascend910b2")) is None


def test_symbols_have_the_formula():
    import sympy

    n = sympy.Symbol("n", positive=True)
    cost = Cost(matrix=2 * n**3, dtype="bfloat16", kind="product", shape=(n, n, n))
    hw = hardware("ascend910b2")
    assert cost.correction(hw) is None and cost.seconds(hw).free_symbols == {n}


# --------------------------------------------------------------------------- reports


@pytest.fixture(scope="module")
def report():
    layer = torch.nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16)
    torch._dynamo.reset()
    x = torch.ones(1024, 1024, dtype=torch.bfloat16, requires_grad=True)
    return mindspeed_fx.explain(layer, x, options={"hardware": "ascend910b2", "codegen": "eager"})


def test_reports_name_the_row(report, tmp_path):
    estimate = report.cost.estimate("forward")
    name = "product 1024 x 1024 x 1024 bfloat16, measured 99.9 TFLOP/s (github.com/zzc0721"
    assert estimate.by_operator()[0]["timed"].startswith(name) and name in str(estimate)
    assert [s["calls"] for s in estimate.summary()["times_from"]] == [1]
    lines = [line for line in str(report.cost).splitlines() if name in line]
    assert len(lines) == 1 and "of 3 products and attention from: product" in lines[0]
    folder = report.save(str(tmp_path))
    assert name in (folder / "rank0" / "graph0" / "index.md").read_text()
    assert name in (folder / "rank0" / "graph0" / "report.html").read_text()


def test_reports_of_a_device_without_rows_say_formula(report):
    estimate = report.cost.estimate("forward", hardware="ascend910b3")
    assert estimate.by_operator()[0]["timed"] == "formula" and estimate.times_from()[0]["row"] == "formula"


def test_a_prediction_names_the_row():
    run = {"devices": 8, "sequence": 8192, "tp": 8, "batch": 8}
    made = predict("llama3-70b", run, "ascend910b2")
    assert "product 8192 x 8192 x 8192 bfloat16, measured 301.2 TFLOP/s" in made.times_from["dense products"]
    assert made.times_from["attention"] == "formula" and made.times_from["dense products"] in str(made)
    assert set(predict("llama3-70b", run, FORMULA).times_from.values()) == {"formula"}


def test_a_ring_of_several_kernels_has_the_formula():
    run = {"devices": 2, "sequence": 8192, "cp": 2}
    kinds = {
        kind: predict("llama3-8b", {**run, "cp_kind": kind}, "h100").times_from["attention"]
        for kind in ("ring", "ulysses")
    }
    assert kinds["ring"] == "formula" and "causal attention" in kinds["ulysses"]


def test_an_early_attention_kernel_is_not_timed_by_the_current_one():
    run = {"devices": 1, "sequence": 8192, "microbatch": 2}
    current, early = (
        predict("mpt-1b", {**run, "attention_kernel": kernel}, "h100").times_from["attention"]
        for kernel in ("current", "early")
    )
    assert "causal attention 32 x 8192 x 8192 x 128" in current and "formula" in current and early == "formula"


# --------------------------------------------------------------------------- files


GOOD = "h100,product,bfloat16,64 x 32 x 16,0,12.5,2.5,somewhere"


def written(tmp_path, *lines, head=",".join(COLUMNS)):
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(["# a remark", head, *lines]) + "\n")
    return path


def test_a_file_is_read(tmp_path):
    rows = read_rows(written(tmp_path, GOOD, 'a100,attention,float16,1 x 2 x 3 x 4,1,7,0,"a, b"'))
    assert rows["h100"] == (MeasuredRow("product", "bfloat16", (64, 32, 16), (12.5 - 2.5) * 1e-6, "somewhere"),)
    assert rows["a100"][0].causal and rows["a100"][0].source == "a, b" and rows["a100"][0].sizes == (1, 2, 3, 4)


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("product", "prodct", "rows.csv:3: operator is 'prodct'; valid: product, attention"),
        ("64 x 32 x 16", "64 x 32", r"rows.csv:3: sizes of product are \(64, 32\); valid: m, n, k"),
        ("64 x 32 x 16", "64 x 32 x a", "rows.csv:3: .*a"),
        ("64 x 32 x 16", "__import__('os')", "rows.csv:3: "),
        (",0,12.5", ",2,12.5", "rows.csv:3: causal is '2'; valid: 0, 1"),
        ("12.5", "nan", "rows.csv:3: seconds of product are nan"),
        ("12.5", "1", "rows.csv:3: seconds of product are -1.5"),
        (",somewhere", "", "rows.csv:3: "),
    ],
)
def test_a_line_that_is_no_row_is_named(tmp_path, old, new, message):
    with pytest.raises(ValueError, match=message):
        read_rows(written(tmp_path, GOOD.replace(old, new)))


def test_other_columns_are_refused(tmp_path):
    with pytest.raises(ValueError, match="rows.csv:2: columns are .*; valid: device, operator"):
        read_rows(written(tmp_path, GOOD, head="device,operator"))
