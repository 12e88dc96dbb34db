"""Small programs about mutation, aliasing, sizes and gradients: compiled, each does what it does eagerly."""

import pytest
import torch
from torch import nn
from torch_suites.torch_programs import assert_same, leaves

PROGRAMS = {}


def program(*sizes, grad=True, dtype=torch.float64, make=None, **how):
    """Put a function into the table, with the sizes of its inputs and how to compare it."""

    def add(f):
        PROGRAMS[f.__name__] = (f, make or leaves(*sizes, grad=grad, dtype=dtype), how)
        return f

    return add


def cloned(*inputs):
    """Inputs that may be written: no leaves."""
    return tuple(x * 1.0 if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs)


def bases(*inputs):
    """Two views of one base that overlap."""
    base = inputs[0] * 1.0
    return base[:3], base[1:]


# ------------------------------------------------------------------ inputs written


@program((4, 3), prepare=cloned)
def writes_input(x):
    x.mul_(2)
    return x + 1


@program((4, 3), prepare=cloned)
def writes_and_returns_input(x):
    x.add_(1)
    return x, x.sin()


@program((4, 3), (4, 3), prepare=cloned)
def writes_only_one(x, y):
    x.copy_(y.sin())
    return y * x


@program((4, 3), prepare=cloned)
def writes_view_of_input(x):
    x[1].mul_(3)
    x.t()[0].add_(1)
    return x.sum(0)


@program((4, 3), prepare=cloned)
def writes_then_detaches(x):
    y = x.detach()
    y.mul_(2)
    return x * 2


@program((4, 3), (4, 3))
def writes_leaf_without_grad(x, y):
    with torch.no_grad():
        x.mul_(2)
    return (x.sin() * y).sum()


@program((4, 3), (4, 3))
def writes_data(x, y):
    x.data.add_(y.detach())
    return x * y


@program((4, 3), grad=False)
def writes_twice(x):
    x.add_(1)
    y = x * 2
    x.sub_(0.5)
    return y + x


@program((4, 3), grad=False)
def writes_under_no_grad_and_back(x):
    with torch.no_grad():
        x.relu_()
    x.add_(1)
    return x.exp()


@program((4, 3), grad=False, fullgraph=False)
def transposes_in_place(x):
    x.t_()
    return x * 2


@program((4, 3), grad=False, fullgraph=False)
def unsqueezes_in_place(x):
    x.unsqueeze_(1)
    x.mul_(2)
    return x.sum(0)


@program((4, 3), (2, 5), grad=False, fullgraph=False)
def sets_storage(x, y):
    z = x * 2
    z.set_(y)
    return z + 1


@program((4, 3), grad=False, fullgraph=False)
def resizes(x):
    z = x + 1
    z.resize_(2, 6)
    return z * 2


@program((6,), grad=False)
def as_strided_is_written(x):
    x.as_strided((2, 2), (1, 2), 1).mul_(5)
    return x.clone()


@program((4, 3), grad=False)
def sets_items(x):
    x[0, 1] = 5.0
    x[1:3] = x[2:4].clone() * 2
    return x.cos()


@program((5, 3), grad=False)
def index_puts(x):
    i = torch.tensor([0, 2, 2])
    x.index_put_((i,), torch.ones(3, 3, dtype=x.dtype), accumulate=True)
    x.index_add_(0, i, torch.ones(3, 3, dtype=x.dtype))
    return x.scatter_add(0, torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 3, dtype=x.dtype))


@program((4, 3), (4, 3), grad=False)
def out_argument(x, y):
    torch.add(x, 1, out=y)
    return y * 2


@program((5,), prepare=bases)
def overlapping_views(x, y):
    x.mul_(2)
    y.add_(1)
    return x + y


@program((5,), prepare=lambda x: (x, x))
def same_input_twice(x, y):
    return x * y.sin()


@program((5,), grad=False, prepare=lambda x: (x, x))
def same_input_twice_written(x, y):
    x.add_(1)
    return x * y


@program((5,), prepare=lambda x: ((b := x * 1.0), b.view(5, 1)))
def input_and_its_view_written(x, y):
    y.mul_(2)
    return x + y.squeeze(1)


# ------------------------------------------------------------------ outputs that are aliases


