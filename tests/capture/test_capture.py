"""Capture keeps values, gradients, aliasing, mutation, random numbers and autocast, whatever the spelling."""

import operator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

import mindspeed_fx
from mindspeed_fx.capture import capture
from mindspeed_fx.capture.trace import _tell_results_apart

aten = torch.ops.aten
graphs = []


def captured_backend(gm, inputs):
    from mindspeed_fx.compat import fx_graph

    captured = capture(gm)
    graphs.append(captured)
    fx_graph.replace_graph(gm, captured)
    return aot_autograd(fw_compiler=lambda g, _: g.forward, inference_compiler=lambda g, _: g.forward)(gm, inputs)


def graph_of(f, *args):
    torch._dynamo.reset()
    graphs.clear()
    torch.compile(f, backend=captured_backend, fullgraph=True)(*args)
    return graphs[0]


def targets(gm):
    return [n.target for n in gm.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]


@pytest.mark.parametrize(
    "spellings, expected",
    [
        (
            [lambda x: x.pow(2), lambda x: x**2, lambda x: x * x, torch.square, lambda x: torch.pow(x, 2)],
            [aten.pow.Tensor_Scalar],
        ),
        ([lambda x: F.silu(x), lambda x: torch.nn.SiLU()(x)], [aten.silu.default]),
        (
            [
                lambda x: x.chunk(2, -1)[0],
                lambda x: x.split(4, -1)[0],
                lambda x: torch.tensor_split(x, 2, -1)[0],
                lambda x: x.split([4, 4], -1)[0],
            ],
            [aten.split_with_sizes.default],
        ),
        (
            [
                lambda x: torch.cat([torch.tensor([]), x.relu()], -1).exp(),
                lambda x: torch.cat([x.relu(), x.new_zeros(x.shape[0], 0)], -1).exp(),
                lambda x: torch.cat([x.relu()], 0).exp(),
                lambda x: x.relu().exp(),
            ],
            [aten.relu.default, aten.exp.default],
        ),
        (
            [
                lambda x: torch.cat([torch.tensor([]), x, x], -1),
                lambda x: torch.cat([x, torch.tensor([]), x], -1),
                lambda x: torch.cat([x.new_empty(x.shape[0], 0), x, x], -1),
                lambda x: torch.cat([x, x], -1),
            ],
            [aten.cat.default],
        ),
        (
            [
                lambda x: x.double(),
                lambda x: x.to(torch.float64),
                lambda x: x.type(torch.float64),
                lambda x: x.to(dtype=torch.float64),
            ],
            [aten.to.dtype],
        ),
        (
            [
                lambda x: F.dropout(x.relu(), 0.0),
                lambda x: F.dropout(x.relu(), 0.5, training=False),
                lambda x: x.relu().float(),
                lambda x: x.relu().contiguous(),
                lambda x: x.relu(),
            ],
            [aten.relu.default],
        ),
        (
            [lambda x: x.relu().sub_(1.0), lambda x: x.relu() - 1.0, lambda x: torch.sub(x.relu(), 1.0)],
            [aten.relu.default, aten.sub.Tensor],
        ),
        (
            [lambda x: torch.exp(x.relu(), out=torch.empty(3, 8)), lambda x: x.relu().exp_(), lambda x: x.relu().exp()],
            [aten.relu.default, aten.exp.default],
        ),
    ],
)
def test_one_spelling(spellings, expected):
    for f in spellings:
        found = [t for t in targets(graph_of(lambda x: f(x), torch.randn(3, 8))) if t is not aten.empty.memory_format]
        assert found == expected, f


STEPS = {
    "square": lambda x, w, b: x * x,
    "silu": lambda x, w, b: x * torch.sigmoid(x),
    "chunked": lambda x, w, b: torch.cat(x.chunk(2, -1)[::-1], -1),
    "split": lambda x, w, b: torch.cat([p * i for i, p in enumerate(x.split([1, 2, 1], -1))], -1),
    "linear": lambda x, w, b: F.linear(x, w),
    "inplace": lambda x, w, b: (x + 0).mul_(2.0).add_(x),
    "copied": lambda x, w, b: torch.zeros_like(x).copy_(x * 2.0) + x,
    "inplace_on_view": lambda x, w, b: _zero_column(x),
    "out": lambda x, w, b: torch.tanh(x.detach(), out=torch.empty_like(x)) + x,
    "no_grad_factor": lambda x, w, b: x * _constant(x),
    "data": lambda x, w, b: F.linear(x, w.data.clamp_(-0.5, 0.5)) + F.linear(x, w),
    "no_grad_inplace": lambda x, w, b: _inplace_without_grad(x),
    "detach": lambda x, w, b: x + x.detach().sigmoid(),
    "norm": lambda x, w, b: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5),
    "dropout": lambda x, w, b: F.dropout(x, 0.3),
    "buffer": lambda x, w, b: x + _count(b),
    "transpose": lambda x, w, b: x.transpose(0, 1).contiguous().transpose(0, 1),
    "casts": lambda x, w, b: x.float().double().to(x.dtype),
    "autocast": lambda x, w, b: _autocast(x, w),
    "function": lambda x, w, b: Swish.apply(x),
    "reverse": lambda x, w, b: Reverse.apply(x),
    "checkpoint": lambda x, w, b: torch.utils.checkpoint.checkpoint(
        lambda y: torch.tanh(y @ w), x, use_reentrant=False
    ),
}


