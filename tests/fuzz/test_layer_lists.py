"""Programs at random of layers in a list (layer_lists.py), of which Dynamo reads one."""

from __future__ import annotations

import dataclasses
import time

import pytest

from mindspeed_fx.compat import unread_regions
from tests.capture.regions import needs_reuse
from tests.fuzz import __main__, layer_lists, layer_steps
from tests.fuzz.layer_lists import FEATURES, FRAMES, LOOPS, RESULTS, Program

ACTIVATION = next(f for f in FEATURES if f.name == "activation")


@pytest.mark.parametrize("seed", [3, 11, 20, 37])
def test_programs_agree(seed):
    outcome = layer_steps.judge(layer_lists.generate(seed))
    assert outcome.failure is None and outcome.steps == layer_steps.STEPS


def eager(program):
    return list(layer_steps._steps(program, lambda model: model))


@pytest.mark.parametrize("feature", FEATURES, ids=lambda f: f.name)
def test_every_feature_runs_and_every_change_is_one(feature):
    for when, change in [(1, change) for change in feature.changes] or [(0, "pass")]:
        before, after, _ = eager(Program(0, (feature,), ((change, 1, when),)))
        assert not isinstance(before, Exception) and not isinstance(after, Exception), (change, before, after)


@pytest.mark.parametrize(
    "way", [{"loop": k} for k in LOOPS] + [{"results": k} for k in RESULTS] + [{"frame": k} for k in FRAMES]
)
def test_every_way_of_calling_layers_runs(way):
    assert not any(isinstance(s, Exception) for s in eager(dataclasses.replace(Program(0, (), ()), **way)))


def test_one_seed_is_one_program():
    texts = {layer_lists.generate(seed).text() for seed in range(50)}
    assert len(texts) > 45 and layer_lists.generate(7) == layer_lists.generate(7)


@needs_reuse
def test_what_is_not_compared_is_found_and_made_smaller(monkeypatch):
    """Torch guards nothing of a layer that was not read: without what is guarded here, it is as it was."""
    program = dataclasses.replace(
        layer_lists.generate(5), features=(ACTIVATION, FEATURES[1]), changes=(("layer.act = nn.ReLU()", 5, 1),),
        results="tuple", before="tanh", settings=frozenset(),
    )  # fmt: skip
    assert layer_steps.judge(program).failure is None
    monkeypatch.setattr(unread_regions, "_guard_alike", lambda *args: None)
    failure = layer_steps.judge(program).failure
    assert failure.kind == "differs"
    small = layer_steps.shrink(program, failure, 60)
    assert small.features == (ACTIVATION,) and small.results == "tensor" and small.before == "nothing"


def test_the_command(capsys):
    assert __main__.main(["--lists", "--count", "1", "--seed", "3"]) == 0
    assert "seeds 3 to 3" in capsys.readouterr().out
    __main__.main(["--lists", "--show", "--seed", "3"])
    assert "class Layer(nn.Module):" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        __main__.main(["--lists", "--graphs", "--codegen", "inductor"])
    assert "programs of their own" in capsys.readouterr().err


def test_a_compiler_that_does_not_end_is_stopped():
    with pytest.raises(TimeoutError, match="not ended after 0.05 s"), layer_steps.in_time(0.05):
        while True:
            pass
    with layer_steps.in_time(0.05):
        pass
    time.sleep(0.1)  # nothing rings afterwards
