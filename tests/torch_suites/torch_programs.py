"""Run one small program eagerly and compiled, and say where the two differ."""

import contextlib
import copy

import torch
from torch.utils import _pytree as pytree

OPTIONS = {"level": 2, "codegen": "eager"}


def leaves(*sizes, grad=True, dtype=torch.float64):
    """A maker of seeded leaf tensors of the given sizes."""

    def make():
        generator = torch.Generator().manual_seed(7)
        return tuple(torch.randn(size, generator=generator, dtype=dtype).requires_grad_(grad) for size in sizes)

    return make


def compile_inner_step(optimizer, **how):
    """As in torch's own tests: the step without the wrappers at which Dynamo breaks the graph.

    Args:
        how: what torch.compile is told.
    """
    inner = optimizer.step.__wrapped__.__wrapped__
    compiled = torch.compile(lambda: inner(optimizer), fullgraph=True, **how)
    optimizer._opt_called = True

    def step():
        with torch.no_grad():
            compiled()

    return step


def observe(program, inputs, *, prepare=None, backward=True, calls=1):
    """What a caller sees of ``program``: outputs, aliases, inputs afterwards, gradients, random state, grad mode."""
    torch.manual_seed(3)
    grad_mode = torch.is_grad_enabled()
    try:
        for _ in range(calls):
            given = prepare(*inputs) if prepare else inputs
            outputs = program(*given)
        seen = {"grad mode": torch.is_grad_enabled()}
    finally:
        torch.set_grad_enabled(grad_mode)
    flat = pytree.tree_leaves(outputs)
    tensors = [t for t in flat if isinstance(t, torch.Tensor)]
    seen["outputs"] = [copy_of(t) for t in flat]
    seen["requires grad"] = [(t.requires_grad, t.is_leaf) for t in tensors]
    memory = [t for t in [*pytree.tree_leaves(given), *tensors] if isinstance(t, torch.Tensor)]
    seen["layout"] = [(tuple(t.shape), t.stride(), t.dtype) for t in memory]
    seen["same object"] = [[a is b for b in memory] for a in memory]
    seen["same memory"] = [[same_memory(a, b) for b in memory] for a in memory]
    differentiable = [t for t in tensors if t.requires_grad]
    if backward and differentiable:
        with contextlib.suppress(StopIteration):
            sum(
                (t.double() * torch.linspace(1, 2, t.numel(), dtype=torch.float64).reshape(t.shape)).sum()
                for t in differentiable
            ).backward()
    seen["inputs"] = [copy_of(t) for t in pytree.tree_leaves(given)]
    seen["gradients"] = [
        copy_of(t.grad) if t.is_leaf else None for t in pytree.tree_leaves(inputs) if isinstance(t, torch.Tensor)
    ]
    seen["random state"] = torch.get_rng_state()
    return seen


def copy_of(value):
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value)


def same_memory(a, b):
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata if a.layout == b.layout == torch.strided else False


def assert_same(program, make, *, options=None, dynamic=None, fullgraph=True, ignore=(), tolerance=1e-9, **how):
    """``program`` compiled does to fresh inputs of ``make`` what it does eagerly."""
    torch._dynamo.reset()
    expected = observe(program, make(), **how)
    compiled = torch.compile(
        program, backend="mindspeed", options={**OPTIONS, **(options or {})}, dynamic=dynamic, fullgraph=fullgraph
    )
    actual = observe(compiled, make(), **how)
    for key in expected.keys() - set(ignore):
        assert_equal(expected[key], actual[key], key, tolerance)


def assert_equal(a, b, what, tolerance=1e-9):
    flat, other = pytree.tree_leaves(a), pytree.tree_leaves(b)
    assert len(flat) == len(other), what
    for x, y in zip(flat, other):
        if isinstance(x, torch.Tensor):
            assert isinstance(y, torch.Tensor), f"{what}: {y} for a tensor"
            torch.testing.assert_close(
                y, x, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m: f"{what}: {m}"
            )
        else:
            assert x == y, f"{what}: {y} for {x}"


class Table:
    """Programs by name, each with a maker of its inputs and how it is compared."""

    def __init__(self):
        self.programs = {}

    def add(self, *sizes, grad=True, make=None, **how):
        """Put a function into the table, with the sizes of its inputs and how to compare it."""

        def put(f):
            self.programs[f.__name__] = (f, make or leaves(*sizes, grad=grad), how)
            return f

        return put

    def assert_same(self, name, **options):
        f, make, how = self.programs[name]
        assert_same(f, make, options=options, **how)
