"""What the backend keeps of its caller: no input, no output, no gradient outlives its last use."""

import gc
import weakref

import pytest
import torch
from torch import nn


def alive(*references):
    gc.collect()
    return [r() is not None for r in references]


@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_inputs_outputs_and_gradients_are_freed(codegen):
    model = nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.LayerNorm(4), nn.Linear(4, 2))
    compiled = torch.compile(model, backend="mindspeed", options={"level": 2, "codegen": codegen})
    for _ in range(2):
        x = torch.randn(3, 4, requires_grad=True)
        out = compiled(x)
        loss = out.sum()
        loss.backward()
        references = [weakref.ref(t) for t in (x, out, loss, x.grad, *(p.grad for p in model.parameters()))]
        del x, out, loss
        for p in model.parameters():
            p.grad = None
        assert alive(*references) == [False] * len(references)


def test_the_model_is_freed():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    compiled = torch.compile(model, backend="mindspeed", options={"level": 2, "codegen": "eager"})
    compiled(torch.randn(3, 4)).sum().backward()
    references = [weakref.ref(p) for p in model.parameters()]
    del model, compiled
    torch._dynamo.reset()
    assert alive(*references) == [False] * len(references)


def test_saved_values_die_with_the_backward():
    seen = []

    class Mark(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, g):
            seen.append(weakref.ref(g.untyped_storage()))
            return g

    def f(x):
        return x.sin().cos()

    compiled = torch.compile(f, backend="mindspeed", options={"codegen": "eager"})
    x = torch.randn(64, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: type(t) is torch.Tensor and saved.append(weakref.ref(t)) or t, lambda t: t
    ):
        y = Mark.apply(compiled(Mark.apply(x)))
    y.sum().backward()
    x.grad = None
    del y
    inside = [r for r in saved if r() is not None and r() is not x]
    gc.collect()
    assert seen and saved and not inside


def test_a_graph_without_gradients_keeps_nothing():
    compiled = torch.compile(lambda x: x.sin() + 1, backend="mindspeed", options={"codegen": "eager"})
    for _ in range(2):
        x = torch.randn(5)
        out = compiled(x)
        references = weakref.ref(x), weakref.ref(out)
        del x, out
        assert alive(*references) == [False, False]


@pytest.mark.parametrize("level", [0, 2])
def test_states_of_an_optimizer_go_with_it(level):
    """At once: nothing that compiles holds them in a circle."""
    model = nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=0.01)

    def step():
        optimizer.step()

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="mindspeed", options={"level": level, "codegen": "eager"})
    model(torch.ones(8)).sum().backward()
    gc.disable()
    try:
        with torch._dynamo.config.patch(run_gc_after_compile=False):
            compiled()
        reference = weakref.ref(optimizer.state[model.weight]["square_avg"])
        optimizer = None
        assert reference() is None
    finally:
        gc.enable()
