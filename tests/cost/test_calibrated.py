"""Tables of calibrated devices: what a file holds, how it is found, and what is said of one that cannot be used."""

import dataclasses
import json

import pytest
import torch

import mindspeed_fx
from mindspeed_fx.cost import calibrated
from mindspeed_fx.cost import hardware as hardware_module
from mindspeed_fx.cost.device import Constant
from mindspeed_fx.cost.hardware import detect, hardware
from mindspeed_fx.cost.measured import MeasuredRow


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """An empty directory of tables; what is found in it is forgotten afterwards."""
    monkeypatch.setenv("MINDSPEED_FX_HARDWARE", str(tmp_path))
    before = dict(hardware_module._tables()[0])
    yield tmp_path
    hardware_module._tables()[0].clear()
    hardware_module._tables()[0].update(before)


KERNELS = (
    MeasuredRow("product", "float32", (64, 32, 16), 3e-6, "a test"),
    MeasuredRow("attention_backward", "bfloat16", (8, 512, 512, 64), 2e-3, "a test", causal=True),
)


def table(**values):
    constants = {"launch": 7e-6, "matrix.bfloat16": 3e11, "tiers.memory.bandwidth": 5e9, **values}
    return calibrated.CalibratedTable(
        target="cpu",
        device=calibrated.device_name("cpu"),
        base="cpu",
        constants={k: Constant(v, "s", "a test", "high", 0.05) for k, v in constants.items()},
        fitted=("launch", "product", "vector"),
        node=4,
        note="calibrated today",
        measured=KERNELS,
    )


def test_a_saved_table_is_what_the_device_at_hand_means(directory):
    saved = table()
    path = calibrated.save(saved)
    assert path.parent == directory and calibrated.read(path) == saved
    name, why = detect("cpu")
    assert (name, why) == (saved.name, "") and name.startswith("cpu-calibrated-")
    hw = hardware(name)
    assert hw.measured == KERNELS
    assert hw.launch == 7e-6 and hw.launch.spread == 0.05 and hw.matrix["bfloat16"] == 3e11
    assert hw.tiers[0].bandwidth == 5e9 and hw.tiers[1] == hardware("cpu").tiers[1]
    assert hw.matrix["float32"] == hardware("cpu").matrix["float32"]
    assert hw.node == 4 and hw.basis == "fitted to launch, product, vector" and "calibrated today" in hw.notes
    report = mindspeed_fx.explain(torch.nn.Linear(8, 8), torch.ones(2, 8), options={"codegen": "eager"})
    assert report.effective_options["hardware"] == name
    assert report.cost.estimate("forward").hardware is hw


def test_names_differ_with_the_constants(directory):
    first, second = table(), table(launch=8e-6)
    assert first.name != second.name
    calibrated.save(first)
    assert detect("cpu")[0] == first.name
    calibrated.save(second)
    assert detect("cpu")[0] == second.name
    assert hardware(second.name).launch == 8e-6


def test_names_differ_with_the_kernels():
    first = table()
    second = dataclasses.replace(first, measured=first.measured[:1])
    assert first.name != second.name


def test_a_file_without_kernels_is_read(directory):
    """Of a version before there were any."""
    path = calibrated.save(dataclasses.replace(table(), measured=()))
    values = json.loads(path.read_text())
    del values["measured"]
    path.write_text(json.dumps(values))
    assert calibrated.read(path).measured == () and hardware(detect("cpu")[0]).measured == ()


def test_a_name_is_found_by_a_process_that_did_not_calibrate(directory):
    path = calibrated.save(table())
    path.rename(path.with_name("another-device.json"))
    assert detect("cpu") == ("cpu", "")
    assert hardware(table().name).launch == 7e-6


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda text: text[: len(text) // 2], "JSONDecodeError"),
        (lambda text: text.replace('"format": 1', '"format": 0'), "another version"),
        (lambda text: text.replace('"base"', '"bass"'), "bass"),
        (lambda text: json.dumps([1]), "AttributeError|TypeError"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(directory, spoil, words):
    path = calibrated.save(table())
    path.write_text(spoil(path.read_text()))
    with pytest.warns(UserWarning, match=f"{path.name}.*({words}).*mindspeed-fx calibrate.*documented table"):
        assert detect("cpu") == ("cpu", "")
    with pytest.raises(ValueError, match=path.name):
        calibrated.read(path)


@pytest.mark.parametrize("path", ["lunch", "matrix", "matrix.a.b", "tiers.infiniband.bandwidth", "tiers.memory.speed"])
def test_a_constant_that_does_not_exist(path):
    with pytest.raises(ValueError, match=f"no constant '{path}'; it has: .*launch"):
        calibrated.with_constants(hardware("cpu"), {path: Constant(1.0, "", "a test", "low")})


def test_every_constant_of_a_table_can_be_replaced():
    for name in ("cpu", "ascend910b2", "h100"):
        hw = hardware(name)
        twice = calibrated.with_constants(
            hw, {path: Constant(2 * c, c.unit, "a test", "low") for path, c in hw.constants().items()}
        )
        assert twice.constants() == {path: 2 * c for path, c in hw.constants().items()}


def test_another_number_of_threads_is_another_device(directory, monkeypatch):
    calibrated.save(table())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 63)
    assert detect("cpu") == ("cpu", "")
