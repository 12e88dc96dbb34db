"""What it costs to compute a value once more."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from mindspeed_fx.passes.recompute.problem.pointwise_costs import FUSED, KEEP, _again


@dataclass(frozen=True)
class Stored:
    bytes: int


@dataclass
class Once:
    outputs: list
    inputs: list = field(default_factory=list)
    fusible: bool = True
    node: object = field(default_factory=lambda: SimpleNamespace(op="call_function", target=None, meta={}))


@pytest.fixture(autouse=True)
def pure(monkeypatch):
    from mindspeed_fx.passes.recompute.problem import pointwise_costs

    monkeypatch.setattr(pointwise_costs.partitioner, "is_pure", lambda node: True)


def test_what_is_read_far_away_is_kept_as_well():
    x, y = Stored(100), Stored(10)
    near = _again(Once([x, y]), {x: False, y: True}, set())
    assert near == pytest.approx(100 * FUSED + 10)
    assert _again(Once([x, y]), {x: False, y: True}, {x}) == pytest.approx(near + KEEP * 100)


def test_a_reduction_costs_what_it_reads():
    x = Stored(10)
    assert _again(Once([x], [Stored(1000)]), {x: True}, {x}) == 1000
    assert _again(Once([x], fusible=False), {x: True}, set()) == float("inf")
