"""Tensors of subclasses as inputs and parameters: left to AOTAutograd, with the reason in the report."""

import copy

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import return_and_correct_aliasing

import mindspeed_fx
from tests.torch_suites.torch_programs import OPTIONS


class Quantized(torch.Tensor):
    """An int8 weight with a scale per row, which knows linear, transpose and dequantization, as torchao's do."""

    @staticmethod
    def __new__(cls, values, scale, dtype):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=dtype, device=values.device)

    def __init__(self, values, scale, dtype):
        self.values_, self.scale_ = values, scale

    def __tensor_flatten__(self):
        return ["values_", "scale_"], self.dtype

    @classmethod
    def __tensor_unflatten__(cls, inner, dtype, size, stride):
        return cls(inner["values_"], inner["scale_"], dtype)

    @classmethod
    def quantize(cls, w):
        scale = w.detach().abs().amax(1, keepdim=True) / 127
        return cls((w.detach() / scale).round().to(torch.int8), scale, w.dtype)

    def whole(self):
        return self.values_.to(self.scale_.dtype) * self.scale_

    @classmethod
    def __torch_function__(cls, f, types, args=(), kwargs=None):
        if f is nn.functional.linear and isinstance(args[1], cls):
            return nn.functional.linear(args[0], args[1].whole(), *args[2:], **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return f(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, f, types, args=(), kwargs=None):
        if f in (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten.alias.default):
            x = args[0]
            return return_and_correct_aliasing(f, args, kwargs or {}, cls(f(x.values_), f(x.scale_), x.dtype))
        raise NotImplementedError(f"{f} of a quantized tensor")


def two(*size, grad=True):
    generator = torch.Generator().manual_seed(5)
    a, b = (torch.randn(size, generator=generator, dtype=torch.double) for _ in range(2))
    return TwoTensor(a, b).requires_grad_(grad)


def assert_pair(a, b):
    assert isinstance(a, TwoTensor) and isinstance(b, TwoTensor)
    torch.testing.assert_close(a.a, b.a)
    torch.testing.assert_close(a.b, b.b)


PROGRAMS = {
    "arithmetic": lambda x, y: (x * x).sin() @ y.t() + 1,
    "plain and wrapped": lambda x, y: x * torch.ones(3, 4, dtype=torch.double) + y.a.sum(),
    "views": lambda x, y: x.view(4, 3).t().contiguous() * y.sum(0),
    "loss": lambda x, y: nn.functional.softmax(x, -1) * nn.functional.silu(y),
}


@pytest.mark.parametrize(
    "name, options",
    [
        *((name, OPTIONS) for name in sorted(PROGRAMS)),
        pytest.param("loss", {"level": 1, "codegen": "inductor"}, marks=pytest.mark.slow),
    ],
)
def test_two_tensors(name, options):
    f = PROGRAMS[name]
    x, y, u, v = two(3, 4), two(3, 4), two(3, 4), two(3, 4)
    expected, actual = f(x, y), torch.compile(f, backend="mindspeed", options=options)(u, v)
    assert_pair(expected, actual)
    expected.sum().backward()
    actual.sum().backward()
    assert_pair(x.grad, u.grad)
    assert (y.grad is None) == (v.grad is None)
    if y.grad is not None:
        assert_pair(y.grad, v.grad)


def test_two_tensors_are_written():
    def f(x):
        x.mul_(2)
        return x + 1

    x, y = two(3, 4, grad=False), two(3, 4, grad=False)
    assert_pair(f(x), torch.compile(f, backend="mindspeed", options=OPTIONS)(y))
    assert_pair(x, y)


def test_parameters_of_a_subclass_learn():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(two(4, 4, grad=False))
            self.norm = nn.LayerNorm(4).double()

        def forward(self, x):
            return self.norm(x) @ self.weight

    model = Model()
    other = copy.deepcopy(model)
    compiled = torch.compile(other, backend="mindspeed", options=OPTIONS, fullgraph=True)
    x = torch.randn(2, 4, dtype=torch.double)
    for _m, run in ((model, model), (other, compiled)):
        out = run(x)
        (out * out).sum().backward()
    assert_pair(model.weight.grad, other.weight.grad)
    assert_pair(model.norm.weight.grad, other.norm.weight.grad)


def quantized():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8), nn.LayerNorm(8))
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(Quantized.quantize(layer.weight), requires_grad=False)
    return model


def test_quantized_weights():
    model, x = quantized(), torch.randn(3, 8)
    compiled = torch.compile(model, backend="mindspeed", options=OPTIONS, fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))
    expected = torch.autograd.grad(model(x).square().sum(), model[0].bias)[0]
    torch.testing.assert_close(torch.autograd.grad(compiled(x).square().sum(), model[0].bias)[0], expected)


