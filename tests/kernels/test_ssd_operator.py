"""The state space dual in chunks against its definition, token by token, in values and every gradient."""

import pytest
import torch

import mindspeed_fx.kernels  # noqa: F401
from mindspeed_fx.kernels import ssd_chunks as in_chunks

ops = torch.ops.mindspeed
NAMES = ("x", "dt", "A", "B", "C", "D", "state")


def by_token(x, dt, A, B, C, D, state):
    """The recurrence at the top of kernels/ssd.py."""
    B, C = (y.repeat_interleave(x.shape[2] // y.shape[2], 2) for y in (B, C))
    state = x.new_zeros(x.shape[0], *x.shape[2:], B.shape[3]) if state is None else state
    outs = []
    for t in range(x.shape[1]):
        state = state * (dt[:, t] * A).exp()[..., None, None]
        state = state + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        outs.append((state * C[:, t, :, None]).sum(-1))
    out = torch.stack(outs, 1)
    return out if D is None else out + x * D[:, None], state


def arguments(batch, seq, heads, groups, p, n, skip=True, state=False, dtype=torch.float64):
    torch.manual_seed(0)
    x = torch.randn(batch, heads, p, seq, dtype=dtype).permute(0, 3, 1, 2).requires_grad_()
    dt, A = (
        torch.rand(batch, seq, heads, dtype=dtype).requires_grad_(),
        (-torch.rand(heads, dtype=dtype)).requires_grad_(),
    )
    B, C = (torch.randn(batch, seq, groups, n, dtype=dtype, requires_grad=True) for _ in range(2))
    D = torch.randn(heads, dtype=dtype, requires_grad=True) if skip else None
    start = torch.randn(batch, heads, p, n, dtype=dtype, requires_grad=True) if state else None
    return x, dt, A, B, C, D, start


def both(args, chunk):
    """Values and gradients: of the operator, by token."""
    leaves = [x for x in args if x is not None]
    for f in (lambda: ops.ssd(*args, chunk)[:2], lambda: by_token(*args)):
        out, final = f()
        loss = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum()
        loss = loss + (final * torch.linspace(1, 2, final.numel(), dtype=final.dtype).view_as(final)).sum()
        yield (out, final, *torch.autograd.grad(loss, leaves))


SHAPES = [
    (2, 11, 4, 2, 3, 5, True, True),
    (1, 8, 2, 2, 4, 3),
    (1, 1, 3, 1, 4, 3, False),
    (2, 42, 6, 1, 2, 2, True, True),
]


@pytest.mark.parametrize("chunk", [1, 4, 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_are_the_recurrence(monkeypatch, shape, chunk):
    monkeypatch.setattr(in_chunks, "HEADS", 2)  # some heads at a time
    have, want = both(arguments(*shape), chunk)
    for h, w in zip(have, want, strict=True):
        assert h.shape == w.shape and h.dtype == w.dtype
        torch.testing.assert_close(h, w, rtol=1e-10, atol=1e-10)


def test_gradient_by_finite_differences():
    assert torch.autograd.gradcheck(lambda *a: ops.ssd(*a, 2)[:2], arguments(1, 5, 2, 1, 2, 3, True, True))


def test_rules_of_custom_operators():
    args = arguments(2, 7, 4, 2, 3, 5, True, True)
    results = torch.library.opcheck(ops.ssd.default, (*args, 4), raise_exception=False)
    assert set(results.values()) == {"SUCCESS"}, results


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_computes_in_float32(dtype):
    args = [x if x is None else x.detach().to(dtype).requires_grad_() for x in arguments(1, 150, 4, 2, 16, 16)]
    wide = [x if x is None else x.detach().double().requires_grad_() for x in args]
    out, final, _ = ops.ssd(*args)
    assert out.dtype == final.dtype == torch.float32
    want = by_token(*wide)[0]
    have = torch.autograd.grad(out.sum(), args[:6])
    assert (out.double() - want).abs().max() <= 2e-6 * want.abs().max()
    for h, w, x in zip(have, torch.autograd.grad(want.sum(), wide[:6]), args):
        assert h.dtype == dtype and h.shape == x.shape
        assert (h.double() - w).abs().max() <= 2 * max(torch.finfo(dtype).eps, 5e-6) * w.abs().max()


def test_the_gradient_of_the_rates_in_float32():
    """Its terms nearly cancel, and decays are exponentials of differences of large sums: both are made in float64."""
    torch.manual_seed(0)
    heads, seq = 4, 400
    x, B, C, grad = (torch.randn(1, seq, n, 8) for n in (heads, 1, 1, heads))
    dt = torch.nn.functional.softplus(torch.randn(1, seq, heads) - 3)
    A = -torch.arange(1.0, heads + 1)

    def gradient(f, dtype):
        args = [y.to(dtype).requires_grad_() for y in (x, dt, A, B, C)]
        return torch.autograd.grad((f(*args) * grad.to(dtype)).sum(), args[2])[0].double()

    want = gradient(lambda *args: by_token(*args, None, None)[0], torch.float64)
    have = gradient(lambda *args: ops.ssd(*args, None, None, 256)[0], torch.float32)
    assert ((have - want).abs() / want.abs()).max() < 2e-6


def test_forgets_all():
    """What an exponential of a difference above the diagonal overflows to is never read."""
    x, dt, A, B, C, D, _ = (y if y is None else y.detach().float() for y in arguments(1, 64, 2, 1, 4, 4))
    args = [y.requires_grad_() for y in (x, dt * 1000, A, B, C, D)]
    out = ops.ssd(*args, None)[0]
    assert all(y.isfinite().all() for y in (out, *torch.autograd.grad(out.sum(), args)))


def test_only_what_is_used_has_a_gradient():
    args = arguments(1, 4, 1, 1, 2, 2)
    _, final, starts = ops.ssd(*args)
    assert not starts.requires_grad
    grads = dict(zip(NAMES, torch.autograd.grad(final.sum(), args[:6])))
    assert all((g.ne(0).any() if name in ("x", "dt", "A", "B") else g.eq(0).all()) for name, g in grads.items())


def test_gradients_have_the_types_of_their_arguments():
    """Autograd would turn them, a compiled backward does not."""
    args = [y.detach().bfloat16() for y in arguments(1, 9, 4, 2, 3, 5, True, True)]
    out, _, starts = ops.ssd(*args, 4)
    assert [out.dtype, starts.dtype] == [torch.float32] * 2
    assert {g.dtype for g in ops.ssd_backward(out, None, starts, *args, 4)} == {torch.bfloat16}


def test_no_tokens():
    args = arguments(1, 0, 2, 1, 3, 4, True, True)
    out, final, _ = ops.ssd(*args)
    assert out.shape == (1, 0, 2, 3) and final.equal(args[6])
    assert torch.autograd.grad(final.sum(), args[6])[0].eq(1).all()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"chunk": 0}, "chunk=0; valid: a number of tokens from 1 on"),
        ({"B": (1, 5, 3, 3)}, "3 groups of B; valid: a divisor of 4, the heads of x"),
        ({"dt": (1, 5, 3)}, r"dt is \[1, 5, 3\]; valid: \[1, 5, 4\]"),
        ({"x": (1, 5, 4)}, r"x is \[1, 5, 4\] and B \[1, 5, 2, 3\]; valid: four dimensions each"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    chunk = change.pop("chunk", 64)
    args = [torch.rand(change[name]) if name in change else x for name, x in zip(NAMES, arguments(1, 5, 4, 2, 2, 3))]
    with pytest.raises(ValueError, match=message):
        ops.ssd(*args, chunk)


def test_symbolic_lengths():
    torch._dynamo.reset()
    f = torch.compile(lambda *a: ops.ssd(*a, None, 4)[0], backend="aot_eager", dynamic=True, fullgraph=True)
    for seq in (9, 13):
        args = arguments(1, seq, 2, 1, 2, 3)[:6]
        torch.testing.assert_close(f(*args), by_token(*args, None)[0])


@pytest.mark.parametrize("seq", [24, 41])
def test_cost_is_what_is_computed(seq):
    from torch.utils.flop_counter import FlopCounterMode

    from mindspeed_fx.kernels import ssd as definition
    from tests.cost.test_cost_operators import UNKNOWN_TO_TORCH

    args = [x if x is None else x.detach() for x in arguments(2, seq, 4, 2, 3, 5)]
    out, _, starts = ops.ssd(*args, 4)
    for f, given in ((definition.ssd, args), (definition.ssd_backward, (out, None, starts, *args))):
        with FlopCounterMode(display=False, custom_mapping=UNKNOWN_TO_TORCH) as inside:
            f.reference(*given, 4)
        with FlopCounterMode(display=False) as told:
            f.overload(*given, 4)
        assert told.get_total_flops() == inside.get_total_flops() > 0


@pytest.mark.parametrize("seq", [8, 19])
def test_lightning_attention_is_one_of_a_fixed_decay(seq):
    """MiniMax's layer, up to its norm: values are x, keys B, queries C, every step 1 and A the head's slope."""
    from transformers.models.minimax.modeling_minimax import MiniMaxConfig, MiniMaxLightningAttention

    torch.manual_seed(0)
    sizes = dict(hidden_size=24, num_attention_heads=4, head_dim=6, num_hidden_layers=3, block_size=8)
    layer, results = MiniMaxLightningAttention(MiniMaxConfig(**sizes), 1).double(), []
    layer.norm.register_forward_pre_hook(lambda _, inputs: results.append(inputs[0]))
    x = torch.randn(2, seq, 24, dtype=torch.float64)
    layer(x, None, None)
    q, k, v = layer.act_fn(layer.qkv_proj(x)).view(2, seq, 4, 18).split(6, 3)
    out = ops.ssd(v, torch.ones_like(v[..., 0]), -layer.slope_rate.flatten(), k, q, None, None)[0].flatten(2)
    torch.testing.assert_close(out, results[0], rtol=1e-5, atol=1e-6)  # slopes are made in float32
    grad = torch.randn_like(out)
    have, want = (torch.autograd.grad(y, layer.qkv_proj.weight, grad, retain_graph=True)[0] for y in (out, results[0]))
    torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-6)
