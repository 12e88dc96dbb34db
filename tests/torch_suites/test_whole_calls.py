"""Functions that Dynamo leaves whole (``allow_in_graph``): the gradient that they define is the compiled one too."""

import pytest
import torch

from mindspeed_fx.capture import capture, isolate
from mindspeed_fx.planning.simulate import simulate
from tests.torch_suites.torch_programs import Table, assert_same, leaves

TABLE = Table()


class Rounded(torch.autograd.Function):
    """Rounds, and lets ten times the gradient through: nothing that the operators of its forward tell."""

    @staticmethod
    def forward(ctx, x, w, scale):
        ctx.save_for_backward(x, w)
        ctx.scale = scale
        return x.round() * w, x.sum()

    @staticmethod
    def backward(ctx, g, total):
        x, w = ctx.saved_tensors
        return g * w * ctx.scale + total, (g * x).sum(), None


class Alone(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, g):
        return g.clamp(-1, 1)


class Centered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x - x.mean(1, keepdim=True)

    @staticmethod
    def backward(ctx, g):
        return g * g.shape[1] + g.sum(1, keepdim=True)


rounded = torch.compiler.allow_in_graph(Rounded)
straight_through = torch.compiler.allow_in_graph(Alone)
centered = torch.compiler.allow_in_graph(Centered)


@torch.compiler.allow_in_graph
def inside_a_function(x, w):
    with torch.no_grad():
        scaled = x * 2
    return x * scaled, Rounded.apply(x, w, 3)[0]


@torch.compiler.allow_in_graph
def operators_alone(x):
    return x.sin() * 2


@torch.compiler.allow_in_graph
def with_a_hook(x):
    y = x.sin()
    y.register_hook(lambda g: 3 * g)
    return y * 2


@torch.compiler.allow_in_graph
def with_a_hook_on_its_input(x, w):
    x.register_hook(lambda g: g.clamp(max=0.5))
    return x * w


@TABLE.add((4,))
def a_hook(x):
    return with_a_hook(x * 2).exp()


@TABLE.add((4,), ())
def a_hook_on_an_input(x, w):
    return with_a_hook_on_its_input(x * 2, w).sin()


@TABLE.add((4,), ())
def several_results(x, w):
    y, total = rounded.apply(x * 3, w, 10)
    return y.sin() + total.exp()


@TABLE.add((4,))
def one_result(x):
    return straight_through.apply(x * 3).exp() * x


@TABLE.add((4,), ())
def a_function_that_applies_one(x, w):
    scaled, rounds = inside_a_function(x, w)
    return scaled.sin(), rounds.exp()


@TABLE.add((4,))
def a_function_of_operators(x):
    return operators_alone(x) * x


@TABLE.add((4,), ())
def in_a_checkpoint(x, w):
    return torch.utils.checkpoint.checkpoint(lambda a: rounded.apply(a, w, 10)[0].exp(), x, use_reentrant=False)


@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.parametrize("name", sorted(TABLE.programs))
def test_program(name, level):
    TABLE.assert_same(name, level=level)


def test_what_stands_around_a_call_is_captured():
    """The call is one node, whatever it applies, and the operators before and after it are those of any graph."""
    graphs = []

    def keep(gm, inputs):
        graphs.append(gm)
        return gm

    torch._dynamo.reset()
    torch.compile(one_result, backend=keep)(*leaves((4,))())
    assert isolate(graphs[0]) is None
    targets = [str(n.target) for n in capture(graphs[0]).graph.nodes if n.op == "call_function"]
    assert "wrap" in targets and "aten.exp.default" in targets and "aten.sign.default" not in targets


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, x):
        return self.down(centered.apply(self.up(x))).square().mean()


def test_under_a_plan_that_divides_the_sequence():
    torch.manual_seed(0)
    model, x = Model().double(), torch.randn(2, 8, 16, dtype=torch.double)
    loss = model(x)
    loss.backward()
    result = simulate(model, {"cp": 2}, "ulysses", x)
    torch.testing.assert_close(result.outputs[0].detach(), loss.detach())
    for name, p in model.named_parameters():
        torch.testing.assert_close(result.gradients[name], p.grad)


def test_data_written_after_it_was_saved():
    """``.data`` has a version of its own: what the backward saved is what it reads."""

    def program(x):
        out = x.sin()
        x.data.mul_(2)
        x.data[1:].view(-1).add_(1)
        return out

    assert_same(program, leaves((4,)))


def test_data_assigned():
    def program(x, y):
        x.data = y
        y.data = torch.zeros([0], dtype=y.dtype)
        return x

    assert_same(program, leaves((6,), (6,)), backward=False)


def test_data_assigned_to_an_operand():
    def program(x, y):
        x.data = y
        y.data = torch.zeros_like(y)
        return x + y

    assert_same(program, lambda: (torch.tensor([True, False]), torch.tensor([False, False])))
