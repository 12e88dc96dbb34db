"""--optimizer-selection fused_ema_adamw: the average of the weights by its formula, in checkpoints, out of the way."""

from __future__ import annotations

import copy

import pytest
import torch

from mindspeed_fx.megatron import averages
from mindspeed_fx.megatron.averages import averaged, keep_averages
from mindspeed_fx.megatron.optimizer import AVERAGE
from tests.megatron.optimizers import bits, build, train

pytest.importorskip("megatron.core", reason="megatron-core is an optional dependency")
pytestmark = pytest.mark.usefixtures("on_one_rank")
DECAY = 0.25


def kept(sharded, bf16=True, decay=DECAY):
    def keep(optimizer):
        keep_averages(optimizer, decay)
        return optimizer

    model, optimizer = build(sharded, keep, bf16=bf16)
    return model, optimizer, getattr(optimizer, "chained_optimizers", [optimizer])[0].optimizer


def parameters(inner):
    return [p for group in inner.param_groups for p in group["params"]]


@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("sharded", [False, True])
def test_averages_follow_the_formula(sharded, bf16):
    model, optimizer, inner = kept(sharded, bf16)
    expected = {p: p.detach().clone() for p in parameters(inner)}
    plain_step = inner.step

    def step():
        plain_step()
        for group in inner.param_groups:
            decay = min(DECAY, (1 + group["step"]) / (10 + group["step"]))
            assert (decay < DECAY) == (group["step"] < 2)  # the first step forgets faster
            for p in group["params"]:
                expected[p] = decay * expected[p] + (1 - decay) * p.detach()

    inner.step = step
    losses = train(model, optimizer, steps=4)
    assert losses == train(*build(sharded, bf16=bf16), steps=4)  # the average changes nothing of the run
    for p in parameters(inner):
        average = inner.state[p][AVERAGE]
        assert average.dtype == torch.float32 and not torch.equal(average, p)
        torch.testing.assert_close(average, expected[p], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("sharded", [False, True])
def test_the_model_is_the_average_for_a_while(sharded):
    model, optimizer, inner = kept(sharded)
    train(model, optimizer)
    before, masters = bits(model), [p.detach().clone() for p in parameters(inner)]
    with averaged(optimizer):
        assert sum(not torch.equal(a, b) for a, b in zip(bits(model), before)) > len(before) // 2
        for p in parameters(inner):
            assert torch.equal(p, inner.state[p][AVERAGE])
    assert all(torch.equal(a, b) for a, b in zip(bits(model), before))
    assert all(torch.equal(a, b) for a, b in zip(parameters(inner), masters))


def test_a_checkpoint_goes_on_bitwise():
    model, optimizer, inner = kept(False)
    train(model, optimizer)
    saved, weights = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
    losses = train(model, optimizer, first=3)
    again, other, loaded = kept(False)
    again.load_state_dict(weights)
    other.load_state_dict(saved)
    assert train(again, other, first=3) == losses
    for p, q in zip(parameters(inner), parameters(loaded)):
        assert torch.equal(inner.state[p][AVERAGE], loaded.state[q][AVERAGE])


@pytest.mark.parametrize("is_new", [True, False])
def test_the_distributed_optimizers_state_has_the_averages(is_new):
    """Gathered and scattered with the moments, which stay theirs; a state without averages gives the weights."""
    model, optimizer, inner = kept(True)
    part = getattr(optimizer, "chained_optimizers", [optimizer])[0]
    train(model, optimizer)
    names = (AVERAGE, "exp_avg", "exp_avg_sq")
    before = {n: [inner.state[p][n].clone() for p in parameters(inner)] for n in names}
    state = part.get_parameter_state_dp_zero()
    (tensors,) = (t for by_dtype in state.values() if isinstance(by_dtype, dict) for t in by_dtype.values())
    assert all(torch.equal(a, inner.state[p][n]) for n in names for a, p in zip(before[n], parameters(inner)))
    assert not torch.equal(tensors[AVERAGE], tensors["param"]) and not torch.equal(tensors[AVERAGE], tensors["exp_avg"])
    if not is_new:
        del tensors[AVERAGE]
    train(model, optimizer, first=3)
    part.load_parameter_state_from_dp_zero(state)
    for i, p in enumerate(parameters(inner)):
        assert torch.equal(inner.state[p]["exp_avg"], before["exp_avg"][i])
        assert torch.equal(inner.state[p]["exp_avg_sq"], before["exp_avg_sq"][i])
        assert torch.equal(inner.state[p][AVERAGE], before[AVERAGE][i] if is_new else p.detach())


def test_another_packages_optimizer_is_refused():
    _, optimizer = build(False, name="sgd")
    with pytest.raises(ValueError, match="fused_ema_adamw is mindspeed_fx's Adam, .* give --optimizer adam"):
        keep_averages(optimizer, DECAY)


def test_a_checkpoint_of_a_callers_own_optimizer(monkeypatch):
    """One that has no optimizer within, as where a stage trains nothing."""
    saved = []
    monkeypatch.setattr(averages.patches, "original", lambda target: lambda *args, **kwargs: saved.append(args))
    averages.save_checkpoint(1, [], object(), None)
    assert len(saved) == 1
