"""Programs whose outputs are inputs, views or constants: compiled, they are the same aliases."""

import pytest
import torch

from tests.torch_suites.torch_programs import Table, assert_same, leaves

TABLE = Table()


def cloned(*inputs):
    """Inputs that may be written: no leaves."""
    return tuple(x * 1.0 for x in inputs)


@TABLE.add((4, 3))
def returns_input(x):
    return x


@TABLE.add((4, 3))
def returns_view_of_input(x):
    return x.view(3, 4), x[1:], x.t()


@TABLE.add((4, 3), prepare=cloned)
def returns_view_of_written_input(x):
    x.mul_(2)
    return x[1], x.view(-1)


@TABLE.add((4, 3))
def returns_views_of_one_intermediate(x):
    y = x.sin()
    return y, y.view(-1), y.t(), y[0]


@TABLE.add((4, 3))
def returns_one_twice(x):
    y = x.exp()
    return y, y, {"a": y, "b": (x, y)}


@TABLE.add((4, 3))
def returns_detached(x):
    y = x * 2
    return y, y.detach(), x.detach()


@TABLE.add((4, 3))
def returns_unbound(x):
    return x.unbind(1), (x * 2).chunk(2), (x + 1).split([1, 3])


@TABLE.add((4, 3))
def returns_expanded(x):
    return x.sum(1, keepdim=True).expand(4, 6), x[:, :1].expand(4, 2)


@TABLE.add((4, 3))
def returns_none_and_numbers(x):
    return None, 3, x.shape[0], True, x.sin(), 2.5, "a"


@TABLE.add((4, 3), grad=False)
def returns_integers_and_booleans(x):
    return x.argmax(1), x > 0, (x > 0).sum(), x.sort(0), x.topk(2)


@TABLE.add((4, 3))
def returns_no_tensor(x):
    return x.shape[1] * 2


@TABLE.add((4, 3))
def returns_constants(x):
    return torch.ones(3), torch.tensor([1, 2]), torch.tensor(3.0), x * torch.tensor(2.0)


@TABLE.add((4, 3))
def returns_constant_alone(x):
    return torch.tensor([1.0, 2.0])


@TABLE.add((4, 3))
def no_output(x):
    x + 1


@TABLE.add((3, 4))
def strides_of_outputs(x):
    return x.t() * 2, x.t().contiguous() + 1, x.unsqueeze(0).permute(2, 0, 1).sin(), torch.empty_like(x.t()).zero_()


@TABLE.add((2, 3, 4, 5))
def channels_last(x):
    return x.to(memory_format=torch.channels_last) * 2, x.contiguous(memory_format=torch.channels_last)


@TABLE.add((4, 3))
def complex_numbers(x):
    z = torch.complex(x, x * 2)
    return torch.view_as_real(z * z.conj()), z.abs(), z.conj().imag


@TABLE.add((4, 3))
def double_negation_of_views(x):
    y = torch.view_as_complex(x[:, :2].contiguous())
    return y.imag, y.conj().real


@TABLE.add((4, 3))
def returns_views_of_the_same_shape(x):
    y = x.sin()
    return x.view(4, 3), x.view_as(x), x.expand(4, 3), x.reshape(4, 3), x.contiguous(), y.view(4, 3), y.view(4, 3), y


@TABLE.add((4, 3), make=lambda: (torch.nn.Parameter(torch.ones(4, 3)),))
def returns_view_of_parameter(x):
    return x.view(4, 3)


@TABLE.add((3, 3), prepare=cloned)
def transposes_a_view_in_place(x):
    y = x.view(3, 3)
    y.t_()
    return x * torch.arange(3.0), y


@TABLE.add((3, 3))
def transposes_a_view_of_an_intermediate_in_place(x):
    y = x.sin()
    z = torch.ops.aten.alias(y)
    z.t_()
    return y * torch.arange(3.0), z * 2


@TABLE.add((3, 3))
def views_without_gradients(x):
    with torch.no_grad():
        y = x.view(3, 3)
        z = x.to(x.dtype)
    return x.sin() * y, x.cos() * z


def expanded_gradients_are_taken():
    """False for a torch whose AOTAutograd copies a gradient of an expanded output into memory of that shape."""
    x = torch.ones(4, 3, requires_grad=True)
    out = torch.compile(lambda x: x.sum(1, keepdim=True).expand(4, 6), backend="aot_eager")(x)
    try:
        out.backward(torch.ones(4, 6))
    except RuntimeError as error:
        assert "single memory location" in str(error)
        return False
    return True


@pytest.mark.parametrize("name", sorted(TABLE.programs))
def test_program(name):
    if name == "returns_expanded" and not expanded_gradients_are_taken():
        pytest.skip("this torch's AOTAutograd refuses gradients of expanded outputs")
    TABLE.assert_same(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["returns_views_of_one_intermediate"])
def test_program_with_generated_code(name):
    TABLE.assert_same(name, codegen="inductor")


def test_a_view_outlives_what_its_base_is_set_to():
    """``set_`` ends the graph before it: the view that leaves it is a tensor of its own."""

    def program(x):
        y, other = x.view(3, 3), torch.arange(9, dtype=x.dtype)
        with torch.no_grad():
            x.set_(other)
            x.set_(y)
        return x + other.reshape(3, 3), y

    assert_same(program, leaves((3, 3)), prepare=cloned, fullgraph=False)


FRESH = {
    "tensor": lambda x: torch.tensor([1, 2]),
    "new_tensor": lambda x: x.new_tensor([1.0, 2.0]),
    "as_tensor": lambda x: torch.as_tensor([1.0, 2.0]),
    "arange": lambda x: torch.arange(2),
    "clone": lambda x: x.detach().clone(),
    "detach_": lambda x: (x.detach() * 2).detach_(),
    "t_": lambda x: x.detach().clone().t_(),
    "unsqueeze_": lambda x: x.detach().clone().unsqueeze_(0).squeeze_(0),
}
"""What makes a tensor of two elements that no caller has seen."""


@pytest.mark.parametrize("fresh", FRESH)
def test_two_views_of_a_fresh_tensor_are_written_in_the_next_graph(fresh):
    def program(x):
        whole = FRESH[fresh](x)
        first, all_of_it = whole[:1], whole.view(2, 1)
        first.add_(1)
        torch._dynamo.graph_break()
        first.mul_(3)
        all_of_it.add_(2)
        return first, all_of_it

    assert_same(program, leaves((2,)), fullgraph=False)
