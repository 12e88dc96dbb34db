"""What was left, ranked by what it would gain: by the cost model's times, not by the order of passes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mindspeed_fx.report.gains import Gain, gains
from mindspeed_fx.report.modelled import estimates
from mindspeed_fx.report.what_if import Variant, WhatIf
from tests.models import Llama, explain, tokens

WEIGHTS, DIMENSIONS = "the attention weights leave", "the mean square is taken over dimensions"


class Attention(nn.Module):
    """Attention that cannot be fused, because its weights are returned."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = (y.view(2, -1, 4, 8).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        weights = (q @ k.transpose(-1, -2) / 8**0.5).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2), weights


class Norm(nn.Module):
    """A norm that cannot be fused, because it is taken over rows."""

    def __init__(self, hidden):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6) * self.weight


class Both(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.norm, self.attention, self.out = Norm(hidden), Attention(), nn.Linear(32, 32)

    def forward(self, x, wide):
        y, weights = self.attention(x)
        return self.out(y).sum() + self.norm(wide).sum(), weights


def report_of(seq, rows, hidden):
    torch._dynamo.reset()
    torch.manual_seed(0)
    return explain(Both(hidden), torch.randn(2, seq, 32), torch.randn(2, rows, hidden), hardware="cpu")


@pytest.mark.parametrize("sizes, order", [((64, 4, 8), [WEIGHTS, DIMENSIONS]), ((4, 256, 512), [DIMENSIONS, WEIGHTS])])
def test_the_larger_gain_is_named_first(sizes, order):
    report = report_of(*sizes)
    rows = report.gains
    assert [next(words for words in order if row.reason.startswith(words)) for row in rows] == order
    assert rows[0].seconds > rows[1].seconds > 0 and all(row.is_bound for row in rows)
    head = " ".join(str(report).partition("\n\n")[0].split())
    assert f"most to gain, modelled: at most {rows[0].seconds * 1e3:.4g} ms" in head and order[0] in head
    assert [row["reason"] for row in report.to_dict()["gains"]] == [row.reason for row in rows]


def test_a_fusions_gain_is_its_kernels_less_one_forward_and_one_backward():
    """Of the kernels that take part (products with weights and other modules do not), by hand."""
    report = report_of(256, 4, 8)
    known = estimates(report.graphs[0])
    taken = 0.0
    for stage in ("forward", "backward"):
        products = ("aten.mm", "aten.addmm")
        mine = [n for n in known[stage].nodes if n.module == "attention" and n.operator not in products]
        assert {"aten.bmm"} < {n.operator for n in mine}
        taken += sum(n.seconds for n in mine)
    (gain,) = [g for g in report.gains if g.reason.startswith(WEIGHTS)]
    hardware = known["forward"].hardware
    flops = sum(n.cost.flops for s in ("forward", "backward") for n in known[s].nodes if n.operator == "aten.bmm")
    assert flops == 6 * 2 * 2 * 4 * 256 * 256 * 8
    weights = 2 * 4 * 256 * 256 * 4  # bytes: they leave the graph, and their gradient may come in
    least = 2 * float(hardware.launch) + max(
        weights / hardware.memory_rate, flops / 3 / hardware.matrix_rate("float32")
    )
    assert 0.4 * taken < gain.seconds <= taken - least


def test_what_is_all_fused_has_nothing_to_gain():
    torch._dynamo.reset()
    report = explain(Llama(layers=1), *tokens(), hardware="cpu")
    assert report.skipped("fusion.linear_cross_entropy") and report.gains == []  # it would buy memory with time
    assert "most to gain" not in str(report)


def test_forms_of_the_step_are_ranked_beside_what_was_left():
    report = report_of(64, 4, 8)
    base = Variant("base", "2", seconds=1.0)
    forms = [
        Variant("level", "1", seconds=1.5),
        Variant("without", "norms", seconds=0.75),
        Variant("batch", "4", seconds=0.1),
        Variant("level", "0", error="it failed"),
    ]
    record = dataclasses.replace(report.graphs[0], what_if=WhatIf(base, forms))
    rows = gains([record])
    assert rows[0] == Gain('"disable" of norms', "modelled by what_if", 0.25, False)
    assert rows[1:] == report.gains


@pytest.fixture
def two_ranks():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_what_overlap_left_gains_the_time_that_is_exposed(two_ranks):
    from torch.distributed._functional_collectives import all_reduce

    def step(x, w):
        return all_reduce(x @ w, "sum", dist.group.WORLD) @ w

    torch._dynamo.reset()
    inputs = torch.randn(256, 256), torch.randn(256, 256)
    report = explain(step, *inputs, hardware="ascend910b2", disable=["overlap.decompose"])
    exposed = sum(s for lanes in report.graphs[0].lanes.values() for s in lanes.exposed.values())
    left = {s.reason for n in report.counts if n.startswith("overlap.") for s in report.skipped(n)}
    assert left and exposed > 0
    assert {g.reason for g in report.gains} == left and all(g.seconds == exposed for g in report.gains)
