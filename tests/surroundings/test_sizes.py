"""Every operator where a size is zero or one: kernels against references, gradients against those of autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mindspeed_fx.kernels import REGISTRY
from mindspeed_fx.planning.verify_device.operators import calls

ops = torch.ops.mindspeed
SIZES = {  # batch, sequence, heads, heads of keys, head width, hidden size
    "no batch": (0, 3, 2, 1, 4, 8),
    "no sequence": (2, 0, 2, 1, 4, 8),
    "no head width": (2, 3, 2, 1, 0, 8),
    "no features": (2, 3, 2, 1, 4, 0),
    "one row": (2, 1, 2, 1, 4, 8),
    "ones": (1, 1, 1, 1, 2, 2),
}

TRAINED = {"mindspeed.qk_norm_rope": 2, "mindspeed.attention_dropout": 3}
"""Operator -> its first arguments, which alone have gradients."""


def tensors(values):
    return [v for v in (values if isinstance(values, (tuple, list)) else [values]) if isinstance(v, torch.Tensor)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SIZES)
def test_kernels_are_the_references(name, dtype):
    tolerance = {torch.bfloat16: 5e-2, torch.float32: 1e-4, torch.float64: 1e-9}[dtype]
    served = 0
    for operator, args in calls(*SIZES[name], dtype):
        expected = tensors(operator.reference(*args))
        kernel, _ = operator.choose("cpu", args, {})
        if kernel is None:
            continue
        served += 1
        results = tensors(kernel.build(*args))
        if name == "no features" and "layer_norm" in operator.name:  # statistics of nothing are not defined
            results, expected = ([t for t in values if t.numel() == 0] for values in (results, expected))
        for result, want in zip(results, expected, strict=True):
            assert result.shape == want.shape and result.dtype == want.dtype, (operator.name, kernel.kernel)
            torch.testing.assert_close(
                result, want, rtol=tolerance, atol=tolerance, msg=lambda m, o=operator: f"{o.name}: {m}"
            )
    assert served > 15


GRADIENTS_ELSEWHERE = {"mindspeed.ring_attention_update", "mindspeed.linear_fp8"}
"""Operators whose gradient is not autograd's of the reference: rounding counts as identity."""


@pytest.mark.parametrize("name", SIZES)
def test_gradients_are_those_of_the_references(name):
    compared = set()
    for operator, args in calls(*SIZES[name], torch.float64):
        if operator.opaque or "backward" in operator.name or operator.name in GRADIENTS_ELSEWHERE:
            continue
        grads = []
        for function in (operator.overload, operator.reference):
            leaves = [
                a.detach().clone().requires_grad_(a.is_floating_point() and i < TRAINED.get(operator.name, 9))
                if isinstance(a, torch.Tensor)
                else a
                for i, a in enumerate(args)
            ]
            torch.manual_seed(1)  # of dropout
            results = tensors(function(*leaves))
            torch.manual_seed(2)
            first = next((r for r in results[:1] if r.requires_grad), None)
            inputs = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
            if first is None or not inputs:
                break
            grads.append(torch.autograd.grad(first, inputs, torch.randn_like(first), allow_unused=True))
        for mine, own in zip(*grads) if len(grads) == 2 else ():
            if mine is not None and own is not None:
                compared.add(operator.name)
                torch.testing.assert_close(mine, own, msg=lambda m, o=operator: f"{o.name}: {m}")
    assert len(compared) > 15, compared


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", [None, "bool"])
@pytest.mark.parametrize(
    "heads, kv_heads, queries, keys, dim, v_dim",
    [
        (2, 2, 0, 3, 4, 4),
        (2, 1, 3, 0, 4, 4),
        (2, 2, 0, 0, 4, 4),
        (2, 1, 3, 3, 0, 4),
        (2, 1, 3, 3, 4, 0),
        (0, 0, 3, 3, 4, 4),
    ],
)
def test_every_attention_kernel_of_no_elements(dtype, mask, heads, kv_heads, queries, keys, dim, v_dim):
    """ATen's flash kernel divides by zero there, small products cannot be made, and either ended the process."""
    shapes = ((heads, queries, dim), (kv_heads, keys, dim), (kv_heads, keys, v_dim), (heads, queries, v_dim))
    q, k, v, grad = (torch.randn(1, *shape, dtype=dtype) for shape in shapes)
    allowed = None if mask is None else torch.ones(1, 1, queries, keys, dtype=torch.bool)
    forward, backward = REGISTRY[ops.attention.default], REGISTRY[ops.attention_backward.default]
    for causal in (True, False) if mask is None else (False,):
        args = (q, k, v, allowed, causal, 0.5)
        expected = forward.reference(*args)
        back = (grad, q, k, v, *expected, *args[3:])
        assert expected[0].shape == (1, heads, queries, v_dim)
        for operator, given, want in ((forward, args, expected), (backward, back, backward.reference(*back))):
            for kernel in operator.lowerings["cpu"]:
                if kernel.supports(*given) is None:
                    for a, b in zip(kernel.build(*given), want, strict=True):
                        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("queries, keys", [(4, 0), (0, 4), (1, 1)])
def test_attention_of_no_keys_compiles(queries, keys):
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v).sum() + q.sum()

    inputs = [torch.randn(1, 2, n, 4, dtype=torch.double, requires_grad=True) for n in (queries, keys, keys)]
    expected = torch.autograd.grad(attend(*inputs), inputs)
    compiled = torch.compile(attend, backend="mindspeed", options={"codegen": "eager"})
    for grad, want in zip(torch.autograd.grad(compiled(*inputs), inputs), expected, strict=True):
        torch.testing.assert_close(grad, want)


def test_a_number_of_tokens_that_is_known_only_at_run_time_may_be_zero():
    """Tokens that a mask picks: attention among them, and none at all in the second call."""

    def attend(x, picked):
        rows = x[picked]
        q = rows.view(1, rows.shape[0], 2, 4).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True).sum() + x.sum()

    def step(function, x, picked):
        x.grad = None
        function(x, picked).backward()
        return x.grad

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(attend, backend="mindspeed", options={"codegen": "eager"})
        for picked in (torch.tensor([True, False, True, True]), torch.zeros(4, dtype=torch.bool)):
            x = torch.randn(4, 8, requires_grad=True)
            torch.testing.assert_close(step(compiled, x, picked), step(attend, x, picked))
