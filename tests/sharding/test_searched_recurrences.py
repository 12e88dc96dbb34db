"""Searched plans that divide the sequence of models whose operators take it whole: recurrences by heads or channels,
others on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("scipy", reason="the search needs scipy's HiGHS")

import mindspeed_fx
from mindspeed_fx.sharding.plan import Boundary, Plan
from tests.sharding.test_dispatch import checked

ops = torch.ops.mindspeed
VOCAB = 32


class Layer(nn.Module):
    def __init__(self, heads: int, width: int):
        super().__init__()
        self.heads, self.width = heads, width
        size = heads * width
        self.embed, self.out = nn.Embedding(VOCAB, size), nn.Linear(size, VOCAB)
        self.read, self.steps = nn.Linear(size, 3 * size), nn.Linear(size, heads)
        self.decay = nn.Parameter(torch.zeros(heads, 1, 1))

    def forward(self, ids):
        x = self.embed(ids)
        y = self.recur(x, *self.read(x).chunk(3, -1), self.steps(x).sigmoid())
        return F.cross_entropy(self.out(x + y).flatten(0, 1), ids.flatten())

    def by_heads(self, x):
        return x.view(*x.shape[:2], self.heads, self.width)


class DeltaRule(Layer):
    def recur(self, x, q, k, v, steps):
        q, k, v = (self.by_heads(t).transpose(1, 2) for t in (q, k, v))
        rate = steps.transpose(1, 2) * self.decay[..., 0].exp()
        out = ops.gated_delta_rule(q, k, v, -rate, rate, None, self.width**-0.5, 1e-6)[0]
        return out.transpose(1, 2).flatten(2)


class ByChannel(Layer):
    def recur(self, x, q, k, v, steps):
        q, k, v = (self.by_heads(t).transpose(1, 2) for t in (q, k, v))
        rate = steps.transpose(1, 2) * self.decay[..., 0].exp()
        gates = -rate.unsqueeze(-1) * k.sigmoid()
        out = ops.kimi_delta_attention(q, k, v, gates, rate, None, self.width**-0.5, 1e-6)[0]
        return out.transpose(1, 2).flatten(2)


class Dual(Layer):
    def recur(self, x, q, k, v, steps):
        q, k, v = map(self.by_heads, (q, k, v))
        return ops.ssd(v, steps, -self.decay.flatten().exp(), q, k, None, None)[0].flatten(2)


class Scan(Layer):
    """Of channels; what is read and written, two numbers a token, is the same for all of them."""

    def recur(self, x, q, k, v, steps):
        x, rate, q, k = (t.transpose(1, 2) for t in (x * steps.sum(-1, True), v.sigmoid(), q[..., :2], k[..., :2]))
        decay = -self.decay.exp().expand(self.heads, self.width, 2).flatten(0, 1)
        return ops.selective_scan(x, rate, decay, q, k, None, None, None, None, False)[0].transpose(1, 2)


class Sorted(Layer):
    def recur(self, x, q, k, v, steps):
        return q.sort(dim=1)[0] * v + k * steps * self.decay.flatten().exp()


def searched(kind, mesh, heads, width, seq):
    with torch.device("meta"):
        model, ids = kind(heads, width).bfloat16(), torch.zeros(1, seq, dtype=torch.long)
        plan = mindspeed_fx.plan(model, (ids,), mesh=mesh, hardware="ascend910b2", keep=1)
    assert plan.unsupported == [] and plan.refused == {}
    return Plan.from_dict(plan.as_dict())


WHOLE, HEADS, CHANNELS = {"cp": "R"}, {"cp": "S(1)"}, {"cp": "S(2)"}


@pytest.mark.parametrize("kind, name, arguments, result", [
    (DeltaRule, "gated_delta_rule", dict.fromkeys(("q", "k", "v", "g", "beta"), HEADS), "S(2)"),
    (ByChannel, "kimi_delta_attention", dict.fromkeys(("q", "k", "v", "g", "beta"), HEADS), "S(2)"),
    (Dual, "ssd", dict.fromkeys(("x", "dt", "B", "C"), CHANNELS) | {"A": {"cp": "S(0)"}}, "S(1)"),
    (Scan, "selective_scan", {"u": HEADS, "dt": HEADS, "A": {"cp": "S(0)"}, "B": WHOLE, "C": WHOLE}, "S(2)"),
])  # fmt: skip
def test_long_recurrences_are_divided_by_heads(kind, name, arguments, result):
    plan = searched(kind, {"cp": 8}, heads=32, width=64, seq=16384)
    assert plan.operators == {f"mindspeed.{name}": Boundary(arguments=arguments, output={"cp": result})}
    found = checked(kind(4, 4).double(), {"cp": 2}, plan, torch.randint(0, VOCAB, (4, 8)), bound=1e-9)
    assert found.forward["all_to_all_single"] > 0 and not found.whole


@pytest.mark.parametrize("kind, result", [(DeltaRule, {"cp": "S(2)"}), (Sorted, None)])
def test_what_no_head_divides_is_computed_whole_and_goes_on_in_parts(kind, result):
    """One head, and an operator of ATen's, whose result the next one takes in parts."""
    plan = searched(kind, {"cp": 2}, heads=1, width=64, seq=512)
    assert plan.operators == ({} if result is None else {"mindspeed.gated_delta_rule": Boundary(output=result)})
    checked(kind(1, 8).double(), {"cp": 2}, plan, torch.randint(0, VOCAB, (4, 8)), bound=1e-9)


