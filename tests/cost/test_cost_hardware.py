import copy
import dataclasses
import pickle

import pytest

from mindspeed_fx.cost import hardware as module
from mindspeed_fx.cost.device import CONFIDENCES, Constant, fitted_constant
from mindspeed_fx.cost.hardware import detect, hardware, names
from mindspeed_fx.cost.tables import ascend
from mindspeed_fx.errors import OptionError

UNITS = {"FLOP/s", "B/s", "B", "s", ""}


@pytest.mark.parametrize("name", names())
def test_every_constant_has_unit_source_and_confidence(name):
    constants = hardware(name).constants()
    assert len(constants) > 12
    for path, c in constants.items():
        assert c.unit in UNITS and len(c.source) > 3 and c.confidence in CONFIDENCES and c > 0, path
    assert 0 < constants["matrix_efficiency"] <= 1


@pytest.mark.parametrize(
    "given, name",
    [
        ("Ascend910B2", "ascend910b2"),
        ("910b2", "ascend910b2"),
        ("H100", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("Ascend910_9382", "ascend910c"),
        ("Ascend910_9362", "ascend910c20"),
        ("910C", "ascend910c"),
        ("Ascend950", "ascend950pr"),
        ("CPU", "cpu"),
    ],
)
def test_names_as_users_type_them(given, name):
    assert hardware(given).name == name


@pytest.mark.parametrize(
    "given, word", [("ascend910b9", "ascend910b"), ("h2000", "h200"), ("zzz", "valid: ascend910b1"), (3, "valid")]
)
def test_unknown_name_has_the_nearest(given, word):
    with pytest.raises(OptionError, match=word):
        hardware(given)


def test_cube_peaks_are_cores_times_clock():
    peaks = {
        n: round(hardware(n).matrix["bfloat16"] / 1e12, 1)
        for n in ("ascend910b1", "ascend910b2", "ascend910b3", "ascend910b4", "ascend950pr")
    }
    assert peaks == {
        "ascend910b1": 363.7,
        "ascend910b2": 353.9,
        "ascend910b3": 294.9,
        "ascend910b4": 245.8,
        "ascend950pr": 432.5,
    }
    assert round(hardware("ascend910b2").vector["float16"] / 1e12, 1) == 22.1
    assert round(hardware("ascend950pr").vector["float16"] / 1e12) == 54


def test_a_fit_is_as_sure_as_its_spread_is_small():
    assert [fitted_constant(1.0, "s", "a fit", spread).confidence for spread in (0.1, 0.3, 0.31)] == [
        "high",
        "medium",
        "low",
    ]


def test_a_constant_survives_copies_and_is_a_float():
    c = hardware("h200").memory_bandwidth
    for other in (pickle.loads(pickle.dumps(c)), copy.deepcopy(c)):
        assert (other, other.unit, other.source, other.confidence) == (4.8e12, "B/s", c.source, "high")
    assert type(c * 2) is float
    with pytest.raises(ValueError, match="sure"):
        Constant(1.0, "s", "nowhere", "sure")


def test_a_cpu_that_was_not_calibrated_has_the_documented_table():
    assert detect("cpu") == ("cpu", "")


def test_absent_device_says_what_to_do():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    name, reason = detect("cuda")
    assert name is None and "no cuda device" in reason and "hardware" in reason


def test_own_hardware_is_registered(monkeypatch):
    own = dataclasses.replace(hardware("cpu"), name="here")
    with pytest.raises(OptionError):
        hardware("here")
    with pytest.raises(OptionError, match="replace"):
        module.register(hardware("h100"))
    monkeypatch.setattr(module, "_tables", lambda tables=({"cpu": hardware("cpu")}, {}): tables)
    module.register(own)
    assert hardware("HERE") is own


def test_missing_types_are_named():
    assert hardware("ascend910b2").substitute("matrix", "torch.float64") == "float32"
    assert hardware("h100").substitute("matrix", "float64") == "float64"


def test_every_table_is_read():
    """A file in cost/tables/ that hardware.py does not name would be ignored without a word."""
    import pkgutil

    from mindspeed_fx.cost import tables

    assert {m.name for m in pkgutil.iter_modules(tables.__path__)} == set(module.MAKERS)


TORCH_NPU = (
    *("Ascend910PremiumA Ascend910ProA Ascend910A Ascend910ProB Ascend910B".split()),
    *(f"Ascend310P{n}" for n in (1, 2, 3, 4, 5, 7)),
    *(f"Ascend310B{n}" for n in (1, 2, 3, 4)),
    *("Ascend910B1 Ascend910B2 Ascend910B2C Ascend910B3 Ascend910B4 Ascend910B4-1".split()),
    *(f"Ascend910_{n}" for n in (9391, 9392, 9381, 9382, 9372, 9362, 9363)),
    *("Ascend950 Ascend950PR_9579 Ascend950PR_9599 Ascend950DT_9573 Ascend950DT_95A1 Ascend950PR_950z".split()),
)
"""Names in torch_npu's NpuVariables.cpp, and of the 950, where it takes whatever follows, some that its library has."""


@pytest.mark.parametrize("name", TORCH_NPU)
def test_every_name_of_torch_npu_has_hardware(name, recwarn):
    module.substitute_of.cache_clear()
    hw = hardware(name)
    assert hw.target == "npu"
    messages = [str(w.message) for w in recwarn]
    has_none = name in ascend.KNOWN_WITHOUT_TABLE
    assert len(messages) == has_none
    if has_none:
        assert name in messages[0] and f"taken for {hw.name}" in messages[0]


def test_dies_of_the_950_have_their_own_cores_and_memory():
    fast, slow = hardware("Ascend950DT_9571"), hardware("Ascend950DT_9573")
    assert (fast.matrix_cores, hardware("Ascend950PR_9599").matrix_cores) == (28, 36)
    assert fast.memory_bandwidth == pytest.approx(4.0e12)
    assert slow.memory_bandwidth / fast.memory_bandwidth == pytest.approx(1.25 / 1.429)
    assert hardware("Ascend950PR_957b").memory_bandwidth == pytest.approx(
        hardware("atlas350").memory_bandwidth, rel=0.01
    )
    assert hardware("Ascend910B4-1").memory == 2 * hardware("Ascend910B4").memory
    assert not any("_" in n for n in names())


@pytest.mark.parametrize(
    "driver, table",
    [
        ("Ascend950DT_9999", "ascend950dt"),
        ("Ascend910_9999", "ascend910c"),
        ("Ascend910B9", "ascend910b2"),
        ("X1", "ascend910b2"),
    ],
)
def test_an_unknown_npu_says_once_what_it_is_taken_for(driver, table, monkeypatch, recwarn):
    import types

    import torch

    module.substitute_of.cache_clear()
    npu = types.SimpleNamespace(is_available=lambda: True, get_device_name=lambda: driver)
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    assert detect("npu") == detect("npu") == (table, "")
    messages = [str(w.message) for w in recwarn]
    assert len(messages) == 1 and driver in messages[0] and f"taken for {table}" in messages[0]


def test_memory_of_scaled_dies_is_of_low_confidence():
    """Memory of the dies of 950 is scaled from the published ones, which a report should say."""
    assert (
        hardware("ascend950pr_957d").memory_bandwidth.confidence
        == "low"
        == hardware("ascend950dt_9573").memory.confidence
    )
    assert hardware("ascend950pr").memory.confidence == "medium"
