"""Programs about random numbers, sizes, numbers, types and module state."""

import pytest
import torch
from torch import nn

from tests.torch_suites.torch_programs import Table

TABLE = Table()


@TABLE.add((4, 3))
def random_numbers(x):
    return torch.rand_like(x) * x, torch.nn.functional.dropout(x, 0.5), torch.randn(3), torch.randint(0, 5, (4,))


@TABLE.add((4, 3))
def random_permutation(x):
    return x[torch.randperm(4)], torch.bernoulli(x.sigmoid()), torch.multinomial(x.softmax(-1), 2)


@TABLE.add((4, 3), grad=False)
def random_in_place(x):
    x.uniform_()
    y = torch.empty(3).normal_()
    return x + 1, y.bernoulli_(0.3)


@TABLE.add((0, 3))
def empty(x):
    return x.sum(0), x * 2, x.mean(), torch.cat([x, x])


@TABLE.add(())
def no_dimensions(x):
    return (
        x.sum(),
        x.mean(),
        x.softmax(0),
        x.max(),
        x.argmax(),
        x.squeeze(),
        x.sum(-1),
        x.sum(dim=0, keepdim=True),
        x.var(),
        x.norm(),
    )


@TABLE.add((3,), grad=False)
def integer_modulo(x):
    i = torch.arange(1, 4)
    return (
        i % 2,
        i // 2,
        torch.remainder(i, 3),
        torch.fmod(-i, 2),
        x % 0,
        torch.tensor(5) % torch.tensor(3),
        i ^ 1,
        i << 2,
    )


@TABLE.add((3,), grad=False, fullgraph=False)
def numbers_from_tensors(x):
    return x * x.sum().item(), int(x.shape[0])


@TABLE.add((4, 3))
def casts(x):
    return (
        x.to(torch.float32),
        x.half().float() * 2,
        x.to(torch.int32),
        x.bool(),
        x.type_as(torch.ones(1)),
        x.bfloat16().sum(),
    )


@TABLE.add((4, 3), (4, 3), dynamic=True)
def dynamic_sizes(x, y):
    n, m = x.shape
    return (
        x.view(m, n) * n,
        torch.arange(n),
        y.new_zeros(n, m + 1),
        torch.cat([x, y]).reshape(-1, m),
        n * m,
        y.expand(2, n, m).sum(0),
    )


@TABLE.add((6, 4), dynamic=True)
def dynamic_parts(x):
    return (
        x[: x.shape[0] // 2],
        x.chunk(2),
        x.split(x.shape[0] // 3),
        x.sum() / x.numel(),
        torch.full((x.shape[1],), x.shape[0]),
    )


@TABLE.add((4, 3), grad=False, dynamic=True)
def dynamic_writes(x):
    x[: x.shape[1]].add_(x.shape[0])
    return x.t()


@TABLE.add((4, 3))
def autocast_region(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x.float() @ x.float().t()
    return y.dtype == torch.bfloat16, y.float(), x * 2


@TABLE.add((4, 4), grad=False)
def linear_algebra(x):
    return (
        torch.linalg.inv(x),
        torch.linalg.qr(x),
        torch.det(x),
        torch.linalg.solve(x, x[0]),
        torch.einsum("ij,jk->ik", x, x),
    )


@TABLE.add((4, 3), grad=False, fullgraph=False)
def sparse(x):
    return x.relu().to_sparse().to_dense() @ x.t()


@TABLE.add((3, 8))
def fft(x):
    return torch.fft.irfft(torch.fft.rfft(x) * 2), torch.fft.fft(x).real


@pytest.mark.parametrize("name", sorted(TABLE.programs))
def test_program(name):
    TABLE.assert_same(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["no_dimensions", "dynamic_sizes"])
def test_program_with_generated_code(name):
    TABLE.assert_same(name, codegen="inductor")


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
@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
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
