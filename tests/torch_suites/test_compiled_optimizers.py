"""``torch.compile`` of an optimizer's step: after several steps, parameters and state of the eager optimizer."""

import copy
import warnings

import pytest
import torch
from torch import nn, optim

from tests.torch_suites.torch_programs import assert_equal, compile_inner_step

KINDS = {
    "sgd": (optim.SGD, {"lr": 0.1}),
    "sgd_momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "sgd_maximize_single": (
        optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "maximize": True, "foreach": False},
    ),
    "adam": (optim.Adam, {"weight_decay": 0.1, "amsgrad": True}),
    "adam_foreach": (optim.Adam, {"foreach": True}),
    "adam_tensor_lr": (optim.Adam, {"lr": torch.tensor(0.01), "foreach": False}),
    "adamw": (optim.AdamW, {"foreach": False}),
    "adamw_foreach": (optim.AdamW, {"foreach": True, "weight_decay": 0.1}),
    "nadam": (optim.NAdam, {"foreach": True, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    "radam": (optim.RAdam, {"foreach": True}),
    "adamax": (optim.Adamax, {"foreach": True}),
    "adadelta": (optim.Adadelta, {"foreach": True}),
    "adagrad": (optim.Adagrad, {"lr_decay": 0.1}),
    "rmsprop": (optim.RMSprop, {"centered": True, "momentum": 0.5}),
    "rprop": (optim.Rprop, {"foreach": True}),
    "asgd": (optim.ASGD, {"foreach": True}),
    "adafactor": (optim.Adafactor, {}),
}


QUICK = ("adam_foreach", "adamw", "rprop", "sgd_maximize_single")
"""One of each way of stepping; the others are left out of the default run."""


def models():
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    return model, copy.deepcopy(model)


def differentiate(model, k):
    model.zero_grad()
    (model(torch.linspace(-1, 1, 8, dtype=torch.double).view(2, 4) * (k + 1)) ** 2).sum().backward()


def assert_steps_agree(kind, compile_step, *, scheduler=None, steps=3, tolerance=3e-5):
    make, settings = KINDS[kind]
    first, second = models()
    eager, compiled = (
        make(first.parameters(), **copy.deepcopy(settings)),
        make(second.parameters(), **copy.deepcopy(settings)),
    )
    schedulers = [scheduler(o) for o in (eager, compiled)] if scheduler else []
    step = compile_step(compiled)
    before = [p.detach().clone() for p in second.parameters()]
    for k in range(steps):
        differentiate(first, k)
        differentiate(second, k)
        eager.step()
        step()
        for s in schedulers:
            s.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, second.parameters())), "a parameter did not move"
    # A compiled step takes the bias correction in the type of the step counter, float32.
    assert_equal(list(first.parameters()), list(second.parameters()), "parameters", tolerance)
    for p, q in zip(first.parameters(), second.parameters()):
        assert eager.state[p].keys() == compiled.state[q].keys()
        assert_equal(eager.state[p], compiled.state[q], "state", tolerance)


def of_step(options):
    return lambda optimizer: torch.compile(optimizer.step, backend="mindspeed", options=options)


def of_lambda(options):
    return lambda optimizer: torch.compile(lambda: optimizer.step(), backend="mindspeed", options=options)


@pytest.mark.parametrize("kind", ["adam", "asgd", "adam_tensor_lr"])
def test_inner_step_is_one_graph(kind):
    options = {"level": 2, "codegen": "eager"}
    assert_steps_agree(kind, lambda optimizer: compile_inner_step(optimizer, backend="mindspeed", options=options))


@pytest.mark.parametrize("kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in sorted(KINDS)])
def test_step(kind):
    assert_steps_agree(kind, of_step({"level": 2, "codegen": "eager"}))


@pytest.mark.parametrize("kind", ["sgd_momentum", "adam_tensor_lr"])
def test_step_called_by_a_function_at_level_1(kind):
    assert_steps_agree(kind, of_lambda({"level": 1, "codegen": "eager"}))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adam"])
def test_step_with_generated_code(kind):
    assert_steps_agree(kind, of_step({"level": 2, "codegen": "inductor"}), steps=2)


@pytest.mark.parametrize("kind", ["sgd_momentum"])
def test_step_under_a_schedule(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_steps_agree(
            kind,
            of_step({"level": 2, "codegen": "eager"}),
            scheduler=lambda o: optim.lr_scheduler.ExponentialLR(o, 0.5),
        )


def test_step_without_some_gradients():
    first, second = models()
    eager, compiled = (optim.Adam(m.parameters(), lr=0.1) for m in (first, second))
    step = torch.compile(compiled.step, backend="mindspeed", options={"codegen": "eager"})
    for k in range(3):
        for m in (first, second):
            differentiate(m, k)
            if k == 1:
                m[0].weight.grad = None
        eager.step()
        step()
    assert_equal(list(first.parameters()), list(second.parameters()), "parameters", 3e-5)


def test_a_whole_step_of_training():
    first, second = models()
    eager, compiled = (optim.AdamW(m.parameters(), lr=0.1) for m in (first, second))

    def step(model, optimizer, x):
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    fast = torch.compile(step, backend="mindspeed", options={"codegen": "eager"})
    for k in range(3):
        x = torch.full((2, 4), k + 1.0, dtype=torch.double)
        torch.testing.assert_close(fast(second, compiled, x), step(first, eager, x), rtol=3e-5, atol=3e-5)
    assert_equal(list(first.parameters()), list(second.parameters()), "parameters", 3e-5)