def _zero_column(x):
    y = x.clone()
    y[..., 0] = 0.0
    y.narrow(-1, 1, 1).add_(1.0)
    return y * x


def _constant(x):
    with torch.no_grad():
        return x.sigmoid()


def _inplace_without_grad(x):
    y = x * 2
    with torch.no_grad():
        y.mul_(0.5)
    return y


def _count(b):
    b.add_(1.0)
    return b.sum()


def _autocast(x, w):
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(x, w).to(x.dtype)


class Swish(torch.autograd.Function):
    """Its own derivative: capture may inline it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad * (s + x * s * (1 - s))


class Reverse(torch.autograd.Function):
    """Not its own derivative: must stay whole."""

    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        return -3.0 * grad


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4), st.booleans())
def test_random_programs_keep_values_gradients_mutation_and_randomness(names, frozen):
    """Bitwise, forward and backward, for random compositions of steps."""
    torch._dynamo.reset()

    class Program(nn.Module):
        def __init__(self):
            super().__init__()
            generator = torch.Generator().manual_seed(1)
            self.w = nn.Parameter(torch.randn(4, 4, generator=generator), requires_grad=not frozen)
            self.register_buffer("b", torch.zeros(2))

        def forward(self, x):
            for name in names:
                x = STEPS[name](x, self.w, self.b)
            return x, x.reshape(-1)  # the second output is an alias where x is contiguous

    def run(compiled):
        model = Program()
        x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
        torch.manual_seed(7)
        out, alias = (torch.compile(model, backend=captured_backend if compiled else "aot_eager", fullgraph=True))(x)
        out.mul(torch.arange(1.0, 13.0).view(3, 4)).sum().backward()
        return out.detach(), alias.detach(), x.grad, model.w.grad, model.b, alias.data_ptr() == out.data_ptr()

    for a, b in zip(run(False), run(True), strict=True):
        assert (a is None) == (b is None)
        assert a is None or (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b)


@pytest.mark.parametrize(
    "copied",
    [lambda x: x * 2, lambda x: (x * 2).double(), lambda x: (x * 2)[:1], lambda x: (x * 2).t().contiguous().t()],
    ids=["alike", "wider", "broadcast", "transposed"],
)
def test_what_is_copied_into_a_new_tensor_has_its_gradient(copied):
    """States of linear attention and of convolutions in a cache (Qwen3-Next, Mamba, LFM2); ``aten.copy``, which has no
    derivative, may not take the place of ``copy_``."""

    def f(x):
        cache = torch.zeros(3, 4)
        cache.copy_(copied(x))
        return (x * x).sum() + (cache * torch.arange(12.0).view(3, 4)).sum(), cache

    results = []
    for backend in (captured_backend, "mindspeed", "eager"):
        torch._dynamo.reset()
        x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
        options = {"options": {"codegen": "eager"}} if backend == "mindspeed" else {}
        loss, cache = torch.compile(f, backend=backend, fullgraph=True, **options)(x)
        loss.backward()
        results.append((loss.detach(), cache.detach(), x.grad))
    for ours in results[:-1]:
        assert all(torch.equal(a, b) for a, b in zip(ours, results[-1], strict=True))


class Clipped(nn.Module):
    """Gemma 3n clips a weight so in every step."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def clipped(self, x):
        self.linear.weight.data.clamp_(-0.1, 0.1)
        return F.silu(self.linear(x))

    def forward(self, x):
        return self.clipped(x).sum()


class Read(Clipped):
    def forward(self, x):
        return self.clipped(self.linear(x)).sum()


class Checkpointed(Clipped):
    def forward(self, x):
        return checkpoint(self.clipped, x, use_reentrant=False).sum()


class ReadOutside(Clipped):
    def forward(self, x):
        return checkpoint(self.clipped, self.linear(x), use_reentrant=False).sum()


@pytest.mark.parametrize("kind, captured", [(Clipped, True), (Checkpointed, True), (Read, False), (ReadOutside, False)])
@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_data_of_a_parameter_is_written_as_in_eager_mode(codegen, kind, captured):
    """For two steps. A graph that reads the weight first is not captured, for ``detach`` would be another version."""
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model, x = kind().double(), torch.randn(3, 4, dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        f = torch.compile(model, backend="mindspeed", options={"codegen": codegen}) if compiled else model
        for _ in range(2):
            optimizer.zero_grad()
            f(x).backward()
            optimizer.step()
        results.append((*(p.detach() for p in model.parameters()), *(p.grad for p in model.parameters())))
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-14) for a, b in zip(*results, strict=True))
    reasons = str(mindspeed_fx.explain(model, x, options={"codegen": "eager"}))
    assert ("the graph writes a tensor through .data" in reasons) != captured


