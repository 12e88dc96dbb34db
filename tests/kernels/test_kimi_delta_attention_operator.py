"""Kimi Delta Attention in chunks against its definition, token by token, in values and every gradient."""

import pytest
import torch

import mindspeed_fx.kernels  # noqa: F401
from mindspeed_fx.kernels import gated_delta_rule_chunks as in_chunks

ops = torch.ops.mindspeed


def by_token(q, k, v, g, beta, state, scale, norm_eps=None):
    """The recurrence at the top of kernels/kimi_delta_attention.py."""
    if norm_eps is not None:
        q, k = (x * (x.square().sum(-1, keepdim=True) + norm_eps).rsqrt() for x in (q, k))
    state = v.new_zeros(*k.shape[:2], k.shape[3], v.shape[3]) if state is None else state
    outs = []
    for t in range(v.shape[2]):
        state = state * g[:, :, t, :, None].exp()
        key = k[:, :, t, :, None]
        error = v[:, :, t, None] - (state * key).sum(-2, keepdim=True)
        state = state + beta[:, :, t, None, None] * key * error
        outs.append((state * q[:, :, t, :, None]).sum(-2) * scale)
    return torch.stack(outs, 2), state


def arguments(batch, heads, seq, k_dim, v_dim, state=False, dtype=torch.float64):
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(batch, seq, heads, d, dtype=dtype).transpose(1, 2).requires_grad_() for d in (k_dim, k_dim, v_dim)
    )
    g = (-torch.rand(batch, heads, seq, k_dim, dtype=dtype)).requires_grad_()
    beta = torch.rand(batch, heads, seq, dtype=dtype).requires_grad_()
    start = torch.randn(batch, heads, k_dim, v_dim, dtype=dtype).requires_grad_() if state else None
    return q, k, v, g, beta, start


