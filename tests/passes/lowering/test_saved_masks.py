"""lowering.saved_masks: masks leave the forward as bytes on cpu, with the same values and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.fx as fx
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mindspeed_fx import explain
from mindspeed_fx.partition.masks import save_as_bytes
from mindspeed_fx.passes.lowering import saved_masks
from mindspeed_fx.passes.runner import Pipeline

NAME = saved_masks.NAME
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@pytest.fixture
def saved(monkeypatch):
    """Types of what the forward of the last compilation hands to the backward, as the backward takes it."""
    found = []

    def after_cut(self, record, forward, backward):
        original(self, record, forward, backward)
        arguments = [n.meta["val"] for n in backward.graph.find_nodes(op="placeholder")]
        found[:] = [(v.dtype, tuple(v.shape)) for v in arguments if isinstance(v, torch.Tensor)]

    original = Pipeline.after_cut
    monkeypatch.setattr(Pipeline, "after_cut", after_cut)
    return found


class Masked(nn.Module):
    """Its backward reads where the first product is large, and no more of it."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.up, self.down = nn.Linear(12, 40, dtype=dtype), nn.Linear(40, 12, dtype=dtype)

    def forward(self, x):
        keep = self.up(x) > 0.1
        return self.down(torch.where(keep, torch.cos(x.sum(-1, keepdim=True)), 0.0)).sum()


def gradients(model, x, **options):
    torch._dynamo.reset()
    model.zero_grad()
    x = x.clone().requires_grad_()
    with torch._inductor.config.patch(force_disable_caches=True):
        loss = torch.compile(model, backend="mindspeed", options=options)(x)
        loss.backward()
    return [loss.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mask_is_saved_as_bytes_and_gives_the_same_bits(saved, dtype):
    torch.manual_seed(0)
    model, x = Masked(dtype), torch.randn(7, 12, dtype=dtype)
    without = gradients(model, x, disable=[NAME])
    assert (torch.bool, (7, 40)) in saved
    results = gradients(model, x)
    assert (torch.uint8, (7, 40)) in saved and not any(d == torch.bool for d, _ in saved)
    assert len(results) == len(without) == 4
    for a, b in zip(results, without, strict=True):
        assert torch.equal(a, b)


def test_every_rewritten_mask_is_reported():
    model, x = Masked(torch.float32), torch.randn(7, 12)
    report = explain(model, x.requires_grad_())
    (run,) = (r for g in report.graphs for r in g.runs if r.report.name == NAME)
    assert [s.operator for s in run.report.rewrites] == ["mask as bytes"] and not run.report.skipped


@pytest.mark.parametrize(
    "options, reason", [({"codegen": "eager"}, "Inductor generates for the CPU alone"), ({"target": "npu"}, "alone")]
)
def test_elsewhere_masks_stay_bools(options, reason):
    report = explain(Masked(torch.float32), torch.randn(7, 12), options=options)
    (run,) = (r for g in report.graphs for r in g.runs if r.report.name == NAME)
    assert not run.report.rewrites and reason in run.report.notes[0]


class Returned(Masked):
    def forward(self, x):
        keep = self.up(x) > 0.1
        return torch.where(keep, torch.cos(x.sum(-1, keepdim=True)), 0.0).sum(), keep


def test_a_mask_that_the_caller_gets_stays():
    torch.manual_seed(0)
    model, x = Returned(torch.float32), torch.randn(7, 12, requires_grad=True)
    with torch._inductor.config.patch(force_disable_caches=True):
        loss, keep = torch.compile(model, backend="mindspeed")(x)
    loss.backward()
    assert keep.dtype == torch.bool and torch.equal(keep, model.up(x) > 0.1)
    assert x.grad.any()


def test_a_mask_that_a_call_of_the_backward_reads_stays():
    graph, value = fx.Graph(), FakeTensorMode().from_tensor(torch.ones(7, 40))
    x = graph.placeholder("x")
    mask = graph.call_function(torch.ops.aten.gt.Scalar, (x, 0.1))
    graph.output((x, mask))
    x.meta["val"], mask.meta["val"] = value, value > 0.1
    forward = fx.GraphModule({}, graph)
    graph = fx.Graph()
    arg = graph.create_node("placeholder", mask.name, name=mask.name)
    graph.output((graph.call_function(torch.ops.aten.sort.default, (arg,)),))
    arg.meta["val"] = value > 0.1
    backward = fx.GraphModule({}, graph)
    done, stay = save_as_bytes(forward, backward, [mask.name])
    assert not done and "reads it from memory, as bool" in stay[mask.name]
    assert arg.meta["val"].dtype == torch.bool


def test_dropout_trains_as_before():
    """The masks of two calls differ, and each gradient is that of its own mask."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 8))
    x = torch.ones(4, 8)
    step = torch.compile(model, backend="mindspeed", options={"disable": ["fusion.*"]})
    for _ in range(2):
        model.zero_grad()
        step(x).sum().backward()
        used = model[0].bias.grad != 0
        assert 0 < used.sum() < 64 and torch.equal(used, model[2].weight.grad.abs().sum(0) != 0)


def test_sizes_that_change():
    torch.manual_seed(0)
    model = Masked()
    step = torch.compile(model, backend="mindspeed", dynamic=True)
    for rows in (5, 7, 11):
        x = torch.randn(rows, 12, dtype=torch.float64)
        a, b = (y := x.clone().requires_grad_()), (z := x.clone().requires_grad_())
        step(a).backward()
        model(b).backward()
        torch.testing.assert_close(y.grad, z.grad)