@pytest.mark.parametrize("function", [Swish, Reverse])
def test_an_autograd_function_stays_whole(function):
    left = targets(graph_of(lambda x: function.apply(x), torch.randn(3, 4, requires_grad=True)))
    assert len(left) == 1 and left[0].name() == "autograd_function_apply"


def test_symbolic_sizes_stay_symbolic():
    seen = []

    def backend(gm, inputs):
        captured = capture(gm)
        seen.append(captured)
        return captured.forward

    f = torch.compile(lambda x: x.view(x.shape[0] * x.shape[1], -1) * x.shape[0], backend=backend, dynamic=True)
    for shape in ((2, 3, 4), (5, 3, 4), (7, 2, 6)):
        x = torch.randn(shape)
        assert torch.equal(f(x), x.view(shape[0] * shape[1], -1) * shape[0])
    assert len(seen) == 1


def test_where_a_node_comes_from_is_kept():
    from mindspeed_fx.passes import module_path, source_line

    class Inner(nn.Module):
        def forward(self, x):
            return F.silu(x)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Identity(), Inner()])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    node = next(n for n in graph_of(Outer(), torch.randn(2)).graph.nodes if n.target is aten.silu.default)
    assert module_path(node) == "layers.1"
    assert "test_capture.py" in source_line(node) and source_line(node).endswith("return F.silu(x)")


def test_annotations_mark_mutation_and_gradient_flow():
    def f(x, b):
        y = x * 2
        b.add_(1.0)
        with torch.no_grad():
            z = y.sigmoid()
        return y + z + b

    gm = graph_of(f, torch.randn(3, requires_grad=True), torch.zeros(3))
    by_target = {n.target: n for n in gm.graph.nodes if n.op == "call_function"}
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    assert [p.meta["mutated"] for p in placeholders] == [False, True]
    assert [p.meta["needs_grad"] for p in placeholders] == [True, False]
    assert by_target[aten.mul.Tensor].meta["needs_grad"] and not by_target[aten.sigmoid.default].meta["needs_grad"]
    assert not by_target[aten.sigmoid.default].meta["grad_enabled"]


@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.parametrize(
    "cast",
    [lambda x: x.to(torch.bfloat16, memory_format=torch.channels_last), lambda x: x.to(torch.float64, copy=True)],
)
def test_a_cast_keeps_what_else_it_was_told(cast, level):
    """Where PyTorch puts the result in memory; a format that is given by place was taken for none."""
    x = torch.randn(2, 3, 4, 5)
    expected = cast(x)
    for f, y in ((cast, expected), (lambda x: cast(x) * 2, expected * 2)):
        found = torch.compile(f, backend="mindspeed", options={"level": level, "codegen": "eager"})(x)
        assert torch.equal(found, y) and found.stride() == y.stride()


EAGER = {"codegen": "eager"}


class Exponential(torch.autograd.Function):
    """Its result is what it saves, cast to the type that it has: torch 2.11 returns both beside each other."""

    @staticmethod
    def forward(ctx, x):
        out = x.exp().to(x.dtype)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


def test_a_result_that_is_returned_twice_has_its_gradient():
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    step = torch.compile(lambda x: (Exponential.apply(x * 1) * 2).sum(), backend="mindspeed", options=EAGER)
    step(x).backward()
    torch.testing.assert_close(x.grad, 2 * x.detach().exp())


def test_results_of_a_body_are_told_apart():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.ops.aten.exp.default, (x,))
    x.meta["val"] = y.meta["val"] = torch.empty(3)
    graph.output(((y, x, y), (y,)))
    _tell_results_apart(graph)
    (first, second, third), saved = graph.output_node().args[0]
    assert (first, second, saved) == (y, x, (y,))
    assert third.target is torch.ops.aten.alias.default and third.args == (y,)


def test_a_slice_of_everything_leaves_no_node_where_sizes_are_symbols():
    def f(x):
        y = x.relu()
        return y[:, 1] + y[:, :, 0], y[:], x[:]

    x = torch.randn(3, 4, 4)
    torch._dynamo.mark_dynamic(x, 0)
    gm = graph_of(f, x)
    assert targets(gm).count(aten.slice.Tensor) == 1  # of the input, which is returned
    torch._dynamo.reset()
    compiled = torch.compile(f, backend=captured_backend, dynamic=True)
    graphs.clear()
    for rows in (3, 5, 7):
        x = torch.randn(rows, 4, 4)
        for a, b in zip(compiled(x), f(x), strict=True):
            assert torch.equal(a, b)
        first = compiled(x)[2]
        first.zero_()
        assert not x.any()
    assert len(graphs) == 1
