"""Ring attention with masks, windows, documents and sinks: equal to one device, and as much work on every rank."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_fx.planning.simulate import simulate
from mindspeed_fx.sharding.plan import Boundary, Plan
from mindspeed_fx.sharding.presets import ATTENTION as OPERATORS
from mindspeed_fx.sharding.spmd import block_schedule, ring

ops = torch.ops.mindspeed
CP = {"cp": "S(2)"}
SEQ = 24


def plan(**more):
    return Plan(
        "ring",
        ("cp",),
        inputs={**dict.fromkeys("qkv", CP), **more},
        operators={OPERATORS: Boundary(arguments=dict.fromkeys(("q|query", "k|key", "v|value"), CP), output=CP)},
    )


def positions(length=SEQ):
    return torch.arange(length).unsqueeze(1), torch.arange(length)


def window(q, k, v, sinks, mask):
    return ops.attention(q, k, v, None, True, 0.5, 5)[0]


def prefix(q, k, v, sinks, mask):
    i, j = positions()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(j <= i) | (j < 7), enable_gqa=True)


def documents(q, k, v, sinks, mask):
    i, j = positions()
    return ops.attention(q, k, v, (i // 9 == j // 9).expand(2, 1, SEQ, SEQ), True, 0.5)[0]


def documents_given(q, k, v, sinks, mask):
    """Which token is of which document is an input."""
    return ops.varlen_attention(q, k, v, mask[:, 0, 0].cumsum(-1), None, True, 0.5)[0]


def additive(q, k, v, sinks, mask):
    i, j = positions()
    return ops.attention(q, k, v, torch.where(i - j < 6, -0.1 * (i - j), -torch.inf).to(q.dtype), False, 0.5, 0, 3.0)[0]


def given_mask(q, k, v, sinks, mask):
    return ops.attention(q, k, v, mask, False, 0.5)[0]


def given_mask_of_heads(q, k, v, sinks, mask):
    return ops.attention(q, k, v, torch.cat([mask, mask.flip(3)] * 2, 1), True, 0.5)[0]


def sinks(q, k, v, sinks, mask):
    return ops.attention(q, k, v, None, True, 0.5, 0, 0.0, sinks)[0]


def sinks_in_a_window(q, k, v, sinks, mask):
    return ops.attention(q, k, v, None, True, 0.5, 7, 0.0, sinks)[0]


class Attend(torch.nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend, self.weight, self.sinks = (
            attend,
            torch.nn.Parameter(torch.randn(3, 4, 4, dtype=torch.float64)),
            torch.nn.Parameter(torch.randn(4, dtype=torch.float64)),
        )

    def forward(self, q, k, v, mask):
        q, k, v = (x @ w for x, w in zip((q, k, v), self.weight))
        return self.attend(q, k, v, self.sinks, mask) ** 2


def compared(attend, mesh, planned, seq=SEQ):
    inputs = (
        torch.randn(2, 4, seq, 4, dtype=torch.float64),
        *(torch.randn(2, 2, seq, 4, dtype=torch.float64) for _ in "kv"),
        torch.rand(2, 1, seq, seq) > 0.4,
    )
    inputs[3][0, 0, 3] = False  # a row that sees nothing
    model = Attend(attend)
    expected = model(*inputs)
    expected.sum().backward()
    result = simulate(model, mesh, planned, *inputs)
    torch.testing.assert_close(result.outputs[0], expected, rtol=1e-10, atol=1e-12)
    for name, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(result.gradients[name], p.grad, rtol=1e-10, atol=1e-12)
            assert p.grad.abs().max() > 0
    return result


def several(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "attend, ranks, overhead, computed",
    [
        several(window, 4, 0, 21),
        (prefix, 2, 64, 39),
        several(prefix, 3, 0, 321),
        (documents, 2, 0, 6),
        several(documents, 4, 0, 15),
        several(additive, 2, 0, 49),
        (given_mask, 2, 64, 4),
        several(documents_given, 2, 64, 10),
        several(given_mask_of_heads, 3, 0, 300),
        (sinks, 2, 0, None),
        several(sinks_in_a_window, 2, 0, 21),
    ],
)
def test_equals_one_device(attend, ranks, overhead, computed, monkeypatch):
    """And what a window, or a mask that is known while compiling, empties is not computed: ``computed`` pairs of
    blocks.
    """
    monkeypatch.setattr(block_schedule, "OVERHEAD", overhead)
    made = []
    monkeypatch.setattr(ring, "best", lambda *args: made.append(block_schedule.best(*args)) or made[-1])
    compared(attend, {"cp": ranks}, plan())
    assert [sum(m.work) for m in made] == ([] if computed is None else [computed])


@pytest.mark.slow
def test_beside_a_divided_batch_and_divided_heads():
    both = {"dp": "S(0)", "cp": "S(2)"}
    heads = {"dp": "S(0)", "cp_ring": "S(2)", "cp_ulysses": "S(1)"}
    for mesh, placed, attend in (
        ({"dp": 2, "cp": 2}, both, given_mask),
        ({"dp": 1, "cp_ring": 2, "cp_ulysses": 2}, heads, sinks_in_a_window),
    ):
        inputs = {**dict.fromkeys("qkv", placed), "mask": {"dp": "S(0)"}}
        compared(
            attend,
            mesh,
            Plan(
                "ring",
                tuple(placed),
                inputs=inputs,
                operators={
                    OPERATORS: Boundary(arguments=dict.fromkeys(("q|query", "k|key", "v|value"), placed), output=placed)
                },
            ),
        )


def packed(length, mean, seed):
    """Lengths of documents, drawn from an exponential distribution, that fill ``length``."""
    draw = random.Random(seed)
    ends = []
    while not ends or ends[-1] < length:
        ends.append(min(length, (ends[-1] if ends else 0) + max(1, int(draw.expovariate(1 / mean)))))
    return [n for n, (start, end) in enumerate(zip([0, *ends], ends)) for _ in range(end - start)]


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("length, mean", [(8192, 1024), (32768, 2048), (32768, 8192)])
def test_random_documents_are_balanced(ranks, length, mean):
    rows = length // (ranks * 16)
    for seed in range(4):
        document = packed(length, mean, seed)
        first, last = document[::rows], document[rows - 1 :: rows]
        fine = tuple(tuple(j <= i and last[j] >= first[i] for j in range(ranks * 16)) for i in range(ranks * 16))
        assert block_schedule.best(fine, ranks, rows).imbalance <= 1.05


def test_exchanges_even_out_the_work():
    assert block_schedule._exchange_blocks([0, 0, 1, 1], [3, 3, 1, 1], 2) == [1, 0, 0, 1]


def test_blocks_that_are_nearly_even_stay_where_they_are():
    """The busiest rank has 51 of 50: an even order is there, and moves more blocks."""
    work = [1, 14, 31, 13, 18, 19, 17, 15, 22]
    assert block_schedule.assign_blocks(work, 3) == [0, 2, 0, 1, 1, 1, 0, 2, 2]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**32), st.sampled_from([0.05, 0.3, 0.9]))
def test_schedule(ranks, per_rank, seed, share):
    """Every pair once, from a block that is there; as many pairs, sends and receipts on every rank."""
    draw, n = random.Random(seed), ranks * per_rank
    need = tuple(tuple(draw.random() < share for _ in range(n)) for _ in range(n))
    made = block_schedule.schedule_blocks(need, ranks)
    assert sorted(q for own in made.queries for q in own) == list(range(n)) and {len(own) for own in made.queries} == {
        per_rank
    }
    done = []
    for stage in made.stages:
        assert {len(x) for x in (*stage.messages,)} == {stage.received} and all(
            sum(c[r] for c in stage.counts) == stage.received for r in range(ranks)
        )
        assert len({len(p) for p in stage.pairs}) == 1
        queues = [list(s) for s in stage.messages]
        sent = [
            [
                [source * per_rank + queues[source].pop(0) for _ in range(stage.counts[source][to])]
                for to in range(ranks)
            ]
            for source in range(ranks)
        ]
        for r in range(ranks):
            there = [*range(r * per_rank, (r + 1) * per_rank), *(j for source in range(ranks) for j in sent[source][r])]
            assert all(there[slot] == j for _, slot, j in stage.pairs[r] if j >= 0)
            done += [(made.queries[r][place], j) for place, _, j in stage.pairs[r] if j >= 0]
    assert sorted(done) == [(i, j) for i in range(n) for j in range(n) if need[i][j]]
