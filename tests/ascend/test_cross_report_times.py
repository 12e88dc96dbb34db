"""The times of a cross report: each with its interval, and with what the device's constants stand on."""

import re

import pytest

from mindspeed_fx.ascend.report import CrossReport
from mindspeed_fx.cost.hardware import hardware
from mindspeed_fx.cost.training import interval_of, modelled_step


def report(device):
    cost = {"hardware": device, "seconds": 0.02, "bytes": 2**20, "flops": 1e9, "kernels": 3, "notes": []}
    side = {"side": "forward", "operators": [], "cost": cost, "nodes": 3, "memory": {"peak": 1, "inputs": 1}}
    graph = {"counts": {}, "skipped": [], "lowered": [], "saved": 0, "sides": [side]}
    values = {
        "soc": device,
        "model": "a model",
        "graphs": [graph],
        "breaks": [],
        "parameters": 1,
        "parameter_bytes": 2,
        "versions": {"torch": "2", "torch_npu": "2"},
        "wall_seconds": 1.0,
        "peak_memory": 1,
        "kernels": {"calls": [], "problem": ""},
        "without_gradient": [],
    }
    return CrossReport(values)


@pytest.mark.parametrize("device, words", [("ascend910b2", "fitted to"), ("ascend950pr", "by data sheet alone")])
def test_the_step_has_an_interval_and_the_device_a_basis(device, words):
    text = str(report(device))
    assert f"cost model: {device}, {words}" in text
    match = re.search(r"modelled time of the step on \w+: 20 ms \(([\d.]+) to ([\d.]+)\)", text)
    low, high = interval_of(hardware(device), "dense")
    assert match and [float(x) for x in match.groups()] == pytest.approx([20 * low, 20 * high], rel=0.01)


def test_a_time_is_shown_in_its_unit():
    assert modelled_step(hardware("h100"), 2.0, 1, "s").startswith("2 s (")
