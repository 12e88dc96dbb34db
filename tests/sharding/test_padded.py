"""Operators on padded values, batch and sequence at once, as on one device: what runs on what is stored, and what gets
the whole."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from mindspeed_fx.planning.simulate import simulate
from mindspeed_fx.sharding.plan import Plan
from mindspeed_fx.sharding.spmd.padded_views import parted_later
from tests.sharding.test_any_model import BODIES, Model, equal

BOTH = Plan("both", ("dp", "cp"), inputs={"*": {"dp": "S(0)", "cp": "S(1)"}}, keep_whole=True)
MESH = {"dp": 2, "cp": 2}


def elementwise(m, x):
    below = torch.tril(torch.ones(x.shape[1], 8)).bool()
    more = x.new_full((x.shape[1], 8), 0.5)
    return (
        x.masked_fill(below, 0.25) + torch.where(x > 0, x, x.exp()) * (x.square() + 1e-3).log() / (x.abs() + 0.1) + more
    )


def in_place(m, x):
    y = x.sin()
    y += x
    y[:, 0] = 0.3
    y.mul_(2.0)
    return y + x


def reductions(m, x):
    return x.mean((0, 1)) + x.sum(1, keepdim=True) + x.amax(0) + x.std(1, keepdim=True) + x.norm(dim=-1, keepdim=True)


def along(m, x):
    return x.softmax(1) + x.log_softmax(-1) + x.logsumexp(1, keepdim=True) + x.cumsum(1) + x.flip(0) + x.roll(1, 1)


def orders(m, x):
    return x.topk(3, -1).values.sum(-1, keepdim=True) * x + x.max(1, keepdim=True).values + x.sort(1).values


def views(m, x):
    rows = m.norm(x.reshape(-1, 8))
    joined = x.permute(1, 0, 2).reshape(x.shape[1], -1).sum(-1)
    return rows.view(x.shape[0], -1, 2, 4).flatten(2) + rows.view(x.shape) + joined.view(1, -1, 1) + x.flatten()[:8]


def parts(m, x):
    a, b = x.chunk(2, -1)
    return torch.cat((b, a), -1) + x[:, :1] + x[:, -1:] * x[..., 1:2] + F.pad(x, (0, 0, 1, 0))[:, :-1]


def stacked(m, x):
    longer = torch.cat((x, x.sin()), 1).sum(1, keepdim=True)
    return longer + torch.stack((x, x.cos()), 2).sum(2) + x.unsqueeze(2).expand(-1, -1, 3, -1).mean(2)


def products(m, x):
    scores = (x @ x.transpose(1, 2)).softmax(-1) @ x
    return scores + torch.einsum("bsh,bth->bst", x, x).tanh() @ x + x.transpose(1, 2).matmul(x).sum(1, keepdim=True)


def attention(m, x):
    q = x.unflatten(-1, (2, 4)).transpose(1, 2)
    causal = F.scaled_dot_product_attention(q, q.sin(), q.cos(), is_causal=True)
    return (causal + F.scaled_dot_product_attention(q, q, q)).transpose(1, 2).flatten(2)


def losses(m, x):
    target = x.detach()
    total = (
        F.mse_loss(x, target * 0.5) + F.smooth_l1_loss(x, target * 0.1) + F.cross_entropy(x[0], target[0].argmax(-1))
    )
    shifted = F.cross_entropy(x[:, :-1].flatten(0, 1), target[:, 1:].argmax(-1).flatten())
    weighted = F.binary_cross_entropy_with_logits(x, target.sigmoid(), reduction="sum")
    return x * (total + shifted + weighted) + F.l1_loss(x, target.sin(), reduction="none")


def taken(m, x):
    at = torch.zeros(*x.shape[:2], 2, dtype=torch.long)
    return x.gather(-1, at).sum(-1, keepdim=True) * x + x.index_select(1, torch.tensor([0, 1])).sum(1, keepdim=True)


def longer(m, x):
    return x.repeat_interleave(2, 1)[:, ::2] + x.repeat(1, 2, 1)[:, : x.shape[1]]


def regions(m, x):
    def inner(t):
        return t.sin() * m.table, t.cos()

    def outer(t):
        a, b = torch.utils.checkpoint.checkpoint(inner, t, use_reentrant=False)
        return m.norm(a) + b

    return torch.utils.checkpoint.checkpoint(outer, x, use_reentrant=False)


def written_through_views(m, x):
    y = x.clone()
    y.transpose(1, 2)[:, 0] = 0.5
    y.flatten(1)[:, :9].mul_(2.0)
    return y + x


def scattered(m, x):
    y = x.clone()
    y.scatter_(1, torch.zeros(1, 1, 8, dtype=torch.long), 0.5)
    y.index_fill_(1, torch.tensor([1]), 0.25)
    return y.cumsum_(1) + x


OWN = (
    *(elementwise, in_place, reductions, along, orders, views, parts, stacked, products, attention, losses, taken),
    *(longer, regions, scattered, written_through_views),
)


@pytest.mark.parametrize(
    "body", [*OWN, *(pytest.param(b, marks=pytest.mark.slow) for b in BODIES)], ids=lambda f: f.__name__
)
def test_equals_one_device(body):
    result = equal(Model(body), MESH, BOTH, torch.randn(3, 7, 8, dtype=torch.float64))
    assert len(result.padded) == 2


@pytest.mark.parametrize("body", [lambda m, x: F.dropout(x, 0.3), lambda m, x: x * torch.rand_like(x)])
def test_what_is_drawn_is_what_one_device_draws(body):
    model, x = Model(body), torch.randn(3, 7, 8, dtype=torch.float64)
    torch.manual_seed(7)
    loss = model(x)
    loss.backward()
    torch.manual_seed(7)
    result = simulate(model, MESH, BOTH, x)
    assert (result.outputs[0] - loss).abs() <= 1e-10 * loss.abs()
    for name, p in model.named_parameters():
        if p.grad is not None:
            assert (result.gradients[name] - p.grad).abs().max() <= 1e-10 * p.grad.abs().max(), name


def test_zeros_behind_weights_make_no_number_that_is_not_finite():
    """Columns that are padding are zero, and their logarithm and root are not finite."""

    class Roots(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = torch.nn.Linear(8, 11, bias=False), torch.nn.Linear(11, 8, bias=False)

        def forward(self, x):
            y = self.fc1(x).square()
            return self.fc2(y.sqrt() + y.log() + 1 / y).square().mean()

    model, x = Roots().double(), torch.randn(4, 8, dtype=torch.float64) + 1
    result = equal(model, {"tp": 2}, "tp", x)
    assert result.whole == [] and len(result.padded) == 1


def test_norm_of_a_sum_over_ranks_leaves_no_uneven_rows():
    """A norm after a product by rows, before the padded residual: neither its batch nor its sequence is even."""

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.post = torch.nn.RMSNorm(32), torch.nn.Parameter(torch.randn(32))
            self.up, self.down = torch.nn.Linear(32, 64, bias=False), torch.nn.Linear(64, 32, bias=False)

        def forward(self, x):
            y = self.down(self.up(self.norm(x)).tanh())
            return (x + y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.post)).square().mean()

    weights = {"up.weight": {"tp": "S(0)"}, "down.weight": {"tp": "S(1)"}}
    plan = Plan("rows", ("tp",), weights, inputs={"*": {"tp": "S(1)"}}, keep_whole=True)
    equal(Block().double(), {"tp": 2}, plan, torch.randn(3, 11, 32, dtype=torch.float64))


def test_what_a_view_makes_of_a_dimension_begins_with_the_outer_one():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, 12, device="meta")
    view = graph.call_function(torch.ops.aten.view.default, (x, [4, 1, 3, 4]))
    view.meta["val"] = x.meta["val"].view(4, 1, 3, 4)
    assert parted_later(x) == {1: 3}
