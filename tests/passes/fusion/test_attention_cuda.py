"""Attention on cuda, where torch's kernels take it, and what autocast casts around it."""

import pytest
import torch
import torch.nn.functional as F

from tests.models import explain, function_agrees
from tests.passes.fusion.test_attention import NAME, WINDOWS, causal, positions_le, qkv


@pytest.mark.parametrize("masked", ["causal", "bias", "window", "none"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_on_cuda_composed_attention_becomes_scaled_dot_product_attention(masked, kv_heads):
    bias = torch.randn(1, 4, 6, 6, dtype=torch.double)

    def f(q, k, v):
        k, v = (x.repeat_interleave(4 // kv_heads, 1) if kv_heads in (2, 4) else x for x in (k, v))
        scores = q @ k.transpose(-1, -2) * 0.5
        if masked in ("causal", "window"):
            scores = scores.masked_fill(causal(6) if masked == "causal" else WINDOWS["tril and triu"](6), float("-inf"))
        return F.softmax(scores + bias if masked == "bias" else scores, -1) @ v

    report = function_agrees(f, *qkv(kv_heads=kv_heads), target="cuda")
    run = next(r for r in report.graphs[0].runs if r.report.name == NAME)
    assert (
        report.counts[NAME] == 1
        and "aten.scaled_dot_product_attention" in run.after
        and "mindspeed.attention" not in run.after
    )
    assert ("True, scale" in run.after) == (masked == "causal") and ("enable_gqa" in run.after) == (kv_heads != 4)


@pytest.mark.parametrize("mask", ["causal", "additive", "window of all", "window", "given"])
@pytest.mark.parametrize("dtype", [torch.double, torch.float32], ids=str)
def test_on_cuda_a_causal_mask_of_a_call_becomes_its_flag(mask, dtype):
    """With it flash kernels compute half; the one for float32 takes no groups of heads."""
    given = torch.rand(6, 6) < 0.5

    def f(q, k, v):
        k, v = (x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(2, 4, 6, 8) for x in (k, v))
        ahead = torch.arange(6)[None] - torch.arange(6)[:, None]
        keep = {"window of all": (ahead <= 0) & (ahead > -6), "window": (ahead <= 0) & (ahead > -3)}.get(
            mask, ahead <= 0
        )
        m = given | (ahead == 0) if mask == "given" else keep
        m = torch.where(m, 0.0, float("-inf")).to(dtype) if mask == "additive" else m
        return F.scaled_dot_product_attention(q, k, v, m[None, None], scale=0.3)

    report = function_agrees(f, *qkv(kv_heads=2, dtype=dtype), target="cuda")
    run = next(r for r in report.graphs[0].runs if r.report.name == NAME)
    fused = mask not in ("window", "given")
    assert report.counts[NAME] == fused
    if fused:
        assert "None, 0.0, True, scale=0.3" in run.after and ("enable_gqa" in run.after) == (dtype != torch.float32)
    else:
        assert "not known while compiling to be causal" in report.skipped(NAME)[0].reason


@pytest.mark.parametrize("target", ["cpu", "cuda", "npu"])
@pytest.mark.parametrize("grouped", [False, True])
def test_products_whose_operands_autocast_casts(target, grouped):
    def f(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            v = v.bfloat16()
            k, v = (x.repeat_interleave(2, 1) for x in (k, v)) if grouped else (k, v)
            scores = (q @ k.transpose(-1, -2) * 0.3).masked_fill(causal(6), float("-inf"))
            return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v

    inputs = qkv(kv_heads=2 if grouped else 4, dtype=torch.float32)
    report = explain(f, *inputs, target=target)
    assert report.counts[NAME] == 1, report.skipped(NAME)
    step = torch.compile(f, backend="mindspeed", options={"codegen": "eager", "target": target})
    want = torch.autograd.grad(f(*inputs).float().square().sum(), inputs)
    have = torch.autograd.grad(step(*inputs).float().square().sum(), inputs)
    assert all(h.dtype == w.dtype and (h - w).norm() < 2e-2 * w.norm() for h, w in zip(have, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_scores_that_are_wider_than_the_values_stay(dtype):
    """Nothing casts the operands: the model multiplies in the wider type."""

    def f(q, k, v):
        scores = (q @ k.transpose(-1, -2) * 0.3).masked_fill(causal(6), float("-inf"))
        return scores.softmax(-1).bfloat16() @ v.bfloat16()

    report = explain(f, *qkv(dtype=dtype))
    assert report.counts[NAME] == 0 and "q, k and v are" in report.skipped(NAME)[0].reason


@pytest.mark.parametrize("target", ["cpu", "cuda", "npu"])
@pytest.mark.parametrize("mask", ["causal", "numbers"])
def test_operands_that_autocast_casts(target, mask):
    """Rotated queries and keys are float32 beside 16-bit values."""
    numbers = torch.randn(6, 6)

    def f(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return F.scaled_dot_product_attention(q, k, v.bfloat16(), positions_le(6) if mask == "causal" else numbers)

    inputs = qkv(dtype=torch.float32)
    fused = mask == "causal" or target != "cuda"
    assert explain(f, *inputs, target=target).counts[NAME] == fused
    step = torch.compile(f, backend="mindspeed", options={"codegen": "eager", "target": target})
    want = torch.autograd.grad(f(*inputs).float().square().sum(), inputs)
    have = torch.autograd.grad(step(*inputs).float().square().sum(), inputs)
    assert all(h.dtype == w.dtype and (h - w).norm() < 2e-2 * w.norm() for h, w in zip(have, want, strict=True))


def test_on_cuda_repeated_heads_of_a_call_are_left_to_the_kernel():
    def f(q, k, v):
        return F.scaled_dot_product_attention(q, *(x.repeat_interleave(2, 1) for x in (k, v)), is_causal=True)

    report = function_agrees(f, *qkv(kv_heads=2), target="cuda")
    run = next(r for r in report.graphs[0].runs if r.report.name == NAME)
    assert report.counts[NAME] == 1 and "None, 0.0, True" in run.after and "enable_gqa=True" in run.after


@pytest.mark.parametrize("composed", [False, True])
@pytest.mark.parametrize(
    "dtype, dim, causal, grouped",
    [("bfloat16", 64, True, 1), ("bfloat16", 264, True, 0), ("float32", 64, True, 0), ("bfloat16", 64, False, 0)],
)
def test_on_cuda_heads_are_repeated_where_no_flash_kernel_takes_groups(dtype, dim, causal, grouped, composed):
    """There torch would compose attention, with all scores in memory."""
    given = torch.rand(6, 6) < 0.5

    def f(q, k, v):
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        keep = positions_le(6) if causal else given
        if not composed:
            return F.scaled_dot_product_attention(q, k, v, keep)
        return (q @ k.transpose(-1, -2)).masked_fill(~keep, float("-inf")).softmax(-1) @ v

    report = explain(f, *qkv(kv_heads=2, dim=dim, dtype=getattr(torch, dtype)), target="cuda")
    run = next(r for r in report.graphs[0].runs if r.report.name == NAME)
    assert report.counts[NAME] == (causal or composed) and run.after.count("enable_gqa=True") == grouped


def test_on_cuda_a_call_that_drops_keeps_its_mask():
    """Another kernel would draw other numbers."""

    def f(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, positions_le(6), dropout_p=0.5)

    report = explain(f, *qkv(), target="cuda")
    assert report.counts[NAME] == 0 and "draw other numbers" in report.skipped(NAME)[0].reason


def test_on_cuda_what_flash_cannot_do_is_left_with_the_reason():
    report = function_agrees(
        lambda q, k, v: (torch.tanh(q @ k.transpose(-1, -2)) * 2).softmax(-1) @ v, *qkv(), target="cuda"
    )
    assert report.counts[NAME] == 0 and "soft-cap" in report.skipped(NAME)[0].reason
    torch._dynamo.reset()
    report = function_agrees(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), *qkv(), target="cuda")
    assert report.counts[NAME] == 0 and "itself on cuda" in report.skipped(NAME)[0].reason
