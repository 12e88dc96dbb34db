"""Higher-order operators (cond, map, scan, while_loop, flex attention), with tensor inputs and without."""

import pytest
import torch
from torch import nn
from torch._higher_order_ops.foreach_map import foreach_map

from tests.torch_suites.torch_programs import OPTIONS, assert_same, leaves


def branch(x):
    return torch.cond(x.sum() > 0, lambda y: y.sin() * 2, lambda y: y.cos(), (x,))


def branch_of_a_constant():
    x = torch.ones(3)
    return torch.cond(x.sum() > 5, lambda y: y + 1, lambda y: y - 1, (x,))


def loop(x):
    return torch._higher_order_ops.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), (torch.tensor(0), x))


def loop_without_inputs():
    return torch._higher_order_ops.while_loop(
        lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), (torch.tensor(0), torch.ones(2))
    )


def mapped(x, w):
    return torch._higher_order_ops.map(lambda y, v: (y * v).sin(), x, w)


def mapped_without_inputs():
    return torch._higher_order_ops.map(lambda y, v: y * v, torch.ones(3, 2), torch.arange(2.0))


def scanned(x):
    return torch._higher_order_ops.scan(lambda c, y: (c + y, c * y), x[0], x, dim=0)


def scanned_without_inputs():
    return torch._higher_order_ops.scan(lambda c, y: (c + y, c * 2), torch.zeros(2), torch.ones(3, 2), dim=0)


def associative(x):
    return torch._higher_order_ops.associative_scan(lambda a, b: a * b + 1, x, 0, combine_mode="generic")


def associative_without_inputs():
    return torch._higher_order_ops.associative_scan(torch.add, torch.ones(4, 2), 0, combine_mode="generic")


def nested(x):
    return torch.cond(
        x.sum() > 0, lambda y: torch.cond(y.max() > 1, lambda z: z * 2, lambda z: z * 3, (y,)), lambda y: -y, (x,)
    )


def pairs(x, y):
    """Lists of tensors of several shapes, as optimizers have them; ``foreach_map`` itself is for compiled code."""
    lists = [x, y], [x.sin(), y.cos()]
    return tuple(foreach_map(torch.mul, *lists) if torch.compiler.is_compiling() else map(torch.mul, *lists))


@pytest.mark.parametrize("f", [branch, mapped, associative, nested, pairs])
def test_values_and_gradients(f):
    assert_same(f, leaves((4, 3), (3,)) if f in (mapped, pairs) else leaves((4, 3)))


@pytest.mark.parametrize("f", [loop, scanned])
def test_values(f):
    assert_same(f, leaves((4, 3), grad=False))


@pytest.mark.parametrize(
    "f",
    [
        branch_of_a_constant,
        loop_without_inputs,
        mapped_without_inputs,
        scanned_without_inputs,
        associative_without_inputs,
    ],
)
def test_without_inputs(f):
    assert_same(f, leaves())


@pytest.mark.slow
def test_without_inputs_with_generated_code():
    assert_same(branch_of_a_constant, leaves(), options={"codegen": "inductor"})


def attends(q):
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: torch.where(i >= j, s, -float("inf")))


def attends_without_inputs():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q = torch.ones(1, 1, 16, 16)
    return flex_attention(
        q, q, q, block_mask=create_block_mask(lambda b, h, i, j: i >= j, None, None, 16, 16, device="cpu")
    )


def test_flex_attention():
    assert_same(attends, leaves((1, 2, 16, 16), grad=False, dtype=torch.float32), tolerance=1e-5)


def test_flex_attention_without_inputs():
    assert_same(attends_without_inputs, leaves(), tolerance=1e-5)


def test_cond_in_a_model():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda y: self.a(y), lambda y: self.b(y), (x,)).square().sum()

    model = Model().double()
    compiled = torch.compile(model, backend="mindspeed", options=OPTIONS, fullgraph=True)
    for sign in (1, -1):
        x = sign * torch.ones(2, 3).double()
        expected = torch.autograd.grad(model(x), list(model.parameters()), allow_unused=True, materialize_grads=True)
        actual = torch.autograd.grad(compiled(x), list(model.parameters()), allow_unused=True, materialize_grads=True)
        torch.testing.assert_close(actual, expected)