@program((4, 3))
def returns_input(x):
    return x


@program((4, 3))
def returns_view_of_input(x):
    return x.view(3, 4), x[1:], x.t()


@program((4, 3), prepare=cloned)
def returns_view_of_written_input(x):
    x.mul_(2)
    return x[1], x.view(-1)


@program((4, 3))
def returns_views_of_one_intermediate(x):
    y = x.sin()
    return y, y.view(-1), y.t(), y[0]


@program((4, 3))
def returns_one_twice(x):
    y = x.exp()
    return y, y, {"a": y, "b": (x, y)}


@program((4, 3))
def returns_detached(x):
    y = x * 2
    return y, y.detach(), x.detach()


@program((4, 3))
def returns_unbound(x):
    return x.unbind(1), (x * 2).chunk(2), (x + 1).split([1, 3])


@program((4, 3))
def returns_expanded(x):
    return x.sum(1, keepdim=True).expand(4, 6), x[:, :1].expand(4, 2)


@program((4, 3))
def returns_none_and_numbers(x):
    return None, 3, x.shape[0], True, x.sin(), 2.5, "a"


@program((4, 3), grad=False)
def returns_integers_and_booleans(x):
    return x.argmax(1), x > 0, (x > 0).sum(), x.sort(0), x.topk(2)


@program((4, 3))
def returns_no_tensor(x):
    return x.shape[1] * 2


@program((4, 3))
def returns_constants(x):
    return torch.ones(3), torch.tensor([1, 2]), torch.tensor(3.0), x * torch.tensor(2.0)


@program((4, 3))
def returns_constant_alone(x):
    return torch.tensor([1.0, 2.0])


@program((4, 3))
def no_output(x):
    x + 1


@program((3, 4))
def strides_of_outputs(x):
    return x.t() * 2, x.t().contiguous() + 1, x.unsqueeze(0).permute(2, 0, 1).sin(), torch.empty_like(x.t()).zero_()


@program((2, 3, 4, 5))
def channels_last(x):
    return x.to(memory_format=torch.channels_last) * 2, x.contiguous(memory_format=torch.channels_last)


@program((4, 3))
def complex_numbers(x):
    z = torch.complex(x, x * 2)
    return torch.view_as_real(z * z.conj()), z.abs(), z.conj().imag


@program((4, 3))
def double_negation_of_views(x):
    y = torch.view_as_complex(x[:, :2].contiguous())
    return y.imag, y.conj().real


# ------------------------------------------------------------------ gradients


@program((4, 3))
def unused_input_gradient(x):
    return (x.detach() * 2).requires_grad_(False), x.sum()


@program((4, 3), (4, 3))
def one_input_without_gradient(x, y):
    return x * y.detach()


@program((4, 3))
def gradient_of_nothing(x):
    with torch.no_grad():
        return x * 2


@program((4, 3))
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


@program((4, 3), fullgraph=False)
def gradient_inside(x):
    y = (x * x).sum()
    return torch.autograd.grad(y, x, create_graph=False)[0]


@program((4, 3), fullgraph=False)
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


@program((4, 3), (4, 3))
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


@program((4, 3))
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


@program((4, 3), prepare=cloned, fullgraph=False)
def own_gradient_in_place(x):
    return InPlace.apply(x.clone()).sin()


@program((4, 3))
def power_of_zero(x):
    z = x * 0
    return z.abs() ** 2, torch.where(x > 0, x, z).norm(dim=1), z.abs() + x.clamp(-0.1, 0.1)


# ------------------------------------------------------------------ random numbers


@program((4, 3))
def random_numbers(x):
    return torch.rand_like(x) * x, torch.nn.functional.dropout(x, 0.5), torch.randn(3), torch.randint(0, 5, (4,))


@program((4, 3))
def random_permutation(x):
    return x[torch.randperm(4)], torch.bernoulli(x.sigmoid()), torch.multinomial(x.softmax(-1), 2)


@program((4, 3), grad=False)
def random_in_place(x):
    x.uniform_()
    y = torch.empty(3).normal_()
    return x + 1, y.bernoulli_(0.3)


# ------------------------------------------------------------------ sizes, numbers and integers


@program((0, 3))
def empty(x):
    return x.sum(0), x * 2, x.mean(), torch.cat([x, x])