def both(args, scale, eps):
    """Values and gradients: of the operator, by token."""
    leaves = [x for x in args if x is not None]
    for f in (ops.kimi_delta_attention, by_token):
        out, final = f(*args, scale, eps)[:2]
        loss = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum()
        loss = loss + (final * torch.linspace(1, 2, final.numel(), dtype=final.dtype).view_as(final)).sum()
        yield (out, final, *torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("eps", [None, 1e-3])
@pytest.mark.parametrize(
    "shape", [(2, 3, 11, 3, 5, True), (1, 2, 64, 4, 3, False), (1, 1, 1, 4, 3, False), (1, 2, 300, 3, 2, True)]
)
def test_chunks_are_the_recurrence(monkeypatch, shape, eps):
    monkeypatch.setattr(in_chunks, "TOKENS", 16)  # some heads at a time
    have, want = both(arguments(*shape), 0.7, eps)
    for h, w in zip(have, want, strict=True):
        assert h.shape == w.shape and h.dtype == w.dtype
        torch.testing.assert_close(h, w, rtol=1e-10, atol=1e-10)


def test_gradient_by_finite_differences():
    args = arguments(1, 2, 5, 2, 3, True)
    for eps in (None, 0.1):
        assert torch.autograd.gradcheck(lambda *a: ops.kimi_delta_attention(*a, 0.7, eps)[:2], args)  # noqa: B023


def test_rules_of_custom_operators():
    args = arguments(2, 2, 7, 3, 5, True)
    results = torch.library.opcheck(ops.kimi_delta_attention.default, (*args, 0.7, 1e-6), raise_exception=False)
    assert set(results.values()) == {"SUCCESS"}, results


def test_only_what_is_used_has_a_gradient():
    args = arguments(1, 1, 4, 2, 2)
    out, final, starts = ops.kimi_delta_attention(*args, 1.0)
    assert not starts.requires_grad
    grads = torch.autograd.grad(final.sum(), args[:5], allow_unused=True)
    assert grads[0].eq(0).all() and all(g.ne(0).any() for g in grads[1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_computes_in_float32(dtype):
    args = [x if x is None else x.detach().to(dtype).requires_grad_() for x in arguments(1, 2, 150, 16, 16)]
    wide = [x if x is None else x.detach().double().requires_grad_() for x in args]
    out, final, _ = ops.kimi_delta_attention(*args, 0.25, 1e-6)
    assert out.dtype == dtype and final.dtype == torch.float32 and out.transpose(1, 2).is_contiguous()
    want = by_token(*wide, 0.25, 1e-6)[0]
    have = torch.autograd.grad(out.sum(), args[:5])
    for h, w in zip((out, *have), (want, *torch.autograd.grad(want.sum(), wide[:5])), strict=True):
        assert h.dtype == dtype
        assert (h.double() - w).abs().max() <= 2 * max(torch.finfo(dtype).eps, 1e-6) * w.abs().max()


def test_gates_of_one_number_are_the_gated_delta_rule():
    q, k, v, g, beta, state = arguments(2, 2, 70, 4, 3, True)
    one = g.detach()[..., 0]
    have = ops.kimi_delta_attention(q, k, v, one[..., None].expand_as(k), beta, state, 0.5, 1e-6)
    want = ops.gated_delta_rule(q, k, v, one, beta, state, 0.5, 1e-6)
    for h, w in zip(have[:2], want[:2]):
        torch.testing.assert_close(h, w, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("strength", [3.0, 100.0])
def test_strong_gates(strength):
    """Over a chunk the gates' sum passes what e^x can hold, and what is forgotten between near tokens is not small: the
    pairs of a chunk must be products of numbers that are at most one."""
    q, k, v, g, beta, _ = (x if x is None else x.detach() for x in arguments(1, 1, 130, 4, 4))
    g[..., ::2] *= strength
    leaves = [x.float().requires_grad_() for x in (q, k, v, g, beta)]
    wide = [x.requires_grad_() for x in (q, k, v, g, beta)]
    have, want = (
        (out := f(*x, None, 1.0, 1e-6)[0], *torch.autograd.grad(out.sum(), x))
        for f, x in ((ops.kimi_delta_attention, leaves), (by_token, wide))
    )
    for h, w in zip(have, want, strict=True):
        torch.testing.assert_close(h.double(), w, rtol=1e-4, atol=1e-5)


def test_no_tokens():
    args = arguments(1, 2, 0, 3, 4, True)
    out, final, _ = ops.kimi_delta_attention(*args, 1.0)
    assert out.shape == (1, 2, 0, 4) and final.equal(args[5])
    assert torch.autograd.grad(final.sum(), args[5])[0].eq(1).all()


@pytest.mark.parametrize(
    "number, shape, message",
    [
        (3, (1, 2, 5), r"g is \[1, 2, 5\]; valid: \[1, 2, 5, 2\]"),
        (4, (1, 2, 6), r"beta is \[1, 2, 6\]; valid: \[1, 2, 5\]"),
        (2, (1, 4, 5, 3), r"v is \[1, 4, 5, 3\]; valid: \[1, 2, 5, 3\]"),
    ],
)
def test_what_does_not_fit_is_refused(number, shape, message):
    args = list(arguments(1, 2, 5, 2, 3))
    args[number] = torch.rand(shape, dtype=torch.double)
    with pytest.raises(ValueError, match=message):
        ops.kimi_delta_attention(*args, 1.0)


def test_symbolic_lengths():
    torch._dynamo.reset()
    f = torch.compile(
        lambda *a: ops.kimi_delta_attention(*a, None, 0.5, 1e-6)[0], backend="aot_eager", dynamic=True, fullgraph=True
    )
    for seq in (9, 13):
        args = arguments(1, 2, seq, 2, 3)[:5]
        torch.testing.assert_close(f(*args), by_token(*args, None, 0.5, 1e-6)[0])


@pytest.mark.parametrize("seq", [64, 90])
def test_cost_is_what_is_computed(seq):
    from torch.utils.flop_counter import FlopCounterMode

    from mindspeed_fx.kernels import kimi_delta_attention as definition
    from tests.cost.test_cost_operators import UNKNOWN_TO_TORCH

    args = [x if x is None else x.detach() for x in arguments(2, 2, seq, 3, 5)]
    out, _, starts = ops.kimi_delta_attention(*args, 0.5, None)
    backward = (definition.kimi_delta_attention_backward, (out, None, starts, *args))
    for f, given in ((definition.kimi_delta_attention, args), backward):
        with FlopCounterMode(display=False, custom_mapping=UNKNOWN_TO_TORCH) as inside:
            f.reference(*given, 0.5, None)
        with FlopCounterMode(display=False) as told:
            f.overload(*given, 0.5, None)
        assert told.get_total_flops() == inside.get_total_flops() > 0