def test_the_report_says_why(tmp_path):
    report = mindspeed_fx.explain(quantized(), torch.randn(3, 8), options={"codegen": "eager"})
    assert report.save(str(tmp_path)).exists() and "Quantized" in str(report)
    assert (
        "Quantized" in report.skipped("fusion.layer_norm")[0].reason
        and "is not captured" in report.skipped("fusion.layer_norm")[0].reason
    )


@pytest.mark.parametrize("dynamic", [None, True])
def test_nested_tensors(dynamic):
    def f(x, w):
        return nn.functional.silu(x @ w) * 2

    parts = [torch.randn(n, 4, dtype=torch.double) for n in (2, 5, 3)]
    grads = []
    compiled = torch.compile(f, backend="mindspeed", options=OPTIONS, dynamic=dynamic)
    for g in (f, compiled):
        w = torch.eye(4, dtype=torch.double).requires_grad_()
        x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
        out = g(x, w)
        out.values().square().sum().backward()
        grads.append((out.values().detach(), x.grad.values(), w.grad))
    torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_nested_tensor_beside_plain_ones(dynamic):
    def f(x, y, ragged):
        return (x @ y).sum() + ragged.clone()

    compiled = torch.compile(f, backend="mindspeed", options=OPTIONS, dynamic=dynamic)
    grads = []
    for g in (f, compiled):
        x, y = (torch.full((4, 4), k, dtype=torch.double, requires_grad=True) for k in (1.0, 2.0))
        parts = [torch.ones(n, 3, dtype=torch.double, requires_grad=True) for n in (2, 3, 4)]
        out = g(x, y, torch.nested.as_nested_tensor(parts, layout=torch.jagged))
        out.values().square().sum().backward()
        grads.append([out.values().detach(), x.grad, y.grad, *(p.grad for p in parts)])
    torch.testing.assert_close(grads[1], grads[0])


def test_nested_tensors_made_inside():
    def f(values, offsets):
        x = torch.nested.nested_tensor_from_jagged(values, offsets)
        return (x * 2).sin().values()

    values, offsets = torch.randn(6, 3, dtype=torch.double), torch.tensor([0, 2, 6])
    torch.testing.assert_close(
        torch.compile(f, backend="mindspeed", options=OPTIONS)(values, offsets), f(values, offsets)
    )


def test_dtensors_as_plain_inputs(ranks):
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,))

    def f(x, w):
        return nn.functional.silu(x @ w).redistribute(placements=[Shard(0)])

    placements = []

    def run(g):
        x = DTensor.from_local(torch.ones(2, 4).double(), mesh, [Shard(0)]).requires_grad_()
        w = DTensor.from_local(torch.eye(4).double(), mesh, [Replicate()]).requires_grad_()
        out = g(x, w)
        out.to_local().square().sum().backward()
        placements.append((out.placements, x.grad.placements, w.grad.placements))
        return out.to_local().detach(), x.grad.to_local(), w.grad.to_local()

    torch.testing.assert_close(run(torch.compile(f, backend="mindspeed", options=OPTIONS)), run(f))
    assert placements[0] == placements[1]


def test_subclass_made_inside():
    def f(x, y):
        pair = TwoTensor(x, y)
        return (pair * pair).a + pair.b

    x, y = (torch.randn(3, dtype=torch.double) for _ in range(2))
    torch.testing.assert_close(torch.compile(f, backend="mindspeed", options=OPTIONS)(x, y), f(x, y))


class Tagged(torch.Tensor):
    """A class of its own, and no operator of its own."""


@pytest.mark.parametrize(
    "options", [OPTIONS, pytest.param({"level": 1, "codegen": "inductor"}, marks=pytest.mark.slow)]
)
def test_a_plain_subclass_as_an_input(options):
    x, w = torch.randn(4, 8), torch.ones(8)

    def program(x, w):
        x.mul_(2)
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w).sigmoid().sum(-1)

    eager = program(x.clone(), w)
    compiled = torch.compile(program, backend="mindspeed", fullgraph=True, options=options)
    for _ in range(2):
        tagged = x.clone().as_subclass(Tagged)
        result = compiled(tagged, w)
        torch.testing.assert_close(result.as_subclass(torch.Tensor), eager)
        torch.testing.assert_close(tagged.as_subclass(torch.Tensor), x * 2)


@pytest.mark.parametrize("level", [0, 2])
def test_called_while_an_operator_is_dispatched(level):
    """Below the key at which operators are recorded before autograd: what was compiled gave fake tensors."""
    options = {"level": level, "codegen": "eager"}
    compiled = torch.compile(lambda x, y: (x + y) * 2 + x.sum(), backend="mindspeed", options=options)

    class Dispatched(torch.Tensor):
        @staticmethod
        def __new__(cls, whole):
            return torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=whole.dtype)

        def __init__(self, whole):
            self.whole = whole

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return compiled(*(a.whole for a in args))

    for _ in range(2):
        x, y = torch.randn(4), torch.randn(4)
        torch.testing.assert_close(torch.add(Dispatched(x), Dispatched(y)), (x + y) * 2 + x.sum())
