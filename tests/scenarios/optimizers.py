"""Optimizers of torch: steps of a compiled model, and the step itself compiled."""

from __future__ import annotations

from typing import Any

import torch

from tests.scenarios.hooks import Stack, batch
from tests.scenarios.table import scenario

KINDS: dict[str, dict[str, Any]] = {
    "SGD": dict(lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": dict(lr=1e-3, amsgrad=True),
    "AdamW": dict(lr=1e-3, weight_decay=0.1),
    "Adagrad": dict(lr=1e-2),
    "Adadelta": dict(lr=0.5),
    "Adamax": dict(lr=1e-3),
    "NAdam": dict(lr=1e-3, momentum_decay=0.004),
    "RAdam": dict(lr=1e-3),
    "RMSprop": dict(lr=1e-3, centered=True, momentum=0.9),
    "ASGD": dict(lr=1e-2),
    "Rprop": dict(lr=1e-3),
    "Adafactor": dict(lr=1e-2),
    "Muon": dict(lr=1e-2),
}


def smooth(model: torch.nn.Module) -> list[torch.Tensor]:
    """Gradients that do not depend on the backend, so that signs of small ones cannot differ."""
    parameters = [p for p in model.parameters() if p.ndim == 2]
    for i, p in enumerate(parameters):
        p.grad = torch.cos(p.detach() * 3 + i) + 0.1
    return parameters


@scenario("torch.optim/compiled/{}", KINDS)
def run_compiled_step(run: Any, kind: str) -> Any:
    model = Stack(1)
    parameters = smooth(model)
    optimizer = getattr(torch.optim, kind)(parameters, **KINDS[kind])
    step = run.compile(lambda: optimizer.step())
    for _ in range(3):
        smooth(model)
        step()
    return {"weights": dict(model.named_parameters())}


@scenario("torch.optim/compiled_with_schedule")
def run_schedule(run: Any) -> Any:
    model = Stack(1)
    optimizer = torch.optim.AdamW(smooth(model), lr=torch.tensor(1e-2), capturable=False)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)

    def advance() -> None:
        optimizer.step()
        schedule.step()

    step = run.compile(advance)
    for _ in range(3):
        smooth(model)
        step()
    return {"weights": dict(model.named_parameters())}


@scenario("torch.optim/compiled_groups_and_clip")
def run_groups(run: Any) -> Any:
    model = Stack(1)
    parameters = smooth(model)
    groups = [dict(params=parameters[:2], lr=1e-2), dict(params=parameters[2:], weight_decay=0.1)]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)

    def advance() -> torch.Tensor:
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return norm

    step, norms = run.compile(advance), []
    for _ in range(3):
        smooth(model)
        norms.append(step().clone())
    return {"norms": norms, "weights": dict(model.named_parameters())}


@scenario("torch.optim/whole_step_compiled")
def run_whole_step(run: Any) -> Any:
    """Forward, backward and optimizer in one function."""
    model, x = Stack(1), batch()[0]
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def advance(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = run.compile(advance)
    return {"losses": [step(x).clone() for _ in range(3)], "weights": dict(model.named_parameters())}


@scenario("torch.optim/lbfgs")
def run_lbfgs(run: Any) -> Any:
    torch.set_default_dtype(torch.float64)
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)), torch.randn(6, 8)
    compiled = run.compile(model)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = compiled(x).square().mean()
        loss.backward()
        return loss

    return {"losses": [optimizer.step(closure) for _ in range(2)]}


@scenario("torch.optim/compiled_autograd")
def run_compiled_autograd(run: Any) -> Any:
    model, x = Stack(1), batch()[0]
    with torch._dynamo.config.patch(compiled_autograd=run.name is not None):
        losses = []
        compiled = run.compile(model)

        def advance(x: torch.Tensor) -> torch.Tensor:
            loss = compiled(x).square().mean()
            loss.backward()
            return loss

        step = run.compile(advance)
        for _ in range(2):
            losses.append(step(x).detach())
    return {"losses": losses, "gradients": {n: p.grad for n, p in model.named_parameters()}}
