"""Programs that write their inputs: compiled, each does to its caller's tensors what it does eagerly."""

import pytest
import torch

from tests.torch_suites.torch_programs import Table

TABLE = Table()


def cloned(*inputs):
    """Inputs that may be written: no leaves."""
    return tuple(x * 1.0 if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs)


def bases(*inputs):
    """Two views of one base that overlap."""
    base = inputs[0] * 1.0
    return base[:4], base[1:]


@TABLE.add((4, 3), prepare=cloned)
def writes_input(x):
    x.mul_(2)
    return x + 1


@TABLE.add((4, 3), prepare=cloned)
def writes_and_returns_input(x):
    x.add_(1)
    return x, x.sin()


@TABLE.add((4, 3), (4, 3), prepare=cloned)
def writes_only_one(x, y):
    x.copy_(y.sin())
    return y * x


@TABLE.add((4, 3), prepare=cloned)
def writes_view_of_input(x):
    x[1].mul_(3)
    x.t()[0].add_(1)
    return x.sum(0)


@TABLE.add((4, 3), prepare=cloned)
def writes_then_detaches(x):
    y = x.detach()
    y.mul_(2)
    return x * 2


@TABLE.add((4, 3), (4, 3))
def writes_leaf_without_grad(x, y):
    with torch.no_grad():
        x.mul_(2)
    return (x.sin() * y).sum()


@TABLE.add((4, 3), (4, 3))
def writes_data(x, y):
    x.data.add_(y.detach())
    return x * y


@TABLE.add((4, 3), grad=False)
def writes_twice(x):
    x.add_(1)
    y = x * 2
    x.sub_(0.5)
    return y + x


@TABLE.add((4, 3), grad=False)
def writes_under_no_grad_and_back(x):
    with torch.no_grad():
        x.relu_()
    x.add_(1)
    return x.exp()


@TABLE.add((4, 3), grad=False, fullgraph=False)
def transposes_in_place(x):
    x.t_()
    return x * 2


@TABLE.add((4, 3), grad=False, fullgraph=False)
def unsqueezes_in_place(x):
    x.unsqueeze_(1)
    x.mul_(2)
    return x.sum(0)


@TABLE.add((4, 3), (2, 5), grad=False, fullgraph=False)
def sets_storage(x, y):
    z = x * 2
    z.set_(y)
    return z + 1


@TABLE.add((4, 3), grad=False, fullgraph=False)
def resizes(x):
    z = x + 1
    z.resize_(2, 6)
    return z * 2


@TABLE.add((6,), grad=False)
def as_strided_is_written(x):
    x.as_strided((2, 2), (1, 2), 1).mul_(5)
    return x.clone()


@TABLE.add((4, 3), grad=False)
def sets_items(x):
    x[0, 1] = 5.0
    x[1:3] = x[2:4].clone() * 2
    return x.cos()


@TABLE.add((5, 3), grad=False)
def index_puts(x):
    i = torch.tensor([0, 2, 2])
    x.index_put_((i,), torch.ones(3, 3, dtype=x.dtype), accumulate=True)
    x.index_add_(0, i, torch.ones(3, 3, dtype=x.dtype))
    return x.scatter_add(0, torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 3, dtype=x.dtype))


@TABLE.add((4, 3), (4, 3), grad=False)
def out_argument(x, y):
    torch.add(x, 1, out=y)
    return y * 2


@TABLE.add((5,), grad=False, prepare=bases)
def overlapping_views(x, y):
    x.mul_(2)
    y.add_(1)
    return x + y


@TABLE.add((5,), prepare=lambda x: (x, x))
def same_input_twice(x, y):
    return x * y.sin()


@TABLE.add((5,), grad=False, prepare=lambda x: (x, x))
def same_input_twice_written(x, y):
    x.add_(1)
    return x * y


@TABLE.add((5,), prepare=lambda x: ((b := x * 1.0), b.view(5, 1)))
def input_and_its_view_written(x, y):
    y.mul_(2)
    return x + y.squeeze(1)


@TABLE.add((3, 3), (3, 3), (3, 3))
def average_written_without_gradients(x, average, weight):
    """What takes gradients and has none is left without, not with zeros, by which an optimizer would step."""
    with torch.no_grad():
        target = x @ average
    result = x * weight + target
    with torch.no_grad():
        average.lerp_(weight, 0.1)
    return result


@pytest.mark.parametrize("name", sorted(TABLE.programs))
def test_program(name):
    TABLE.assert_same(name)


@pytest.mark.parametrize("name", ["overlapping_views"])
def test_program_with_generated_code(name):
    TABLE.assert_same(name, codegen="inductor")
