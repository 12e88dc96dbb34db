"""What a compiled function leaves of the grad mode, and what it does under each."""

import pytest
import torch

from tests.torch_suites.torch_programs import OPTIONS, assert_same, leaves


def leaves_it_off(x):
    y = x.sin()
    torch.set_grad_enabled(False)
    return y * 2


def leaves_it_on(x):
    torch.set_grad_enabled(True)
    return x.cos()


def off_and_on_again(x):
    torch.set_grad_enabled(False)
    y = x.sin()
    torch.set_grad_enabled(True)
    return x * y


def turns_it_off_last(x):
    y = x.exp()
    z = y * y
    torch._C._set_grad_enabled(False)
    return z


def need_torch_to_leave_it():
    """AOTAutograd of torch 2.11 forgets the mode where no result has a gradient, for torch's own backends too."""
    torch._dynamo.reset()
    with torch.enable_grad():
        torch.compile(leaves_it_off, backend="aot_eager")(torch.ones(1, requires_grad=True).clone())
        if torch.is_grad_enabled():
            pytest.skip("this torch's aot_eager forgets the grad mode")


@pytest.mark.parametrize("f", [leaves_it_off, leaves_it_on, off_and_on_again, turns_it_off_last])
def test_the_mode_is_left_as_the_function_leaves_it(f):
    if f is leaves_it_off:
        need_torch_to_leave_it()
    assert_same(f, leaves((4, 3)))


def test_the_mode_is_left_by_generated_code():
    need_torch_to_leave_it()
    assert_same(leaves_it_off, leaves((4, 3)), options={"codegen": "inductor"})


@pytest.mark.parametrize("f", [leaves_it_off, leaves_it_on])
def test_called_without_gradients(f):
    x = torch.ones(3, dtype=torch.double, requires_grad=True)
    seen = []
    for g in (f, torch.compile(f, backend="mindspeed", options=OPTIONS)):
        for _ in range(2):
            with torch.no_grad():
                out = g(x)
                seen.append((torch.is_grad_enabled(), out.requires_grad))
    assert seen[:2] == seen[2:]


def test_a_failed_compilation_leaves_the_mode():
    def f(x):
        torch.set_grad_enabled(False)
        return x * 2

    with pytest.raises(Exception, match="fusion.nothing"):
        torch.compile(f, backend="mindspeed", options={**OPTIONS, "enable": ["fusion.nothing"]})(torch.ones(2))
    assert torch.is_grad_enabled()


def test_inference_mode_inside():
    def f(x):
        with torch.inference_mode():
            y = x * 2
        return x.sin(), y

    assert_same(f, leaves((4, 3)), fullgraph=False)
