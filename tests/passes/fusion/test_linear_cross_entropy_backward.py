"""fusion.linear_cross_entropy_backward: the gradient of the logits of a loss is made a tile at a time."""

import copy
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mindspeed_fx
from mindspeed_fx.kernels import linear_cross_entropy_backward as kernel
from mindspeed_fx.options import Options
from mindspeed_fx.passes.base import Context
from mindspeed_fx.passes.fusion import linear_cross_entropy_backward as file

NAME = file.NAME
OPTIONS = {"codegen": "eager"}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Tiny logits count as large, and take several tiles."""
    monkeypatch.setattr(file, "SMALLEST", 0)
    monkeypatch.setattr(kernel, "TILE", 8 * 4 * 5)


class Head(nn.Module):
    def __init__(self, form, vocab=24, hidden=8, bias=False):
        super().__init__()
        self.inner, self.head, self.form = nn.Linear(hidden, hidden), nn.Linear(hidden, vocab, bias=bias), form

    def forward(self, x, target):
        x = self.inner(x)
        if self.form == "matmul":
            return F.cross_entropy((x @ self.head.weight.t()).flatten(0, 1), target.flatten()), x
        logits = self.head(x)
        if self.form == "returned":
            return F.cross_entropy(logits.flatten(0, 1), target.flatten()), logits
        if self.form == "tokens":
            return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(target.shape), x
        if self.form == "transposed":  # rows in another order than the linear's
            return F.cross_entropy(logits.transpose(0, 1).reshape(-1, logits.shape[-1]), target.t().reshape(-1)), logits
        if self.form == "shifted":
            return F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), target[:, 1:].reshape(-1)), logits
        if self.form == "smoothed":
            return F.cross_entropy(logits.flatten(0, 1), target.flatten(), label_smoothing=0.1), logits
        raise AssertionError(self.form)


def both(model, used=0, dtype=torch.float64):
    """Outputs and gradients of the model and of the model compiled, and the report."""
    torch.manual_seed(1)
    model = model.to(dtype)
    x, target = torch.randn(3, 6, 8, dtype=dtype, requires_grad=True), torch.randint(0, 24, (3, 6))
    target[0, :2] = -100
    compiled = torch.compile(model, backend="mindspeed", options=OPTIONS)
    results = []
    for run in (model, compiled):
        model.zero_grad()
        x.grad = None
        outputs = run(x, target)
        (sum(o.sin().sum() for o in outputs) if used else outputs[0].sum()).backward()
        results.append(
            [
                *(o.detach() for o in outputs),
                x.grad.clone(),
                *(p.grad.clone() for p in model.parameters() if p.grad is not None),
            ]
        )
    return results, mindspeed_fx.explain(model, x, target, options=OPTIONS)


@pytest.mark.parametrize("form", ["returned", "tokens", "transposed", "shifted", "smoothed", "matmul"])
@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("bias", [False, True])
def test_rewritten_and_equal(form, used, bias):
    (plain, fused), report = both(Head(form, bias=bias), used)
    assert report.counts[NAME] == 1, report.skipped(NAME)
    for a, b in zip(plain, fused, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("frozen", ["head", "inner"])
def test_frozen(frozen):
    model = Head("returned")
    getattr(model, frozen).requires_grad_(False)
    (plain, fused), report = both(model)
    assert report.counts[NAME] == 1
    for a, b in zip(plain, fused, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-12)


def test_bfloat16():
    torch.manual_seed(0)
    model = Head("returned")
    (exact, _), _ = both(copy.deepcopy(model))
    (plain, fused), report = both(model, dtype=torch.bfloat16)
    assert report.counts[NAME] == 1
    for e, a, b in zip(exact, plain, fused, strict=True):
        assert (b.double() - e).norm() <= 2 * (a.double() - e).norm() + 1e-3 * e.norm()


class Scaled(Head):
    def forward(self, x, target):
        logits = self.head(self.inner(x)) * 0.5
        return F.cross_entropy(logits.flatten(0, 1), target.flatten()), logits


class Penalized(Head):
    def forward(self, x, target):
        logits = self.head(self.inner(x))
        return F.cross_entropy(logits.flatten(0, 1), target.flatten()) + logits.pow(3).mean() * F.softplus(
            logits
        ).sum(), logits


@pytest.mark.parametrize("model, words", [(Scaled("returned"), "read by"), (Penalized("returned"), None)])
def test_left_with_a_reason_or_equal(model, words):
    (plain, fused), report = both(model)
    for a, b in zip(plain, fused, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-12)
    if words:
        assert report.counts[NAME] == 0 and words in report.skipped(NAME)[0].reason


def test_small_logits_are_left(monkeypatch):
    monkeypatch.setattr(file, "SMALLEST", 8 * 2**20)
    _, report = both(Head("returned"))
    assert report.counts[NAME] == 0 and "below 8 MiB" in report.skipped(NAME)[0].reason


@pytest.mark.parametrize("dtype, least", [(torch.float32, 32), (torch.bfloat16, 64)])
def test_tiles_begin_where_they_pay(monkeypatch, dtype, least):
    monkeypatch.undo()
    context = Context(Options.parse({}).resolve("cpu"), "joint")
    for more, left in ((-1, True), (0, False)):
        graph = torch.fx.Graph()
        grad, logits = graph.placeholder("grad"), graph.placeholder("logits")
        node = graph.call_function(torch.ops.mindspeed.cross_entropy_backward.default, (grad, logits))
        graph.output((logits, node))
        logits.meta["val"] = node.meta["val"] = torch.empty(1024 + more, (least << 10) // dtype.itemsize, dtype=dtype)
        reason = file._match_gate(node, context)
        assert (f"below {least} MiB" in reason) if left else reason is None


def test_generated_code_writes_over_logits_that_nobody_reads():
    x, target = torch.randn(3, 6, 8), torch.randint(0, 24, (3, 6))
    report = mindspeed_fx.explain(Head("tokens"), x, target, options={"codegen": "inductor"})
    assert "over them" in report.skipped(NAME)[0].reason
    report = mindspeed_fx.explain(Head("returned"), x, target, options={"codegen": "inductor"})
    assert report.counts[NAME] == 1


def test_dynamic_shapes():
    model = Head("returned").double()
    compiled = torch.compile(model, backend="mindspeed", options=OPTIONS, dynamic=True)
    for rows in (2, 5):
        x, target = torch.randn(rows, 6, 8, dtype=torch.float64), torch.randint(0, 24, (rows, 6))
        grads = []
        for run in (model, compiled):
            model.zero_grad()
            run(x, target)[0].backward()
            grads.append([p.grad.clone() for p in model.parameters()])
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-12)


def test_the_code_of_a_rewritten_graph_is_written_anew(monkeypatch):
    gm = torch.fx.symbolic_trace(lambda x: x + 1)

    def rewrite(report, *_):
        next(n for n in gm.graph.nodes if n.target is operator.add).target = operator.sub
        report.rewrites.append(NAME)

    monkeypatch.setattr(file, "rewrite_each", rewrite)
    file.linear_cross_entropy_backward(gm, None)
    assert gm(torch.ones(1)) == 0
