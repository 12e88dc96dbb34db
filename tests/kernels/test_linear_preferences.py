"""Losses of preferences and of distillation from hidden states, against their formulas on whole logits."""

import pytest
import torch
import torch.nn.functional as F

import mindspeed_fx.kernels  # noqa: F401
from mindspeed_fx.kernels import linear_cross_entropy_work as work

ops = torch.ops.mindspeed
TOKENS, WIDTH, CLASSES = 12, 5, 11


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(work, "CHUNK", 5 * CLASSES * 8)


def inputs(dtype=torch.float64, bias=True):
    torch.manual_seed(0)
    shapes = ((TOKENS, WIDTH), (CLASSES, WIDTH), (CLASSES,))
    hidden, weight, shift = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)
    target = torch.randint(0, CLASSES, (TOKENS,))
    target[::5] = -100
    return (hidden, weight, shift if bias else None), target


def log_probs(hidden, weight, bias, target, temperature=1.0):
    """Of the target, zero where ignored."""
    logits = F.linear(hidden, weight, bias) / temperature
    return -F.cross_entropy(logits, target, reduction="none")


def agree(f, expected, leaves, tolerance=1e-12):
    leaves = [x for x in leaves if x is not None]
    have, want = f(), expected()
    for h, w in zip((have, *torch.autograd.grad(3 * have, leaves)), (want, *torch.autograd.grad(3 * want, leaves))):
        assert h.shape == w.shape and (h.dtype == w.dtype or h.dtype == torch.float32)
        assert (h.double() - w.double()).abs().max() <= tolerance * w.double().abs().max().clamp_min(1e-9)


def grpo(leaves, target, advantages, weights, old, reference, low, high, beta, temperature):
    logp = log_probs(*leaves, target, temperature)
    ratio = torch.exp(logp - (logp.detach() if old is None else old))
    term = -torch.min(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    if beta:
        term = term + beta * (torch.exp(reference - logp) - (reference - logp) - 1)
    return (term * weights * (target != -100)).sum()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "given", [{}, {"old": True, "low": 0.3, "high": 0.1}, {"old": True, "beta": 0.2, "temperature": 0.7}]
)
def test_grpo(given, bias):
    leaves, target = inputs(bias=bias)
    o = dict(low=0.2, high=0.2, beta=0.0, temperature=1.0) | given
    before = log_probs(*leaves, target, o["temperature"]).detach()
    old = before + torch.randn(TOKENS) / 4 if o.pop("old", False) else None
    advantages, weights = torch.randn(TOKENS, dtype=torch.float64), torch.rand(TOKENS, dtype=torch.float64)
    reference = before + torch.randn(TOKENS) / 4 if o["beta"] else None
    numbers = advantages, weights, old, reference
    agree(
        lambda: ops.linear_grpo(*leaves, target, *numbers, **o)[0],
        lambda: grpo(leaves, target, *numbers, **o),
        leaves,
    )
    loss, seen = ops.linear_grpo(*leaves, target, *numbers, **o)
    assert not seen.requires_grad
    torch.testing.assert_close(seen, before)


def test_grpo_weighs_all_tokens_alike():
    leaves, target = inputs()
    advantages = torch.randn(TOKENS, dtype=torch.float64)
    weights = (target != -100).double() / (target != -100).sum()
    have, want = (ops.linear_grpo(*leaves, target, advantages, w)[0] for w in (None, weights))
    torch.testing.assert_close(have, want)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("reference", [True, False])
def test_dpo(reference, smoothing):
    (hidden, weight, bias), target = inputs()
    given = torch.randn(4, dtype=torch.float64) if reference else None

    def whole():
        sums = log_probs(hidden, weight, bias, target).view(4, 3).sum(1)
        sums = sums if given is None else sums - given
        margin = 0.3 * (sums[:2] - sums[2:])
        return (-(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)).mean()

    def in_chunks():
        return ops.linear_dpo(hidden.view(4, 3, -1), weight, bias, target.view(4, 3), given, 0.3, smoothing)[0]

    agree(in_chunks, whole, (hidden, weight, bias))


