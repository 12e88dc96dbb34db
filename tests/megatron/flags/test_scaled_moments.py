"""``--quant-states``: Adam's moments in 8 bits between steps."""

from __future__ import annotations

import copy
import functools
import io

import pytest
import torch

from mindspeed_fx.megatron import scaled_moments
from mindspeed_fx.megatron.optimizer import MOMENTS, Adam
from mindspeed_fx.megatron.training.optimizer_memory import scale_moments
from tests.megatron.optimizers import bits, build, held_bytes, train

CASES = [(form, name) for form in scaled_moments.BLOCKS for name in scaled_moments.TYPES]


def moments(name, rows=200, columns=77):
    """Of magnitudes that differ from row to row, some of them zero; 77 columns do not divide into blocks."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, generator=generator) * torch.logspace(-9, 2, rows).unsqueeze(1)
    x[3], x[5, :40] = 0, 0
    return x**2 if name == "exp_avg_sq" else x


def kept(form, name, values):
    return scaled_moments.scaled(form, torch.zeros(1), name, values)


def units(form, name, values):
    """One unit in the last place of each number, by the definition of the type: what rounding may change."""
    limits, width = torch.finfo(scaled_moments.TYPES[name]), scaled_moments.BLOCKS[form]
    flat = torch.nn.functional.pad(values.double().flatten(), (0, -values.numel() % width)).view(-1, width)
    largest = flat.abs().amax(1, keepdim=True).clamp(min=1e-30)
    scale = 2.0 ** (limits.max / largest).log2().floor()
    size = (flat.abs() * scale).clamp(min=limits.smallest_normal)
    unit = 2.0 ** size.log2().floor() * limits.eps / scale
    return unit.flatten()[: values.numel()].view_as(values)


@pytest.mark.parametrize("form, name", CASES)
def test_numbers_are_rounded_to_a_neighbour_and_right_on_average(form, name):
    values = moments(name)
    unit, moment, total = units(form, name, values), kept(form, name, values), torch.zeros_like(values).double()
    for step in range(400):
        moment.keep(values, step)
        error = moment.whole().double() - values.double()
        assert (error.abs() <= unit).all()
        total += error
    # The mean of 400 roundings is off by less than 5 of its standard deviations, which are at most unit / 2 / 20. A
    # second moment below the smallest number above zero is that number.
    is_free = values.double() >= unit if name == "exp_avg_sq" else torch.ones_like(values, dtype=torch.bool)
    assert is_free.float().mean() > 0.9 and ((total / 400).abs() <= unit / 8)[is_free].all()


@pytest.mark.parametrize("form, name", CASES)
def test_what_is_kept_is_kept_again(form, name):
    """By a checkpoint, which holds it whole, and by whoever copies it."""
    moment = kept(form, name, moments(name))
    whole = moment.whole()
    for step in range(3):
        again = kept(form, name, whole)
        again.keep(whole, step)
        assert torch.equal(again.whole(), whole)
    buffer = io.BytesIO()
    torch.save({"state": moment}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)["state"]
    assert type(loaded) is torch.Tensor and torch.equal(loaded, whole)
    other = copy.deepcopy(moment)
    other.zero_()
    assert not other.whole().any() and torch.equal(moment.whole(), whole)
    other.copy_(moment)
    assert torch.equal(other.whole(), whole) and type(other) is scaled_moments.ScaledMoment
    plain = torch.empty_like(whole).copy_(moment)
    assert torch.equal(plain, whole) and torch.equal(moment.detach().float(), whole)
    assert torch.equal(moment.view(-1).cpu(), whole.view(-1))


def test_second_moments_stay_above_zero():
    values = torch.cat([torch.ones(1), torch.logspace(-30, -1, 127), torch.zeros(128)])
    moment = kept("fp8", "exp_avg_sq", values)
    for step in range(20):
        moment.keep(values, step)
        assert torch.equal(moment.whole() > 0, values > 0)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_is_seen(bad):
    values = torch.ones(300)
    values[130] = bad
    whole = kept("fp8", "exp_avg", values).whole()
    assert whole[128:256].isnan().all() and whole[:128].isfinite().all() and whole[256:].isfinite().all()


@pytest.mark.parametrize("form, name", CASES)
def test_pieces_are_the_whole(form, name, monkeypatch):
    values = moments(name)
    whole = kept(form, name, values)
    whole.keep(values, 7)
    monkeypatch.setattr(scaled_moments, "AT_ONCE", 1024)
    pieces = kept(form, name, values)
    pieces.keep(values, 7)
    assert torch.equal(pieces.whole(), whole.whole())


def narrow(form, model=None):
    def change(optimizer):
        scale_moments(optimizer, form, [model] if model else [])
        return optimizer

    return change


def inner_of(optimizer):
    return getattr(optimizer, "chained_optimizers", [optimizer])[0].optimizer


@pytest.mark.usefixtures("on_one_rank")
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("form", scaled_moments.BLOCKS)
def test_a_step_is_adams_of_moments_that_are_rounded_behind_it(form, sharded):
    """And a byte and a scale is what a moment takes; a checkpoint goes on bitwise."""
    model, optimizer = build(sharded, narrow(form))
    inner = inner_of(optimizer)
    parameters = [p for group in inner.param_groups for p in group["params"]]
    before = {p: [torch.zeros_like(p), torch.zeros_like(p)] for p in parameters}
    plain_step = inner.step

    def step():
        exact = {p: p.detach().clone() for p in parameters}
        plain_step()
        for group in inner.param_groups:
            (b1, b2), lr, t = group["betas"], group["lr"], group["step"]
            for p in group["params"]:
                m, v = before[p]
                m, v = m.lerp(p.grad, 1 - b1), v * b2 + p.grad**2 * (1 - b2)
                rate = m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + group["eps"])
                torch.testing.assert_close(p.detach(), exact[p] * (1 - lr * group["weight_decay"]) - lr * rate)
                before[p] = [inner.state[p][name].whole() for name in MOMENTS]
                for moment, name, kept_one in zip((m, v), MOMENTS, before[p]):
                    assert ((kept_one - moment).double().abs() <= 1.01 * units(form, name, moment)).all()

    inner.step = step
    train(model, optimizer)
    inner.step = plain_step
    numel = sum(p.numel() for p in parameters)
    held = held_bytes([inner.state[p][name].__dict__ for p in parameters for name in MOMENTS])
    assert 2 * numel <= held <= 2 * (numel * (1 + 1 / scaled_moments.BLOCKS[form]) + 129 * len(parameters))
    saved, weights = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
    expected = train(model, optimizer, first=3)
    if not sharded:  # whose moments a checkpoint holds apart
        again, other = build(sharded, narrow(form))
        again.load_state_dict(weights)
        other.load_state_dict(saved)
        assert train(again, other, first=3) == expected
        assert all(torch.equal(a, b) for a, b in zip(bits(again), bits(model)))


@pytest.mark.usefixtures("on_one_rank")
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_moments_of_embeddings_and_of_the_last_projection_stay_wide(sharded, bf16):
    model, optimizer = build(sharded, bf16=bf16)
    scale_moments(optimizer, "fp8", [model])
    train(model, optimizer, steps=1)
    inner = inner_of(optimizer)
    wide = [p.numel() for p, state in inner.state.items() if type(state["exp_avg"]) is torch.Tensor]
    names = [n for n, _ in model.named_parameters() if "embedding" in n or "output_layer" in n]
    assert len(names) == 2 and sorted(wide) == sorted(p.numel() for n, p in model.named_parameters() if n in names)
    assert len(inner.state) > 10


@pytest.mark.usefixtures("on_one_rank")
@pytest.mark.parametrize("sharded", [False, True])
def test_main_weights_may_be_kept_in_their_own_way(sharded):
    """--reuse-fp32-param changes no bit of a run with --quant-states."""
    from mindspeed_fx.megatron import residual

    results = []
    for change in (lambda o: o, residual.reuse_weights):
        model, optimizer = build(sharded, lambda o, change=change: change(narrow("mxfp8")(o)))
        results.append((train(model, optimizer), bits(model)))
    assert results[0][0] == results[1][0] and all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1]))


def test_training_follows_adams():
    """Rounding to the nearest number would leave second moments where the first steps brought them: after 60 steps of
    gradients of one size they would be below a third of Adam's."""
    torch.manual_seed(0)
    gradients = [torch.randn(4096).sign() for _ in range(60)]
    states = []
    for form in (None, "fp8", "mxfp8"):
        parameter = torch.nn.Parameter(torch.zeros(4096))
        adam = Adam([parameter], lr=1e-3)
        adam.narrowed = form and functools.partial(scaled_moments.scaled, form)
        for gradient in gradients:
            parameter.grad = gradient.clone()
            adam.step()
        states.append((adam.state[parameter]["exp_avg_sq"] + 0.0, parameter.detach()))
    for second, weights in states[1:]:
        assert second.mean().item() == pytest.approx(states[0][0].mean().item(), rel=0.02)
        assert (weights - states[0][1]).norm() <= 0.1 * states[0][1].norm()
    nearest = torch.zeros(4096)
    for gradient in gradients:
        nearest = (nearest * 0.999 + gradient**2 * 1e-3).div(2**-18).to(torch.float8_e5m2).float() * 2**-18
    assert nearest.mean() < states[0][0].mean() / 3
