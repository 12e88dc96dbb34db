"""Programs about gradients: grad modes, own gradients, several outputs, backward passes that are repeated."""

import pytest
import torch

import mindspeed_fx
from tests.torch_suites.torch_programs import Table, leaves

TABLE = Table()


def cloned(*inputs):
    """Inputs that may be written: no leaves."""
    return tuple(x * 1.0 for x in inputs)


@TABLE.add((4, 3))
def unused_input_gradient(x):
    return (x.detach() * 2).requires_grad_(False), x.sum()


@TABLE.add((4, 3), (4, 3))
def one_input_without_gradient(x, y):
    return x * y.detach()


@TABLE.add((4, 3))
def gradient_of_nothing(x):
    with torch.no_grad():
        return x * 2


@TABLE.add((4, 3))
def grad_modes_inside(x):
    with torch.no_grad():
        y = x.sin()
    with torch.enable_grad():
        z = x.cos()
    with torch.no_grad():
        with torch.enable_grad():
            w = x * y
        v = w * 2
    return y, z, w, v


@TABLE.add((4, 3), fullgraph=False)
def gradient_inside(x):
    y = (x * x).sum()
    return torch.autograd.grad(y, x, create_graph=False)[0]


@TABLE.add((4, 3), fullgraph=False)
def requires_grad_inside(x):
    y = x.detach().clone().requires_grad_()
    return y * 2 + x


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y, x + y

    @staticmethod
    def backward(ctx, a, b):
        x, y = ctx.saved_tensors
        return a * y * 3 + b, a * x + b * 5


@TABLE.add((4, 3), (4, 3))
def own_gradient(x, y):
    a, b = Double.apply(x, y)
    return a.sin() + b, Double.apply(a, y)[1]


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_non_differentiable(mark := x > 0)
        ctx.shape = x.shape
        return x.round(), mark

    @staticmethod
    def backward(ctx, g, _):
        return g.expand(ctx.shape) * 2


@TABLE.add((4, 3))
def own_gradient_of_rounding(x):
    y, mark = Straight.apply(x * 3)
    return y * mark, mark


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g * 2


@TABLE.add((4, 3), prepare=cloned, fullgraph=False)
def own_gradient_in_place(x):
    return InPlace.apply(x.clone()).sin()


@TABLE.add((4, 3))
def power_of_zero(x):
    z = x * 0
    return z.abs() ** 2, torch.where(x > 0, x, z).norm(dim=1), z.abs() + x.clamp(-0.1, 0.1)


class Counts(torch.autograd.Function):
    """The gradient is right, and the backward counts how often it was called."""

    @staticmethod
    def forward(ctx, x, count):
        ctx.count = count
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        ctx.count.add_(1)
        return g, None


class CountsTwice(Counts):
    @staticmethod
    def forward(ctx, x, count):
        count.add_(10)
        ctx.count = count
        return x.clone()


class Scales(torch.autograd.Function):
    """As :class:`Counts`, with what it adds computed from the gradient."""

    @staticmethod
    def forward(ctx, x, total):
        ctx.total = total
        return x * 2

    @staticmethod
    def backward(ctx, g):
        ctx.total.add_(g.sum(0))
        return g * 2, None


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("function", [Counts, CountsTwice, Scales])
def test_a_backward_that_writes(function, level):
    def f(x, count):
        return function.apply(x, count).sin()

    written = []
    for g in (f, torch.compile(f, backend="mindspeed", options={"level": level, "codegen": "eager"}, fullgraph=True)):
        x, count = torch.ones(4, 3, dtype=torch.double, requires_grad=True), torch.zeros(3, dtype=torch.double)
        for _ in range(2):
            out = g(x, count).sum()
            between = count.clone()
            out.backward()
        written.append((between, count, x.grad))
    torch.testing.assert_close(written[1], written[0])
    assert (written[0][1] - written[0][0]).abs().min() > 0


@pytest.mark.parametrize("name", sorted(TABLE.programs))
def test_program(name):
    TABLE.assert_same(name)


def test_backward_twice_with_a_graph_that_is_kept():
    def f(x):
        return (x.sin() * x).sum()

    x, y = (torch.ones(3, dtype=torch.double, requires_grad=True) for _ in range(2))
    compiled = torch.compile(f, backend="mindspeed", options={"level": 2, "codegen": "eager"})
    for g, v in ((f, x), (compiled, y)):
        out = g(v)
        out.backward(retain_graph=True)
        out.backward()
    torch.testing.assert_close(y.grad, x.grad)


