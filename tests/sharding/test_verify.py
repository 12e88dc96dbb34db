"""No plan sends more than it needs: read off the program that one rank compiles, and shown to the user."""

from __future__ import annotations

import copy
import json
import math
import re
from collections import Counter
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

import mindspeed_fx
from mindspeed_fx.passes.sharding.verify import forward_of
from mindspeed_fx.sharding.audit.gather_layout import Layout
from mindspeed_fx.sharding.audit.replicated_backward import grown
from mindspeed_fx.sharding.plan import Boundary, Plan
from tests.sharding.llama import Llama
from tests.sharding.test_divided_loss import Head, batch

LAYERS, BATCH, SEQ, HIDDEN, HEADS, KV, FFN, VOCAB = 2, 4, 16, 32, 4, 4, 64, 64


@pytest.fixture
def verified():
    """``verified(plan, mesh, rank)``: near misses and notes of the pass, in a process group that sends nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def run(plan, sizes, rank=0, model=None, args=None, **options):
        world = 1
        for n in sizes.values():
            world *= n
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        made = mindspeed_fx.parallelize(
            copy.deepcopy(model or Llama(LAYERS, HIDDEN, HEADS, KV, FFN, VOCAB)),
            init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes)),
            plan,
        )
        report = mindspeed_fx.explain(
            made,
            *(torch.zeros(2, BATCH, SEQ, dtype=torch.long) if args is None else args),
            options={"codegen": "eager", **options},
        )
        dist.destroy_process_group()
        runs = [r.report for g in report.graphs for r in g.runs if r.report.name == "sharding.verify"]
        assert len(runs) == 1
        return runs[0]

    yield run
    if dist.is_initialized():
        dist.destroy_process_group()


def several(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "plan,mesh",
    [
        several("tp", {"tp": 2}),
        several("tp_2d", {"tp_x": 2, "tp_y": 2}),
        ("tp_sp", {"tp": 2}),
        several("ulysses", {"cp": 2}),
        several("ring", {"cp": 4}),
        several("kv_allgather", {"cp": 2}),
        several("hybrid", {"cp_ring": 2, "cp_ulysses": 2}),
        several("zero1", {"dp": 2}),
        several("zero2", {"dp": 2}),
        several("zero3", {"dp": 2}),
        several("zero3+tp_sp", {"dp": 2, "tp": 2}),
        several("zero2+ulysses", {"dp": 2, "cp": 2}),
        several("zero2+ring+tp", {"dp": 2, "cp": 2, "tp": 2}),
    ],
)
def test_named_plans_send_no_more_than_they_need(verified, plan, mesh):
    """And of the collectives of a layer there are as many, of as many bytes, as the plan's own arithmetic says."""
    report = verified(plan, mesh)
    assert not report.skipped and any("none of them redundant" in n for n in report.notes)
    assert any("operators of the backward compared" in n and not n.startswith("0 ") for n in report.notes)
    drawing = report.files["plan.svg"]
    assert (
        ElementTree.fromstring(drawing).tag.endswith("svg") and "q_proj" in drawing and drawing.count("down_proj") == 1
    )
    if plan in LEAST:
        made = json.loads(report.files["collectives.json"])
        for backward in (False, True):
            found = Counter((m["kind"], m["bytes"]) for m in made if m["backward"] == backward and m["bytes"] > 32)
            per_layer = Counter(LEAST[plan](next(iter(mesh.values())), backward))
            assert {k: n for k, n in found.items() if k in per_layer} == {
                k: LAYERS * n + OUTSIDE.get((plan, backward, k[0]), 0) for k, n in per_layer.items()
            }


@pytest.mark.parametrize("smoothing, softcap, numbers", [(0.1, 0.0, 3), (0.0, 2.0, 2)])
def test_a_divided_loss_sends_as_many_numbers_as_it_needs(verified, smoothing, softcap, numbers):
    """Two sums a token, with smoothed labels three; a soft-cap is none of them."""
    model = Head(smoothing=smoothing, softcap=softcap)
    report = verified("tp", {"tp": 2}, model=model, args=batch(), enable=["fusion.linear_cross_entropy"])
    assert not report.skipped
    made = [m for m in json.loads(report.files["collectives.json"]) if not m["backward"]]
    assert numbers * 10 * 4 in [m["bytes"] for m in made]
    counts = next(n for n in report.notes if n.startswith("forward"))
    sent, needed = (float(x) for x in re.findall(r"([\d.e-]+) MiB", counts)[:2])
    assert sent == pytest.approx(needed, abs=32 / 2**20)