def divergence(leaves, teacher, weights, beta, temperature):
    """As the Generalized Knowledge Distillation of TRL has it."""
    s, t = (F.log_softmax(F.linear(*x) / temperature, -1) for x in (leaves, teacher))
    if beta in (0, 1):
        kl = (
            F.kl_div(s, t, reduction="none", log_target=True)
            if beta == 0
            else F.kl_div(t, s, reduction="none", log_target=True)
        )
        return (kl.sum(1) * weights).sum()
    beta = torch.tensor(beta, dtype=s.dtype)
    m = torch.logsumexp(torch.stack([s + torch.log1p(-beta), t + torch.log(beta)]), dim=0)
    of_teacher, of_student = (F.kl_div(m, x, reduction="none", log_target=True) for x in (t, s))
    return ((beta * of_teacher + (1 - beta) * of_student).sum(1) * weights).sum()


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("temperature, bias", [(1.0, True), (0.7, False)])
def test_jsd(beta, temperature, bias):
    leaves, _ = inputs(bias=bias)
    teacher = (
        torch.randn(TOKENS, 3).double(),
        torch.randn(CLASSES, 3).double(),
        None if bias else torch.randn(CLASSES).double(),
    )
    weights = torch.rand(TOKENS, dtype=torch.float64) * (torch.arange(TOKENS) % 4 > 0)
    agree(
        lambda: ops.linear_jsd(*leaves, *teacher, weights, beta, temperature),
        lambda: divergence(leaves, teacher, weights, beta, temperature),
        leaves,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_narrow(dtype):
    leaves, target = inputs(dtype)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    teacher, numbers = (torch.randn(TOKENS, 3), torch.randn(CLASSES, 3), None), torch.randn(TOKENS)
    for have, want in (
        (
            ops.linear_jsd(*leaves, *(x if x is None else x.to(dtype) for x in teacher), beta=0.4),
            divergence(wide, [x if x is None else x.to(dtype).double() for x in teacher], 1 / TOKENS, 0.4, 1.0),
        ),
        (
            ops.linear_grpo(*leaves, target, numbers, numbers)[0],
            grpo(wide, target, numbers, numbers, None, None, 0.2, 0.2, 0.0, 1.0),
        ),
    ):
        limit = 1e-5 if dtype == torch.float32 else 2e-2
        assert have.dtype == torch.float32 and (have - want).abs() <= limit * want.abs()
        for h, w in zip(torch.autograd.grad(have, leaves), torch.autograd.grad(want, wide)):
            assert h.dtype == dtype and (h - w).abs().max() <= limit * w.abs().max()


def test_rules_of_custom_operators():
    leaves, target = inputs()
    numbers, needed = [torch.randn(TOKENS, dtype=torch.float64) for _ in range(4)], [True] * 3
    teacher = torch.randn(TOKENS, 3).double(), torch.randn(CLASSES, 3).double(), None
    for f, args in (
        (ops.linear_grpo_total.default, (*leaves, target, *numbers, 0.2, 0.2, 0.1, -100, needed)),
        (ops.linear_jsd_total.default, (*leaves, *teacher, numbers[0], 0.3, 0.7, needed)),
    ):
        results = torch.library.opcheck(f, args, raise_exception=False)
        assert set(results.values()) == {"SUCCESS"}, (f, results)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda h, t: ops.linear_grpo(*h, t, torch.rand(TOKENS), beta=0.1), "beta=0.1 without a reference; valid: 0"),
        (lambda h, t: ops.linear_grpo(*h, t, torch.rand(3)), r"advantages is \[3\]; valid: \[12\]"),
        (lambda h, t: ops.linear_grpo(*h, t, torch.rand(TOKENS), temperature=0.0), "temperature=0.0; valid: a number"),
        (
            lambda h, t: ops.linear_dpo(*h, t),
            r"hidden is \[12, 5\] and target \[12\]; valid: \[2 \* pairs, seq, hidden\]",
        ),
        (lambda h, t: ops.linear_jsd(*h, h[0], h[1], beta=2.0), "beta=2.0; valid: from 0 to 1"),
        (
            lambda h, t: ops.linear_jsd(*h, h[0], h[1][:3]),
            "11 classes of the student and 3 of the teacher; valid: as many",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(*inputs())
