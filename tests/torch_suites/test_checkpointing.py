"""Activation checkpointing as torch spells it: keywords, nesting, policies, random numbers."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import mindspeed_fx
from tests.torch_suites.torch_programs import OPTIONS, assert_same, leaves

run = functools.partial(checkpoint, use_reentrant=False)


def block(x, w, scale=None, *, shift=0.0):
    y = torch.sigmoid(x @ w) * (1.0 if scale is None else scale)
    return y @ w.t() + shift


def keywords(x, w):
    return run(block, x, w, scale=w.sum(), shift=x.mean()) + run(block, x, w=w, shift=2.0)


def keywords_alone(x, w):
    return run(block, x=x, w=w)


def nested(x, w):
    def inner(y):
        return run(block, y, w) + y

    return run(lambda y: inner(y.sin()).cos(), x)


def several_outputs(x, w):
    a, b = run(lambda y: (y @ w, (y * 2).sum()), x)
    return a * b


def twice_the_same(x, w):
    f = functools.partial(block, scale=3.0)
    return run(f, run(f, x, w), w)


def closed_over(x, w):
    table = torch.arange(4, dtype=x.dtype)
    return run(lambda y: (y * table) @ w, x)


def no_gradient_inside(x, w):
    def f(y):
        with torch.no_grad():
            z = y.sin()
        return y * z @ w

    return run(f, x)


def keeps_random_numbers(x, w):
    return run(lambda y: nn.functional.dropout(torch.sigmoid(y @ w), 0.5), x)


def views_and_inputs(x, w):
    a, b = run(lambda y: (y.t(), y), x)
    return a @ w.t() if a.shape[1] == w.shape[0] else b @ w


def keep_products(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


def policy(x, w):
    return run(block, x, w, context_fn=functools.partial(create_selective_checkpoint_contexts, keep_products))


def policy_nested(x, w):
    return run(lambda y: policy(y, w).sin() + run(block, y, w), x)


PROGRAMS = [
    keywords,
    keywords_alone,
    nested,
    several_outputs,
    twice_the_same,
    closed_over,
    no_gradient_inside,
    views_and_inputs,
    policy,
    policy_nested,
]


@pytest.mark.parametrize("f", PROGRAMS)
def test_values_and_gradients(f):
    assert_same(f, leaves((4, 4), (4, 4)))


@pytest.mark.slow
@pytest.mark.parametrize("f", [policy])
def test_with_generated_code(f):
    assert_same(f, leaves((4, 4), (4, 4)), options={"codegen": "inductor"})


def test_random_numbers_are_those_of_the_forward():
    x, w = leaves((4, 4), (4, 4))()
    compiled = torch.compile(keeps_random_numbers, backend="mindspeed", options=OPTIONS, fullgraph=True)
    out = compiled(x, w)
    out.sum().backward()
    s = torch.sigmoid((x @ w).detach())
    kept = out.detach() != 0
    expected = w.detach() @ (kept * 2 * s * (1 - s)).t()
    torch.testing.assert_close(x.grad.t(), expected)
    assert 0 < kept.sum() < kept.numel()


def saved(f):
    seen = []
    x, w = leaves((4, 4), (4, 4))()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(tuple(t.shape)) or t, lambda t: t):
        torch.compile(f, backend="mindspeed", options={"level": 1, "codegen": "eager"})(x, w)
    return len(seen)


def test_a_policy_keeps_what_it_says():
    def everything(x, w):
        return run(block, x, w)

    assert saved(policy) > saved(everything)


def test_a_checkpointed_module_in_training():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU()) for _ in range(2))

        def forward(self, x, *, scale):
            for layer in self.layers:
                x = x + checkpoint(
                    lambda y, layer=layer, scale=None: layer(y) * scale, x, scale=scale, use_reentrant=False
                )
            return x.sum()

    model = Model().double()
    x, scale = torch.randn(3, 4).double(), torch.tensor(2.0).double()
    expected = torch.autograd.grad(model(x, scale=scale), list(model.parameters()))
    compiled = torch.compile(model, backend="mindspeed", options=OPTIONS, fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(x, scale=scale), list(model.parameters())), expected)
    assert mindspeed_fx.explain(model, x, scale=scale, options={"codegen": "eager"}).graph_count == 1
