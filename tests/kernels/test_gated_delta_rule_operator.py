"""The gated delta rule in chunks against its definition, token by token, in values and every gradient."""

import pytest
import torch

import mindspeed_fx.kernels  # noqa: F401
from mindspeed_fx.kernels import gated_delta_rule_chunks as in_chunks

ops = torch.ops.mindspeed


def by_token(q, k, v, g, beta, state, scale, norm_eps=None):
    """The recurrence at the top of kernels/gated_delta_rule.py."""
    if norm_eps is not None:
        q, k = (x * (x.square().sum(-1, keepdim=True) + norm_eps).rsqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[1] // q.shape[1], 1) for x in (q, k))
    state = v.new_zeros(*v.shape[:2], k.shape[3], v.shape[3]) if state is None else state
    outs = []
    for t in range(v.shape[2]):
        if g is not None:
            state = state * g[:, :, t, None, None].exp()
        key = k[:, :, t, :, None]
        error = v[:, :, t, None] - (state * key).sum(-2, keepdim=True)
        state = state + beta[:, :, t, None, None] * key * error
        outs.append((state * q[:, :, t, :, None]).sum(-2) * scale)
    return torch.stack(outs, 2), state


def arguments(batch, k_heads, heads, seq, k_dim, v_dim, gate=True, state=False, dtype=torch.float64):
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(batch, seq, n, d, dtype=dtype).transpose(1, 2).requires_grad_()
        for n, d in ((k_heads, k_dim), (k_heads, k_dim), (heads, v_dim))
    )
    g = (-torch.rand(batch, heads, seq, dtype=dtype)).requires_grad_() if gate else None
    beta = torch.rand(batch, heads, seq, dtype=dtype).requires_grad_()
    start = torch.randn(batch, heads, k_dim, v_dim, dtype=dtype).requires_grad_() if state else None
    return q, k, v, g, beta, start


def both(args, scale, eps, chunk, last=True):
    """Values and gradients: of the operator, by token."""
    leaves = [x for x in args if x is not None]
    for f in (lambda: ops.gated_delta_rule(*args, scale, eps, chunk)[:2], lambda: by_token(*args, scale, eps)):
        out, final = f()
        loss = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum()
        loss = loss + (final * torch.linspace(1, 2, final.numel(), dtype=final.dtype).view_as(final)).sum() * last
        yield (out, final, *torch.autograd.grad(loss, leaves))


SHAPES = [
    (2, 2, 4, 11, 3, 5, True, True),
    (1, 2, 2, 8, 4, 3, False, False),
    (1, 1, 2, 1, 4, 3, True, False),
    (2, 1, 3, 21, 2, 2, False, True),
]