@pytest.mark.parametrize("kind", [DeltaRule, ByChannel, Dual, Scan])
def test_beside_tensor_parallelism(kind):
    plan = searched(kind, {"cp": 8, "tp": 2}, heads=32, width=64, seq=16384)
    checked(kind(4, 4).double(), {"cp": 2, "tp": 2}, plan, torch.randint(0, VOCAB, (4, 8)), bound=1e-9)


class Mixer(nn.Module):
    """Has parameters of its own, which an operator reads inside."""

    def __init__(self, heads: int, width: int):
        super().__init__()
        self.heads, size = heads, heads * width
        self.read, self.steps, self.write = nn.Linear(size, 3 * size), nn.Linear(size, heads), nn.Linear(size, size)
        self.decay, self.skip, self.shift = (nn.Parameter(torch.full((heads,), n)) for n in (0.0, 1.0, 0.5))

    def forward(self, x):
        q, k, v = (t.reshape(*x.shape[:2], self.heads, -1) for t in self.read(x).chunk(3, -1))
        out = ops.ssd(v, F.softplus(self.steps(x) + self.shift), -self.decay.exp(), q, k, self.skip, None)[0]
        return self.write(out.flatten(2))


class Mixed(nn.Module):
    def __init__(self, heads: int, width: int):
        super().__init__()
        self.embed, self.out = nn.Embedding(VOCAB, heads * width), nn.Linear(heads * width, VOCAB)
        self.mixers = nn.ModuleList(Mixer(heads, width) for _ in range(2))

    def forward(self, ids):
        x = self.embed(ids)
        for mixer in self.mixers:
            x = x + mixer(x)
        return F.cross_entropy(self.out(x).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("mesh, small", [({"tp": 8}, {"tp": 2}), ({"cp": 2, "tp": 4}, {"cp": 2, "tp": 2})])
def test_what_goes_on_inside_a_module_is_not_placed_at_its_edges(mesh, small):
    plan = searched(Mixed, mesh, heads=32, width=64, seq=4096)
    inside = [name for name, edge in plan.modules.items() if name in ("mixers.0", "mixers.1", "mixers.*")]
    assert inside == []
    checked(Mixed(4, 4).double(), small, plan, torch.randint(0, VOCAB, (4, 8)), bound=1e-9)