@program(())
def no_dimensions(x):
    return x.sum(), x.mean(), x.softmax(0), x.max(), x.argmax(), x.squeeze(), x.sum(-1), x.sum(dim=0, keepdim=True), x.var(), x.norm()


@program((3,), grad=False)
def integer_modulo(x):
    i = torch.arange(1, 4)
    return i % 2, i // 2, torch.remainder(i, 3), torch.fmod(-i, 2), x % 0, torch.tensor(5) % torch.tensor(3), i ^ 1, i << 2


@program((3,), grad=False, fullgraph=False)
def numbers_from_tensors(x):
    return x * x.sum().item(), int(x.shape[0])


@program((4, 3))
def casts(x):
    return x.to(torch.float32), x.half().float() * 2, x.to(torch.int32), x.bool(), x.type_as(torch.ones(1)), x.bfloat16().sum()


@program((4, 3), (4, 3), dynamic=True)
def dynamic_sizes(x, y):
    n, m = x.shape
    return x.view(m, n) * n, torch.arange(n), y.new_zeros(n, m + 1), torch.cat([x, y]).reshape(-1, m), n * m, y.expand(2, n, m).sum(0)


@program((6, 4), dynamic=True)
def dynamic_parts(x):
    return x[: x.shape[0] // 2], x.chunk(2), x.split(x.shape[0] // 3), x.sum() / x.numel(), torch.full((x.shape[1],), x.shape[0])


@program((4, 3), grad=False, dynamic=True)
def dynamic_writes(x):
    x[: x.shape[1]].add_(x.shape[0])
    return x.t()


@program((4, 3))
def autocast_region(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x.float() @ x.float().t()
    return y.dtype == torch.bfloat16, y.float(), x * 2


@program((4, 4), grad=False)
def linear_algebra(x):
    return torch.linalg.inv(x), torch.linalg.qr(x), torch.det(x), torch.linalg.solve(x, x[0]), torch.einsum("ij,jk->ik", x, x)


@program((4, 3), grad=False, fullgraph=False)
def sparse(x):
    return x.relu().to_sparse().to_dense() @ x.t()


@program((3, 8))
def fft(x):
    return torch.fft.irfft(torch.fft.rfft(x) * 2), torch.fft.fft(x).real


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_program(name):
    f, make, how = PROGRAMS[name]
    assert_same(f, make, **how)


@pytest.mark.parametrize("name", ["overlapping_views", "returns_views_of_one_intermediate", "no_dimensions", "dynamic_sizes"])
def test_program_with_generated_code(name):
    f, make, how = PROGRAMS[name]
    assert_same(f, make, options={"codegen": "inductor"}, **how)


# ------------------------------------------------------------------ modules


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3).double()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(3).double())
        self.constant = torch.tensor([1.0, 2.0, 3.0]).double()

    def forward(self, x):
        self.count += 1
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.norm(x) * self.constant + self.mean * self.count


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_buffers_are_written(train, codegen):
    eager, model = Counts().train(train), Counts().train(train)
    compiled = torch.compile(model, backend="mindspeed", options={"level": 2, "codegen": codegen}, fullgraph=True)
    x = torch.randn(5, 3).double()
    for _ in range(3):
        expected, actual = eager(x), compiled(x)
        torch.testing.assert_close(actual, expected)
        expected.sum().backward()
        actual.sum().backward()
    for (name, a), b in zip(eager.state_dict().items(), model.state_dict().values()):
        torch.testing.assert_close(b, a, msg=name)
    for (name, p), q in zip(eager.named_parameters(), model.parameters()):
        torch.testing.assert_close(q.grad, p.grad, msg=name)


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


def test_gradients_that_are_not_contiguous():
    def f(x):
        return x.t() * 2

    x = torch.randn(3, 4, dtype=torch.double, requires_grad=True)
    compiled = torch.compile(f, backend="mindspeed", options={"level": 2, "codegen": "eager"})
    for weight in (torch.randn(3, 4).double().t(), torch.ones(1, 1).double().expand(4, 3), torch.randn(4, 3).double()):
        expected = torch.autograd.grad(f(x), x, weight)[0]
        torch.testing.assert_close(torch.autograd.grad(compiled(x), x, weight)[0], expected)
