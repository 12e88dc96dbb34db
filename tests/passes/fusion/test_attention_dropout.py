"""Attention with dropout: for a seed the fused model drops what the unfused one drops."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from tests.models import explain

NAME = "fusion.attention"


def qkv(heads=4, kv_heads=4, seq=6, dim=8, dtype=torch.double):
    return [
        torch.randn(2, n, seq, dim, dtype=torch.double).to(dtype).requires_grad_() for n in (heads, kv_heads, kv_heads)
    ]


def run(f, inputs, dtype=None):
    leaves = [i.detach().to(dtype or i.dtype).requires_grad_(i.requires_grad) for i in inputs]
    torch.manual_seed(5)
    out = f(*leaves)
    drawn = torch.rand(3)  # both must leave the generator in one state
    wanted = [x for x in leaves if x.requires_grad]
    return [
        out.detach(),
        drawn,
        *torch.autograd.grad(out, wanted, torch.linspace(0.5, 1.5, out.numel()).to(out.dtype).view_as(out)),
    ]


def same_numbers(f, *inputs, tolerance=1e-9, **options):
    torch._dynamo.reset()
    have = run(torch.compile(f, backend="mindspeed", fullgraph=True, options={"codegen": "eager", **options}), inputs)
    for h, w in zip(have, run(f, inputs), strict=True):
        assert h.dtype == w.dtype and (h - w).abs().max() <= tolerance * w.abs().max()
    torch._dynamo.reset()
    return explain(f, *inputs, **options)


def masked(scores, number=float("-inf")):
    return scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), number)


SPELLINGS = {
    "composed": lambda q, k, v: F.dropout(masked(q @ k.mT * 0.3).softmax(-1), 0.4) @ v,
    "module": lambda q, k, v: torch.nn.Dropout(0.1)(masked(q @ k.mT).softmax(-1)) @ v,
    "batched": lambda q, k, v: torch.bmm(
        F.dropout(masked(torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT)).softmax(-1), 0.4), v.flatten(0, 1)
    ).view_as(q),
    "Megatron": lambda q, k, v: torch.bmm(
        F.dropout(masked(q @ k.mT).softmax(-1), 0.4).view(8, 6, 6), v.flatten(0, 1)
    ).view(2, 4, 6, 8),
    "sdpa": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.4, is_causal=True),
    "sdpa, mask": lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, torch.ones(6, 6, dtype=torch.bool).tril(), dropout_p=0.4
    ),
    "float32 softmax": lambda q, k, v: (
        F.dropout(masked(q @ k.mT).softmax(-1, dtype=torch.float32).to(q.dtype), 0.4) @ v
    ),
    "not causal": lambda q, k, v: F.dropout((q @ k.mT).softmax(-1), 0.5) @ v,
    "sdpa, not causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.1),
    "fewer queries": lambda q, k, v: F.scaled_dot_product_attention(q[:, :, :3], k, v, dropout_p=0.1, is_causal=True),
    "padding is added": lambda q, k, v: (
        F.dropout((q @ k.mT * 0.3 + (1.0 - padding()) * torch.finfo(q.dtype).min).softmax(-1), 0.2) @ v
    ),
    "padding is set": lambda q, k, v: (
        F.dropout((q @ k.mT).masked_fill(padding() == 0, float("-inf")).softmax(-1), 0.2) @ v
    ),
    "padding of all is set to a number": lambda q, k, v: (
        F.dropout((q @ k.mT).masked_fill(padding(0) == 0, -10000.0).softmax(-1), 0.2) @ v
    ),
    "distances beside padding of all": lambda q, k, v: (
        F.dropout((q @ k.mT + distances()).masked_fill(padding(0) == 0, -10000.0).softmax(-1), 0.2) @ v
    ),
    "sdpa, padding": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, padding() > 0, dropout_p=0.2),
}


def distances():
    return -(torch.arange(6)[:, None] - torch.arange(6)).abs().double()


def padding(first=1):
    """Two sequences, of which ``first`` and four tokens count."""
    lengths = torch.tensor([first, 4])
    return (torch.arange(6) < lengths[:, None]).double()[:, None, None, :]


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling(name):
    report = same_numbers(SPELLINGS[name], *qkv(), tolerance=1e-5 if "float32" in name else 1e-9)
    assert report.counts[NAME] == 1 and not report.skipped(NAME)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    st.sampled_from([4, 2, 1]),
    st.sampled_from([0, 3]),
    st.booleans(),
    st.sampled_from(["q", "k", "v", "none"]),
    st.sampled_from([0.1, 0.7]),
    st.sampled_from([6, 70]),
)
def test_variants(kv_heads, window, capped, frozen, p, seq):
    inputs = qkv(kv_heads=kv_heads, seq=seq)
    for name, x in zip("qkv", inputs):
        x.requires_grad_(name != frozen)

    def f(q, k, v):
        k, v = (x.repeat_interleave(4 // kv_heads, 1) for x in (k, v))
        scores = q @ k.mT * 0.3
        scores = torch.tanh(scores / 2.0) * 2.0 if capped else scores
        if window:
            scores = scores.masked_fill(~torch.ones(seq, seq, dtype=torch.bool).triu(1 - window), float("-inf"))
        return F.dropout(masked(scores).softmax(-1), p) @ v

    assert same_numbers(f, *inputs).counts[NAME] == 1


def test_bfloat16_is_as_close_to_float64_as_the_unfused_model_is():
    f, inputs = SPELLINGS["composed"], qkv(seq=40, dtype=torch.bfloat16)
    fused = run(torch.compile(f, backend="mindspeed", options={"codegen": "eager"}), inputs)
    for have, unfused, want in zip(fused, run(f, inputs), run(f, inputs, torch.double), strict=True):
        assert (have.double() - want).norm() <= 2 * (unfused.double() - want).norm()


def test_the_order_in_which_numbers_are_drawn_is_kept():
    def f(q, k, v):
        first = masked(q @ k.mT).softmax(-1)
        x, y = F.dropout(v, 0.5), F.dropout(first, 0.4)
        return y @ v + F.dropout(x, 0.5)

    assert same_numbers(f, *qkv()).counts[NAME] == 1


@pytest.mark.parametrize(
    "f, reason",
    [
        (
            lambda q, k, v: F.dropout((q @ k.mT + q.sum(-1, keepdim=True)).softmax(-1), 0.5) @ v,
            "with an additive mask that needs a gradient: no operator has both",
        ),
        (
            lambda q, k, v: F.dropout(masked((q @ k.mT).masked_fill(padding(0) == 0, -1e9), -1e9).softmax(-1), 0.5) @ v,
            "with rows that a mask hides whole beside a causal one",
        ),
        (
            lambda q, k, v: (
                F.dropout(torch.cat([q @ k.mT, q.new_zeros(2, 4, 6, 1)], -1).softmax(-1)[..., :-1], 0.5) @ v
            ),
            "with sinks: no kernel on cpu has both",
        ),
        (lambda q, k, v: F.dropout(F.dropout(masked(q @ k.mT).softmax(-1), 0.5), 0.1) @ v, "twice"),
        (lambda q, k, v: F.dropout(masked((k @ q.mT).mT).softmax(-1), 0.5) @ v, None),
    ],
)
def test_skips_say_why(f, reason):
    report = same_numbers(f, *qkv())
    assert reason is None or (report.counts[NAME] == 0 and reason in report.skipped(NAME)[0].reason)


@pytest.mark.parametrize(
    "target, name, dtype, reason",
    [
        ("cuda", "composed", torch.double, "would draw other numbers"),
        ("npu", "composed", torch.double, "q is float64; valid: float16"),
        ("npu", "capped", torch.float32, "with a soft-cap: no kernel on npu has both"),
    ],
)
def test_other_targets_say_why(target, name, dtype, reason):
    capped = lambda q, k, v: F.dropout(masked(torch.tanh(q @ k.mT / 2) * 2).softmax(-1), 0.4) @ v  # noqa: E731
    report = explain(SPELLINGS.get(name, capped), *qkv(dtype=dtype), target=target)
    assert report.counts[NAME] == 0 and reason in report.skipped(NAME)[0].reason


NPU = {"target": "npu", "codegen": "eager"}


@pytest.mark.parametrize(
    "name", ["sdpa", "batched", *(pytest.param(name, marks=pytest.mark.slow) for name in ("composed", "not causal"))]
)
def test_on_npu_the_kernel_draws(name):
    """Every weight is dropped or divided by 1 - p, as often as asked for, and the backward drops what the forward
    dropped.
    """
    f = SPELLINGS.get(name, lambda q, k, v: F.dropout((q @ k.mT * 0.3).softmax(-1), 0.4) @ v)
    report = explain(f, *qkv(dtype=torch.float32), **NPU)
    assert report.counts[NAME] == 1 and not report.skipped(NAME)
    torch._dynamo.reset()
    q, k, _ = qkv(seq=6, dtype=torch.float32)
    v = torch.eye(6).expand(2, 4, 6, 6).clone() if name != "batched" else torch.eye(6, 8).expand(2, 4, 6, 8).clone()
    compiled = torch.compile(f, backend="mindspeed", fullgraph=True, options=NPU)
    torch.manual_seed(5)
    weights = compiled(q, k, v)[..., :6]  # with the unit matrix for v the result is the weights
    causal = name != "not causal"
    scores = q @ k.mT * {"composed": 0.3, "sdpa": 8**-0.5, "batched": 1.0, "not causal": 0.3}[name]
    whole = (masked(scores) if causal else scores).softmax(-1) / 0.6
    seen = whole > 0
    dropped = (weights == 0) & seen
    torch.testing.assert_close(weights[seen & ~dropped], whole[seen & ~dropped])
    assert abs(dropped.sum() / seen.sum() - 0.4) < 0.1
    # d(sum of weights * c)/dv is, for the same seed, the weights that the forward had.
    v.requires_grad_()
    torch.manual_seed(5)
    out = compiled(q, k, v)
    g = torch.randn_like(out)
    (dv,) = torch.autograd.grad(out, v, g)
    torch.testing.assert_close(dv, weights.detach().mT @ g)


def test_generated_code_serves_short_sequences():
    report = explain(SPELLINGS["composed"], *qkv(), codegen="inductor")
    assert report.counts[NAME] == 0 and "below 256 rows" in report.skipped(NAME)[0].reason
    torch._dynamo.reset()
    inputs = qkv(seq=256, dtype=torch.float32)
    assert explain(SPELLINGS["composed"], *inputs, codegen="inductor").counts[NAME] == 1
    torch._dynamo.reset()
    out = torch.compile(SPELLINGS["composed"], backend="mindspeed")(*inputs)
    exact = SPELLINGS["composed"](*inputs)  # other numbers, the same distribution
    assert (out.mean() - exact.mean()).abs() < 0.05 and (out.std() / exact.std() - 1).abs() < 0.2
    assert all(g.isfinite().all() and g.abs().max() > 0 for g in torch.autograd.grad(out.sum(), inputs))


def test_generated_code_drops_what_inductor_drops():
    """One seed, the same numbers: of attentions that are fused, a dropout behind each, and one that is checkpointed."""

    def layer(q, k, v):
        return q + F.dropout(F.dropout((q @ k.mT * 0.3).softmax(-1), 0.1) @ v, 0.2)

    def f(q, k, v):
        return checkpoint(layer, layer(q, k, v), k, v, use_reentrant=False)

    inputs = qkv(seq=256, dtype=torch.float32)
    assert explain(f, *inputs, codegen="inductor").counts[NAME] == 2
    results = {}
    for backend in ("mindspeed", "inductor"):
        torch._dynamo.reset()
        torch.manual_seed(5)
        out = torch.compile(f, backend=backend)(*inputs)
        results[backend] = [out.detach(), *torch.autograd.grad(out.square().mean(), inputs)]
    for have, want in zip(*results.values(), strict=True):
        assert (have - want).norm() <= 1e-5 * want.norm()


def test_without_training_nothing_is_dropped():
    report = explain(lambda q, k, v: F.dropout(masked(q @ k.mT).softmax(-1), 0.5, training=False) @ v, *qkv())
    run_ = next(r for r in report.graphs[0].runs if r.report.name == NAME)
    assert report.counts[NAME] == 1 and "mindspeed.attention_dropout" not in run_.after


def test_seeds_are_whole_numbers_on_fake_tensors_too():
    q = torch.empty(1, 2, 4, 8, device="meta")
    *_, seed, offset = torch.ops.mindspeed.attention_seeded(q, q, q, None, True, 0.5, 0, 0.1)
    assert (seed.dtype, offset.dtype) == (torch.int64, torch.int64)
