"""Losses and reductions over a divided batch, sequence or vocabulary: values and every gradient of one device, in
float64.

The whole table is ``python -m tests.sharding.divided_losses --write docs/divided_losses.md``.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mindspeed_fx.planning.simulate import simulate
from mindspeed_fx.sharding.plan import ShardingError
from mindspeed_fx.sharding.spmd import aten_rules
from tests.sharding.divided_losses import TOLERANCE, cells
from tests.sharding.loss_cases import CASES
from tests.sharding.loss_model import PLANS, Small, batch, error

WRONG_BEFORE = [
    "mse_loss, mean",
    "huber_loss, mean",
    "nll_loss weight, mean",
    "cross_entropy weight, mean",
    "cross_entropy + mse_loss",
    "batch_norm training",
    "multilabel_soft_margin_loss, mean",
    "multi_margin_loss, mean",
    "logits[mask]",
    "conv1d over the sequence",
    "z-loss over kept tokens",
    "aux loss of a router",  # the two choose as many of one tensor as they say, not as many as the first
    "topk of logits",
    "kthvalue(dim=0)",
]
NOT_ONE_GRAPH = ("ctc_loss", "gaussian_nll_loss", "bincount", "cov, corrcoef")
"""What asks for values while it runs."""
GROUPS = [list(CASES)[i : i + 12] for i in range(0, len(CASES), 12)]


@pytest.mark.parametrize("plan", ["zero2", "tp_sp", "ulysses"])
def test_what_was_wrong(plan):
    assert error(WRONG_BEFORE, plan) <= TOLERANCE


def test_what_stands_before_a_difference_is_divided_as_it_is():
    """Hugging Face's documents in a row are told apart so."""
    assert error(["roll, flip, diff, pad, unfold"], "zero2") <= TOLERANCE


def test_a_gradient_that_is_off_is_seen(monkeypatch):
    """The comparison fails where DTensor runs the loss."""
    from mindspeed_fx.sharding.spmd import program

    monkeypatch.delitem(program.HANDLERS, torch.ops.aten.mse_loss.default)
    monkeypatch.setattr(aten_rules, "TRUSTED", aten_rules.TRUSTED | {"mse_loss"})
    assert error(["mse_loss, mean"], "zero2") > 1e-3


@pytest.mark.parametrize(
    "name, gathers, sums",
    [
        ("mse_loss, mean", 0, 1),
        ("cross_entropy weight, mean", 0, 2),
        ("z-loss over kept tokens", 0, 4),
        ("logsumexp(dim=0)", 0, 4),
    ],
)
def test_divided_values_stay_divided(name, gathers, sums):
    """Of a divided batch the ranks exchange numbers; gathers are those of parameters alone."""
    model = Small([name]).double()
    result = simulate(model, {"dp": 2}, "zero2", *batch())
    assert result.forward["all_gather_into_tensor"] == sum(1 for _ in model.parameters()) + gathers
    assert result.forward["all_reduce"] == sums + 1  # and the sum of squares that every case returns


def test_an_operator_that_is_not_known_runs_whole():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x):
            h = self.linear(x)
            return torch.linalg.svdvals(h).sum() + torch.special.i0(h).mean()

    model, x = Model().double(), torch.randn(4, 4, dtype=torch.double)
    assert not {"linalg_svdvals", "special_i0"} & aten_rules.TRUSTED
    loss = model(x)
    loss.backward()
    result = simulate(model, {"dp": 2}, "zero2", x)
    assert (result.outputs[0] if isinstance(result.outputs, tuple) else result.outputs).sub(loss).abs() < 1e-12
    for name, p in model.named_parameters():
        assert p.grad.abs().max() > 0 and (result.gradients[name] - p.grad).abs().max() <= 1e-10 * p.grad.abs().max()


def test_a_model_of_several_graphs_is_refused_by_name():
    with pytest.raises(ShardingError, match="takes a model that is one graph, and Dynamo breaks this one at"):
        error(["ctc_loss, mean"], "zero2")


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("names", GROUPS, ids=lambda names: names[0])
def test_every_case(names, plan):
    bad = {n: c for n, c in zip(names, cells(names, plan)) if not c.startswith("equal")}
    assert all(c.startswith("refused") and n.startswith(NOT_ONE_GRAPH) for n, c in bad.items()), bad


def test_class_weights_of_every_kind_of_target():
    """A row whose targets are all ignored counts for nothing on the rank that has it."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(6, 8)

        def forward(self, x, y):
            logits = self.linear(x)
            weight = torch.arange(1.0, 9, dtype=x.dtype)
            return (
                F.cross_entropy(logits, y, weight)
                + F.cross_entropy(logits, y, weight, label_smoothing=0.2)
                + F.cross_entropy(logits, logits.detach().softmax(-1), weight)
            )

    model, x, y = Model().double(), torch.randn(4, 6, dtype=torch.double), torch.tensor([-100, -100, 2, 4])
    loss = model(x, y)
    loss.backward()
    result = simulate(model, {"dp": 2}, "zero2", x, y)
    assert (result.outputs[0] if isinstance(result.outputs, tuple) else result.outputs).sub(loss).abs() < 1e-12
    for name, p in model.named_parameters():
        assert (result.gradients[name] - p.grad).abs().max() <= 1e-10 * p.grad.abs().max()