def test_backward_through_one_of_two_outputs():
    def f(x, y):
        return x * y, x.sin()

    for which in (0, 1):
        for g in (f, compiled := torch.compile(f, backend="mindspeed", options={"level": 2, "codegen": "eager"})):
            x, y = (torch.full((3,), v, dtype=torch.double, requires_grad=True) for v in (1.0, 2.0))
            g(x, y)[which].sum().backward()
            if g is f:
                expected = x.grad, y.grad
        assert g is compiled
        torch.testing.assert_close(x.grad, expected[0])
        assert which == 1 or torch.equal(y.grad, expected[1])


def test_autograd_traced_into_the_graph():
    def f(x, w):
        y = (x.sin() * w).sum()
        (g,) = torch.autograd.grad(y, w)
        return g * 2, y

    x, w = leaves((4, 3), (4, 3))()
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        compiled = torch.compile(f, backend="mindspeed", options={"level": 2, "codegen": "eager"})
        torch.testing.assert_close(compiled(x.detach(), w)[0], f(x.detach(), w)[0])


def slope(x, w):
    """The derivative that is returned is a number to eager, not a function of ``w``."""
    (g,) = torch.autograd.grad((w.pow(3) * x).sum(), w)
    return (g * w).sum()


def slope_of_saved_results(x, w):
    (g,) = torch.autograd.grad((w.exp() * x.tanh()).sum(), w, retain_graph=True)
    return (g * w).sum()


def penalty(x, w):
    """A gradient penalty: the loss holds a derivative that is differentiated again."""
    hidden = torch.nn.functional.softmax(x * w, -1)
    (g,) = torch.autograd.grad((hidden * hidden.exp()).sum(), w, create_graph=True)
    return (g.square() * w.sigmoid()).sum()


def penalty_weighted(x, w):
    y = x * w.exp()
    (g,) = torch.autograd.grad(y, w, grad_outputs=w.cos(), create_graph=True)
    return g.square().sum() + y.sum()


@pytest.mark.parametrize("level", [2, 0])
@pytest.mark.parametrize("f", [slope, slope_of_saved_results, penalty, penalty_weighted])
def test_gradients_taken_inside_the_graph(f, level):
    seen = []
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        compiled = torch.compile(f, backend="mindspeed", options={"level": level, "codegen": "eager"}, fullgraph=True)
        for g in (f, compiled):
            x, w = leaves((4, 3), (4, 3))()
            loss = g(x, w)
            loss.backward()
            assert w.grad is not None
            seen.append((loss.detach(), w.grad, x.grad))
    torch.testing.assert_close(seen[1], seen[0])


def test_backward_inside_the_graph():
    def step(x, w):
        loss = torch.nn.functional.silu(x.detach() * w).exp().sum()
        loss.backward()
        return loss.detach()

    seen = []
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        compiled = torch.compile(step, backend="mindspeed", options={"level": 2, "codegen": "eager"}, fullgraph=True)
        for g in (step, compiled):
            x, w = leaves((4, 3), (4, 3))()
            losses = [g(x, w), g(x, w)]
            seen.append((losses, w.grad))
    torch.testing.assert_close(seen[1], seen[0])


def test_a_graph_that_takes_gradients_says_that_it_is_not_captured():
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        report = mindspeed_fx.explain(penalty, *leaves((4, 3), (4, 3))(), options={"level": 2, "codegen": "eager"})
    reason = report.skipped("fusion.layer_norm")[0].reason
    assert "takes gradients inside the graph" in reason and "is not captured" in reason


def test_gradients_that_are_not_contiguous():
    def f(x):
        return x.t() * 2

    x = torch.randn(3, 4, dtype=torch.double, requires_grad=True)
    compiled = torch.compile(f, backend="mindspeed", options={"level": 2, "codegen": "eager"})
    for weight in (torch.randn(3, 4).double().t(), torch.ones(1, 1).double().expand(4, 3), torch.randn(4, 3).double()):
        expected = torch.autograd.grad(f(x), x, weight)[0]
        torch.testing.assert_close(torch.autograd.grad(compiled(x), x, weight)[0], expected)