@pytest.mark.parametrize("eps", [None, 1e-3])
@pytest.mark.parametrize("chunk", [1, 4, 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_are_the_recurrence(monkeypatch, shape, chunk, eps):
    monkeypatch.setattr(in_chunks, "TOKENS", 16)  # some heads at a time
    have, want = both(arguments(*shape), 0.7, eps, chunk)
    for h, w in zip(have, want, strict=True):
        assert h.shape == w.shape and h.dtype == w.dtype
        torch.testing.assert_close(h, w, rtol=1e-10, atol=1e-10)


def test_gradient_by_finite_differences():
    args = arguments(1, 1, 2, 5, 2, 3, True, True)
    for eps in (None, 0.1):
        assert torch.autograd.gradcheck(lambda *a: ops.gated_delta_rule(*a, 0.7, eps, 2)[:2], args)


def test_rules_of_custom_operators():
    args = arguments(2, 2, 4, 7, 3, 5, True, True)
    results = torch.library.opcheck(ops.gated_delta_rule.default, (*args, 0.7, 1e-6, 4), raise_exception=False)
    assert set(results.values()) == {"SUCCESS"}, results


def test_only_what_is_used_has_a_gradient():
    args = arguments(1, 1, 1, 4, 2, 2)
    out, final, starts = ops.gated_delta_rule(*args, 1.0)
    assert not starts.requires_grad
    grads = torch.autograd.grad(final.sum(), [x for x in args if x is not None], allow_unused=True)
    assert grads[0].eq(0).all() and all(g.ne(0).any() for g in grads[1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_computes_in_float32(dtype):
    args = [x if x is None else x.detach().to(dtype).requires_grad_() for x in arguments(1, 2, 4, 150, 16, 16)]
    wide = [x if x is None else x.detach().double().requires_grad_() for x in args]
    out, final, _ = ops.gated_delta_rule(*args, 0.25, 1e-6)
    assert out.dtype == dtype and final.dtype == torch.float32 and out.transpose(1, 2).is_contiguous()
    want = by_token(*wide, 0.25, 1e-6)[0]
    have = torch.autograd.grad(out.sum(), args[:5])
    for h, w in zip((out, *have), (want, *torch.autograd.grad(want.sum(), wide[:5])), strict=True):
        assert h.dtype == dtype
        assert (h.double() - w).abs().max() <= 2 * max(torch.finfo(dtype).eps, 1e-6) * w.abs().max()


def test_equal_keys_are_exact():
    """With beta one and equal keys the powers of the system grow like binomials: an inverse by squaring would fail."""
    q, k, v, g, beta, _ = (x if x is None else x.detach().float() for x in arguments(1, 1, 1, 128, 8, 8, gate=False))
    k, beta = torch.ones_like(k) / 8**0.5, torch.ones_like(beta)
    have, want = ops.gated_delta_rule(q, k, v, g, beta, None, 1.0)[0], by_token(q, k, v, g, beta, None, 1.0)[0]
    torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4)


def test_forgets_all():
    """Differences above the diagonal of a chunk overflow where gates are strong; what they multiply is never read."""
    q, k, v, g, beta, _ = arguments(1, 1, 1, 64, 4, 4, dtype=torch.float32)
    strong = (g.detach() * 100).requires_grad_()
    out = ops.gated_delta_rule(q, k, v, strong, beta, None, 1.0, 1e-6)[0]
    grads = torch.autograd.grad(out.sum(), (q, k, v, strong, beta))
    assert all(x.isfinite().all() for x in (out, *grads))


def test_no_tokens():
    args = arguments(1, 1, 2, 0, 3, 4, True, True)
    out, final, _ = ops.gated_delta_rule(*args, 1.0)
    assert out.shape == (1, 2, 0, 4) and final.equal(args[5])
    assert torch.autograd.grad(final.sum(), args[5])[0].eq(1).all()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"chunk": 0}, "chunk=0; valid: a number of tokens from 1 on"),
        ({"heads": 3}, r"2 heads of keys; valid: a divisor of 3, the heads of values"),
        ({"beta": 6}, r"beta is \[1, 4, 6\]; valid: \[1, 4, 5\]"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    q, k, v, g, beta, _ = arguments(1, 2, 4, 5, 2, 3)
    if "heads" in change:
        v, g, beta = v[:, :3], g[:, :3], beta[:, :3]
    if "beta" in change:
        beta = torch.rand(1, 4, 6, dtype=torch.double)
    with pytest.raises(ValueError, match=message):
        ops.gated_delta_rule(q, k, v, g, beta, None, 1.0, None, change.get("chunk", 64))


def test_symbolic_lengths():
    torch._dynamo.reset()
    f = torch.compile(
        lambda *a: ops.gated_delta_rule(*a, None, 0.5, 1e-6, 4)[0], backend="aot_eager", dynamic=True, fullgraph=True
    )
    for seq in (9, 13):
        args = arguments(1, 1, 2, seq, 2, 3)[:5]
        torch.testing.assert_close(f(*args), by_token(*args, None, 0.5, 1e-6)[0])


def test_flops_do_not_grow_with_the_square_of_the_sequence():
    from torch.utils.flop_counter import FlopCounterMode

    def flops(seq):
        args = arguments(1, 2, 4, seq, 16, 16)
        with FlopCounterMode(display=False) as counter:
            ops.gated_delta_rule(*args, 1.0)[0].sum().backward()
        return counter.get_total_flops()

    assert flops(512) == 2 * flops(256) > 0


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("seq", [24, 41])
def test_cost_is_what_is_computed(seq, gate):
    from torch.utils.flop_counter import FlopCounterMode

    from mindspeed_fx.kernels import gated_delta_rule as definition
    from tests.cost.test_cost_operators import UNKNOWN_TO_TORCH

    args = [x if x is None else x.detach() for x in arguments(2, 2, 4, seq, 3, 5, gate)]
    out, _, starts = ops.gated_delta_rule(*args, 0.5, None, 4)
    backward = (definition.gated_delta_rule_backward, (out, None, starts, *args))
    for f, given in ((definition.gated_delta_rule, args), backward):
        with FlopCounterMode(display=False, custom_mapping=UNKNOWN_TO_TORCH) as inside:
            f.reference(*given, 0.5, None, 4)
        with FlopCounterMode(display=False) as told:
            f.overload(*given, 0.5, None, 4)
        assert told.get_total_flops() == inside.get_total_flops() > 0