TOKENS = BATCH * SEQ * HIDDEN * 4
"""Bytes of the activation between layers; queries, keys, values and results of attention have as many."""
LEAST = {
    "tp": lambda n, backward: 2 * [("all_reduce", TOKENS)],
    "tp_sp": lambda n, backward: 2 * [("all_gather", TOKENS // n), ("reduce_scatter", TOKENS)],
    "ulysses": lambda n, backward: 4 * [("all_to_all", TOKENS // n)],
    # Keys and values n - 1 times, their gradients once more; to chunks that balance and back.
    "ring": lambda n, backward: (
        (n - 1 + n * backward) * [("all_to_all", 2 * TOKENS // n)]
        + [("all_to_all", 3 * TOKENS // n), ("all_to_all", TOKENS // n)]
    ),
}
OUTSIDE = {
    ("tp", False, "all_reduce"): 1,
    ("tp", True, "all_reduce"): 1,
    **{("tp_sp", back, kind): 1 for back in (False, True) for kind in ("all_gather", "reduce_scatter")},
}
"""Forward the embedding's sum and the head's input, backward their mirror images."""


class Mean(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.a, self.inner = torch.nn.Linear(8, 8, bias=False), inner

    def forward(self, x):
        y = self.a(x).square()
        return (y.mean(self.inner) if self.inner is not None else y).mean()


@pytest.mark.parametrize("inner", [None, 0, (0, 2)])
def test_the_gradient_of_a_mean_is_computed_in_parts(verified, inner):
    assert not verified("zero2", {"dp": 2}, model=Mean(inner), args=[torch.randn(4, 16, 8)]).skipped
    model, x = Mean(inner).double(), torch.randn(4, 16, 8, dtype=torch.double)
    if dist.is_initialized():
        dist.destroy_process_group()
    model(x).backward()
    found = mindspeed_fx.simulate(model, {"dp": 2}, "zero2", x)
    assert (found.outputs[0] - model(x)).abs() <= 1e-10 * model(x).abs()
    assert (found.gradients["a.weight"] - model.a.weight.grad).abs().max() <= 1e-10 * model.a.weight.grad.abs().max()


# --------------------------------------------------------------------------- what it finds


class Redone(torch.nn.Module):
    """A plan that gathers and parts again is caught: the edge of ``a`` makes whole what the edge of ``b`` wants in
    parts.
    """

    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)

    def forward(self, x, y):
        return self.b(self.a(x)).square().sum()


def test_a_gather_that_is_undone_is_found(verified):
    whole_between = Plan(
        "between",
        ("cp",),
        inputs={"*": {"cp": "S(1)"}},
        modules={"a": Boundary(output={"cp": "R"}), "b": Boundary(input={"cp": "S(1)"})},
    )
    report = verified(whole_between, {"cp": 2}, model=Redone(), args=torch.randn(2, 4, 6, 8))
    assert any("reads its own part alone" in s.reason and s.module == "a" for s in report.skipped)


def test_what_becomes_whole_unasked_is_found(verified):
    """The plan divides rows, and a running sum along them needs all: they are gathered, and every rank computes it
    alike.
    """

    class Along(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Linear(8, 8, bias=False)

        def forward(self, x, y):
            return (torch.cumsum(self.a(x), 1) * x).sum()

    report = verified(
        Plan("rows", ("cp",), inputs={"*": {"cp": "S(1)"}}), {"cp": 2}, model=Along(), args=torch.randn(2, 4, 6, 8)
    )
    assert any("computed whole" in s.reason and "cumsum" in s.operator for s in report.skipped)


@pytest.mark.parametrize("whole", [True, False])
def test_a_gradient_that_becomes_whole_unasked_is_found(whole):
    """A rank's joint graph: rows divided by two in the forward, and gathered before the product of the gradient."""
    graph = torch.fx.Graph()

    def node(target, *args, rows=4, number=None):
        made = graph.placeholder(target) if isinstance(target, str) else graph.call_function(target, args)
        made.meta.update({"val": torch.empty(rows, 8), **({"seq_nr": number} if number is not None else {})})
        return made

    x, tangent = node("primals_1"), node("tangents_1")
    out = node(torch.ops.aten.mul.Tensor, x, x, number=3)
    rows = 8 if whole else 4
    given = [node(torch.ops.aten.cat.default, [t, t], rows=rows, number=3) if whole else t for t in (tangent, x)]
    product = node(torch.ops.aten.mul.Tensor, *given, rows=rows, number=3)
    own = node(torch.ops.aten.slice.Tensor, product, 0, 0, 4, number=3)
    graph.output((out, own))
    gm = torch.fx.GraphModule({}, graph)
    assert grown(gm, forward_of(gm), 2) == ([(product, 2.0)] * whole, 1)


# --------------------------------------------------------------------------- where elements go


def elements(layout):
    found = torch.tensor(layout.offset)
    for d in layout.dims:
        own = torch.zeros((), dtype=torch.long)
        for n, s in d:
            own = own.unsqueeze(-1) + torch.arange(n) * s
        found = found.unsqueeze(-1) + own.flatten()
    return found


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_layouts_are_what_the_operators_do(data):
    shape = data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4))
    x, layout = torch.arange(math.prod(shape)).view(shape), Layout.whole(shape)
    for _ in range(5):
        step = data.draw(st.sampled_from(["view", "permute", "slice", "cat"]))
        if step == "view":
            sizes = data.draw(st.permutations([*x.shape, 1]))
            x, made = x.reshape(sizes), layout.reshaped(sizes)
        elif step == "permute":
            order = data.draw(st.permutations(range(x.ndim)))
            x, made = x.permute(order), layout.permuted(order)
        elif step == "slice":
            dim = data.draw(st.integers(0, x.ndim - 1))
            start = data.draw(st.integers(0, x.shape[dim] - 1))
            length = data.draw(st.integers(1, x.shape[dim] - start))
            x, made = x.narrow(dim, start, length), layout.sliced(dim, start, length)
        else:
            dim, to = data.draw(st.integers(0, x.ndim - 1)), data.draw(st.integers(0, x.ndim - 1))
            n = data.draw(st.sampled_from([k for k in range(1, x.shape[dim] + 1) if x.shape[dim] % k == 0]))
            size = x.shape[dim] // n
            parts = [layout.sliced(dim, i * size, size) for i in range(n)]
            x = torch.cat(x.split(size, dim), to)
            made = Layout.joined(parts, to) if all(parts) else None
        if made is None:
            return  # nothing is claimed
        layout = made
        assert elements(layout).equal(x) and (layout.span()[0], layout.span()[1]) == (x.min().item(), x.max().item())


@pytest.mark.parametrize(
    "plan,mesh,sizes,batch",
    [
        ("tp_sp", {"tp": 2}, {}, (4, 17)),
        several("tp", {"tp": 4}, dict(vocab=61), (4, 16)),
        several("tp_sp", {"tp": 4}, dict(hidden=48, heads=6, kv_heads=6), (4, 48)),
        several("ulysses", {"cp": 2}, {}, (4, 17)),
        several("ring", {"cp": 2}, {}, (4, 17)),
        several("zero2", {"dp": 2}, {}, (3, 16)),
    ],
)
def test_nothing_more_is_sent_where_values_are_padded(verified, plan, mesh, sizes, batch):
    report = verified(plan, mesh, model=Llama(LAYERS, **sizes), args=torch.zeros(2, *batch, dtype=torch.long))
    assert [(s.operator, s.reason) for s in report.skipped] == []
    assert any(note.startswith("padded: ") for note in report.notes)


@pytest.mark.parametrize("start", range(12))
def test_a_slice_is_a_layout_where_its_elements_are_a_product(start):
    """Of a dimension of 12 that lies as 3 rows of 4, each 7 apart: a slice within one row, of whole rows, or none."""
    places = [7 * (i // 4) + i % 4 for i in range(12)]
    for length in range(1, 12 - start + 1):
        layout = Layout((((3, 7), (4, 1)),), 0).sliced(0, start, length)
        in_a_row, whole_rows = start // 4 == (start + length - 1) // 4, start % 4 == length % 4 == 0
        if layout is None:
            assert not whole_rows and not (in_a_row and length in (1, 2, 4) and start % length == 0)
            continue
        found = [layout.offset]
        for n, stride in layout.dims[0]:
            found = [at + i * stride for at in found for i in range(n)]
        assert found == places[start : start + length]
