"""The selective scan against its definition, token by token, in values and every gradient."""

import pytest
import torch
import torch.nn.functional as F

import mindspeed_fx.kernels  # noqa: F401
from mindspeed_fx.kernels import selective_scan as definition

ops = torch.ops.mindspeed
NAMES = ("u", "dt", "A", "B", "C", "D", "z", "bias", "state")


def by_token(u, dt, A, B, C, D, z, bias, state, softplus):
    """The recurrence at the top of kernels/selective_scan.py."""
    dt = dt if bias is None else dt + bias[:, None]
    dt = F.softplus(dt) if softplus else dt
    state = u.new_zeros(*u.shape[:2], A.shape[1]) if state is None else state
    outs = []
    for t in range(u.shape[2]):
        step = dt[:, :, t, None]
        state = (step * A).exp() * state + step * B[:, None, :, t] * u[:, :, t, None]
        outs.append((state * C[:, None, :, t]).sum(-1))
    y = torch.stack(outs, -1)
    y = y if D is None else y + D[:, None] * u
    return y if z is None else y * F.silu(z), state


def arguments(batch, channels, n, seq, parts=("D", "z", "bias", "state"), dtype=torch.float64):
    torch.manual_seed(0)
    u, dt, z = (torch.randn(batch, seq, channels, dtype=dtype).transpose(1, 2) for _ in range(3))
    A, B, C = -torch.rand(channels, n, dtype=dtype), *(torch.randn(batch, n, seq, dtype=dtype) for _ in range(2))
    D, bias = (torch.randn(channels, dtype=dtype) for _ in range(2))
    given = dict(zip(NAMES, (u, dt / 4, A, B, C, D, z, bias, torch.randn(batch, channels, n, dtype=dtype))))
    dt.add_(30 * (dt > 2))  # beyond softplus's threshold
    return [x.requires_grad_() if name in (*NAMES[:5], *parts) else None for name, x in given.items()]


def both(args, softplus):
    """Values and gradients: of the operator, by token."""
    leaves = [x for x in args if x is not None]
    for f in (lambda: ops.selective_scan(*args, softplus)[:2], lambda: by_token(*args, softplus)):
        out, final = f()
        loss = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum()
        loss = loss + (final * torch.linspace(1, 2, final.numel(), dtype=final.dtype).view_as(final)).sum()
        yield (out, final, *torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("softplus", [False, True])
@pytest.mark.parametrize(
    "shape",
    [(2, 5, 3, 11), (1, 4, 2, 8, ()), (1, 3, 4, 1, ("z",)), (2, 2, 2, 42, ("D", "bias")), (1, 2, 3, 9, ("state",))],
)
@pytest.mark.parametrize("chunk", [4, 32])
def test_chunks_are_the_recurrence(monkeypatch, shape, softplus, chunk):
    monkeypatch.setattr(definition, "CHUNK", chunk)
    args = arguments(*shape)
    args[1] = args[1].detach().abs().requires_grad_() if not softplus else args[1]
    for h, w in zip(*both(args, softplus), strict=True):
        assert h.shape == w.shape and h.dtype == w.dtype
        torch.testing.assert_close(h, w, rtol=1e-10, atol=1e-10)


def test_gradient_by_finite_differences():
    assert torch.autograd.gradcheck(lambda *a: ops.selective_scan(*a, True)[:2], arguments(1, 2, 3, 5))


def test_rules_of_custom_operators():
    args = arguments(2, 4, 3, 37)
    results = torch.library.opcheck(ops.selective_scan.default, (*args, True), raise_exception=False)
    assert set(results.values()) == {"SUCCESS"}, results


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_computes_in_float32(dtype):
    args = [x.detach().to(dtype).requires_grad_() for x in arguments(1, 6, 4, 150)[:8]]
    wide = [x.detach().double().requires_grad_() for x in args]
    out, final, _ = ops.selective_scan(*args, None, True)
    assert out.dtype == final.dtype == torch.float32 and out.transpose(1, 2).is_contiguous()
    want = by_token(*wide, None, True)[0]
    assert (out.double() - want).abs().max() <= 2e-6 * want.abs().max()
    have = torch.autograd.grad(out.sum(), args)
    for h, w, x in zip(have, torch.autograd.grad(want.sum(), wide), args):
        assert h.dtype == dtype and h.shape == x.shape
        assert (h.double() - w).abs().max() <= 2 * max(torch.finfo(dtype).eps, 2e-6) * w.abs().max()


def test_only_what_is_used_has_a_gradient():
    args = arguments(1, 2, 3, 4, ())
    _, final, starts = ops.selective_scan(*args, True)
    assert not starts.requires_grad
    grads = dict(zip(NAMES, torch.autograd.grad(final.sum(), args[:5])))
    assert all(g.eq(0).all() if name == "C" else g.ne(0).any() for name, g in grads.items())


def test_no_tokens():
    args = arguments(1, 2, 3, 0)
    out, final, _ = ops.selective_scan(*args, True)
    assert out.shape == (1, 2, 0) and final.equal(args[8])
    assert torch.autograd.grad(final.sum(), args[8])[0].eq(1).all()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"B": (1, 5, 4)}, r"B is \[1, 5, 4\]; valid: \[1, 3, 4\]"),
        ({"z": (1, 3, 4)}, r"z is \[1, 3, 4\]; valid: \[1, 2, 4\]"),
        ({"u": (2, 4)}, r"u is \[2, 4\] and A \[2, 3\]; valid: three and two dimensions"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    args = [torch.rand(change[name]) if name in change else x for name, x in zip(NAMES, arguments(1, 2, 3, 4))]
    with pytest.raises(ValueError, match=message):
        ops.selective_scan(*args, True)


def test_symbolic_lengths():
    torch._dynamo.reset()
    f = torch.compile(
        lambda *a: ops.selective_scan(*a, None, True)[0], backend="aot_eager", dynamic=True, fullgraph=True
    )
    for seq in (9, 37):
        args = arguments(1, 2, 3, seq)[:8]
        torch.testing.assert_close(f(*args), by_token(*args, None, True)[0])


@pytest.mark.parametrize("parts", [(), ("D", "z", "bias")])
def test_cost_is_what_is_computed(parts):
    from torch.utils.flop_counter import FlopCounterMode

    args = [x if x is None else x.detach() for x in arguments(2, 4, 3, 37, parts)]
    out, _, starts = ops.selective_scan(*args, True)
    for f, given in (
        (definition.selective_scan, args),
        (definition.selective_scan_backward, (out, None, starts, *args)),
    ):
        with FlopCounterMode(display=False) as inside:
            f.reference(*given, True)
        with FlopCounterMode(display=False) as told:
            f.overload(*given, True)
        assert told.get_total_flops() == inside.get_total_flops() > 0
