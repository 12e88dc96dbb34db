"""Rows that a mask of numbers hides whole: their weights are those of softmax, backward too.

A score less 1e9 has no digits left, so that all keys weigh the same; nor has the log-sum-exp of the row, which says
-1e9 whatever the number of keys.
"""

from __future__ import annotations

import pytest
import torch

import mindspeed_fx
from mindspeed_fx import kernels

ops = torch.ops.mindspeed
VALUES = (-1e4, -1e9, torch.finfo(torch.float32).min)


def attend(q, k, v, mask, softcap):
    scores = q @ k.transpose(-1, -2) * 0.25
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    return torch.softmax(scores + mask, -1) @ v


def inputs(value, dtype):
    q, k, v = (torch.randn(1, 2, 70, 16, dtype=dtype, requires_grad=True) for _ in range(3))
    keep = torch.rand(1, 1, 70, 70) < 0.6
    keep[..., 3, :] = keep[..., 66, :] = False
    return q, k, v, torch.zeros(1, 1, 70, 70, dtype=dtype).masked_fill(~keep, max(value, torch.finfo(dtype).min))


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_hidden_rows_are_those_of_the_model(value, softcap, dtype):
    args = (*inputs(value, dtype), softcap)
    report = mindspeed_fx.explain(attend, *args)
    assert "fusion.attention" in str(report)
    results = []
    for run in (attend, torch.compile(attend, backend="mindspeed", fullgraph=True, options={"codegen": "eager"})):
        out = run(*args)
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), args[:3])])
    tolerance = 2e-5 if dtype == torch.float32 else 1e-12
    for have, want in zip(*results, strict=True):
        torch.testing.assert_close(have, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", VALUES)
def test_every_kernel_of_this_processor(dtype, value):
    *qkv, mask = inputs(value, dtype)
    q, k, v = (x.detach() for x in qkv)
    grad, settings = torch.randn_like(q), (mask, False, 0.25)
    out, lse = ops.attention(q, k, v, *settings)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    want = torch.autograd.grad(attend(*(x.float() for x in wide), mask.float(), 0.0).double(), wide, grad.double())
    args = (grad, q, k, v, out, lse, *settings)
    operator, tried = kernels.REGISTRY[ops.attention_backward.default], 0
    for lowering in [None, *operator.lowerings["cpu"]]:
        if lowering is not None and lowering.supports(*args) is not None:
            continue
        tried += 1
        for have, w in zip((lowering.build if lowering else operator.reference)(*args), want, strict=True):
            bound = 1e-5 if dtype == torch.float32 else 3e-2
            torch.testing.assert_close(have.double(), w, rtol=bound, atol=bound * float(w.abs().max()))
    assert tried >= 1


def test_a_log_sum_exp_of_more_keys_is_taken_as_it_is():
    """As in a step of a ring: the parts' gradients are the parts of the whole one."""
    q, k, v, mask = (x.detach() for x in inputs(-1e4, torch.float64))
    grad = torch.randn_like(q)
    out, lse = ops.attention(q, k, v, mask, False, 0.25)
    _, *whole = ops.attention_backward(grad, q, k, v, out, lse, mask, False, 0.25)
    for keys in (slice(0, 30), slice(30, 70)):
        part = k[:, :, keys], v[:, :, keys], out, lse, mask[..., keys]
        _, *parts = ops.attention_backward(grad, q, *part, False, 0.25)
        for have, want in zip(parts, whole, strict=True):
            torch.testing.assert_close(have, want[:, :, keys], rtol=1e-10, atol=1e-10)
