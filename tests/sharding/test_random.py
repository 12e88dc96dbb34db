"""Operators that draw random numbers, over a divided batch, sequence or width: with one seed on every rank they draw
what one device draws, forward and backward, and leave the generator where one device leaves it.
"""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from mindspeed_fx.planning.simulate import simulate
from tests.sharding.loss_model import PLANS, Small, Values, _error, batch

TOLERANCE = 1e-10


def _drop(h: torch.Tensor) -> torch.Tensor:
    return h + F.dropout(h.tanh() * 2, 0.3)


DRAWS: dict[str, Callable[[Values], Any]] = {
    "rand_like": lambda v: v.h * torch.rand_like(v.h),
    "randn_like": lambda v: v.h + torch.randn_like(v.h.detach()),
    "randint_like": lambda v: v.h * torch.randint_like(v.h.detach(), 1, 5),
    "rand": lambda v: v.h * torch.rand(v.h.shape, dtype=v.h.dtype),
    "randn of a part of the shape": lambda v: v.h + torch.randn(v.h.shape[-1], dtype=v.h.dtype),
    "randint": lambda v: v.h * torch.randint(1, 5, v.h.shape),
    "randperm": lambda v: v.h[:, torch.randperm(v.h.shape[1])],
    "bernoulli of probabilities": lambda v: v.h * torch.bernoulli(v.h.detach().sigmoid()),
    "bernoulli(p)": lambda v: v.h * torch.bernoulli(v.h.detach(), 0.3),
    "bernoulli_ in place": lambda v: v.h * torch.empty_like(v.h).bernoulli_(0.3),
    "bernoulli_ of probabilities in place": lambda v: v.h * torch.empty_like(v.h).bernoulli_(v.h.detach().sigmoid()),
    "uniform_": lambda v: v.h * torch.zeros_like(v.h).uniform_(1, 2),
    "normal_": lambda v: v.h + torch.zeros_like(v.h).normal_(0, 2),
    "exponential_": lambda v: v.h * torch.empty_like(v.h).exponential_(),
    "torch.normal": lambda v: torch.normal(v.h.detach(), v.h.detach().exp()) * v.h,
    "poisson": lambda v: v.h * torch.poisson(v.h.detach().exp()),
    "multinomial": lambda v: v.logits.flatten(0, 1).gather(
        1, torch.multinomial(v.logits.detach().flatten(0, 1).softmax(-1), 2)
    ),
    "gumbel_softmax": lambda v: F.gumbel_softmax(v.logits, 0.7),
    "gumbel_softmax hard": lambda v: F.gumbel_softmax(v.logits, 0.7, hard=True),
    "rrelu": lambda v: F.rrelu(v.h, training=True),
    "dropout": lambda v: F.dropout(v.h, 0.3),
    "dropout before an addition": lambda v: v.h + F.dropout(v.h * 2, 0.3),
    "dropout of a transposed value": lambda v: F.dropout(v.h.transpose(0, 1) * 2, 0.3).transpose(0, 1),
    "dropout of the width first": lambda v: F.dropout(v.h.transpose(1, 2), 0.3),
    "rand_like of a transposed value": lambda v: v.h * torch.rand_like(v.h.detach().transpose(0, 1)).transpose(0, 1),
    "bernoulli_ in place of a transposed value": lambda v: (
        v.h * torch.empty_like(v.h.detach().transpose(0, 1)).bernoulli_(0.3).transpose(0, 1)
    ),
    "dropout of tokens": lambda v: F.dropout(v.h.flatten(0, 1), 0.3),
    "dropout in place": lambda v: F.dropout(v.h * 2, 0.3, inplace=True),
    "rrelu in place": lambda v: F.rrelu(v.h * 2, training=True, inplace=True),
    "alpha_dropout": lambda v: F.alpha_dropout(v.h, 0.3, training=True),
    "feature dropout": lambda v: F.dropout1d(v.h, 0.3),
    "feature dropout of images": lambda v: F.dropout2d(v.h.unflatten(-1, (2, 4)), 0.3),
    "feature_alpha_dropout": lambda v: F.feature_alpha_dropout(v.h, 0.3, training=True),
    "attention with dropout": lambda v: F.scaled_dot_product_attention(
        *[v.h.unflatten(-1, (2, 4)).transpose(1, 2)] * 3, dropout_p=0.3
    ),
    "checkpointed": lambda v: checkpoint(_drop, v.h, use_reentrant=False),
    "checkpointed twice": lambda v: checkpoint(
        lambda h: _drop(checkpoint(_drop, h, use_reentrant=False)), v.h, use_reentrant=False
    ),
    "noise of a router": lambda v: (v.logits + torch.randn_like(v.logits) * F.softplus(v.logits)).topk(2, -1).values,
}
"""Name -> what is drawn from ``v`` (tests/sharding/loss_cases.py)."""


class Drawing(Small):
    def __init__(self, names: list[str]):
        super().__init__([])
        self.cases = [DRAWS[n] for n in names]
        self.modules_of = torch.nn.ModuleList(torch.nn.Identity() for _ in names)


def apart(names: list[str], plan: str, tolerance: float = TOLERANCE, **options: str) -> dict[str, float]:
    """Largest relative difference of each case's result from one device's, of the gradients ("gradient", by all of them
    together) and of the next number that is drawn ("generator")."""
    torch.manual_seed(0)
    model = Drawing(names).double()
    torch.manual_seed(1)
    result = simulate(model, PLANS[plan], plan, *batch(), options=options)
    after = torch.rand(1)
    torch.manual_seed(1)
    outputs = model(*batch())
    left = torch.rand(1)
    torch.autograd.backward([o.sum() for o in outputs if o.requires_grad])
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert result.gradients.keys() == expected.keys() and len(result.outputs) == len(outputs) == len(names) + 1
    differ = {n: _error(a, b) for n, a, b in zip(names, result.outputs, outputs)}
    differ["gradient"] = max(_error(result.gradients[n], g) for n, g in expected.items())
    return {n: d for n, d in differ.items() if d > tolerance} | ({} if torch.equal(after, left) else {"generator": 1.0})


@pytest.mark.parametrize(
    "plan",
    [p if p in ("tp_sp", "ulysses") else pytest.param(p, marks=pytest.mark.slow) for p in PLANS],
)
def test_draws_what_one_device_draws(plan):
    assert not apart(list(DRAWS), plan)


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_checkpointed_regions_draw_again_what_they_drew(codegen):
    names = ["dropout before an addition", "dropout", "checkpointed", "checkpointed twice", "rand_like"]
    assert not apart(names, "zero2+tp_sp", codegen=codegen)


@pytest.mark.parametrize("target", ["cpu", "npu"])
def test_what_is_fused_on_one_device_draws_for_all_ranks(target, monkeypatch):
    """Where no code is generated a dropout and the addition after it are one operator, as attention with dropout is on
    npu (which has no float64): not under a plan, where every rank would draw for its part."""
    monkeypatch.setitem(DRAWS, "attention by hand", lambda v: _attention(v.h.float()).double())
    names = ["dropout before an addition", "attention by hand"]
    assert not apart(names, "zero2+tp_sp", 1e-5, codegen="eager", target=target)


def _attention(h: torch.Tensor) -> torch.Tensor:
    x = h.unflatten(-1, (2, 4)).transpose(1, 2)
    return F.dropout((x @ x.transpose(-1, -2) / 2).softmax(-1), 0.3) @ x
