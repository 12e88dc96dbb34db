"""Mamba-2's state space dual that a model computes chunk by chunk becomes one operator."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from tests.models import assert_same_training, explain, function_agrees, fusion_counts
from tests.transformers_parts import part_of

NAME = "fusion.ssd"
SETTINGS = dict(
    chunk=4, ratio=2, spelling="einsum", segments="sums", skip="padded", decay="same", keys="same", mask=1, final=False
)


def segments(a, spelling, first=1):
    """The sums of a over (s, l], minus infinity where s > l."""
    c = a.shape[-1]
    above = torch.ones(c, c, dtype=torch.bool).triu(first)
    if spelling == "differences":
        c = a.cumsum(-1)
        return (c[..., :, None] - c[..., None, :]).masked_fill(above, -math.inf)
    rows = a[..., None].expand(*a.shape, c).masked_fill(~torch.ones(c, c, dtype=torch.bool).tril(-1), 0)
    return rows.cumsum(-2).masked_fill(above, -math.inf)


def chunked(x, dt, A, B, C, D, state=None, **given):
    """The rule over chunks in one of its spellings: x [batch, seq, heads, p], dt [batch, seq, heads], B and C [batch,
    seq, heads / ratio, n]."""
    o = {**SETTINGS, **given}
    c, seq, e = o["chunk"], x.shape[1], torch.einsum
    missing, by_sum = -seq % c, o["spelling"] == "sums"
    B, C = (y.repeat_interleave(o["ratio"], 2) for y in (B, C)) if o["ratio"] > 1 else (B, C)
    skip = D[:, None] * (F.pad(x, (0, 0, 0, 0, 0, missing)) if o["skip"] == "padded" else x)
    steps, a = x * dt[..., None], dt * A if o["decay"] != "other" else dt * A * 2
    steps, B, C = (F.pad(y, (0, 0, 0, 0, 0, missing)).unflatten(1, (-1, c)) for y in (steps, B, C))
    a = F.pad(a, (0, 0, 0, missing)).unflatten(1, (-1, c)).permute(0, 3, 1, 2)
    sums, pairs = a.cumsum(-1), segments(a, o["segments"], o["mask"]).exp()
    if by_sum:
        scores = (C[:, :, :, None] * B[:, :, None]).sum(-1)
        inside = ((scores * pairs.permute(0, 2, 3, 4, 1))[..., None] * steps[:, :, None]).sum(3)
    else:
        inside = e("bclsh,bcshp->bclhp", e("bclhn,bcshn->bclsh", C, B) * pairs.permute(0, 2, 3, 4, 1), steps)
    rest = (sums[..., -1:] - sums).exp().permute(0, 2, 3, 1)[..., None]
    keys = B * 2 if o["keys"] == "other" else B
    if by_sum:
        added = ((keys * rest).permute(0, 1, 3, 2, 4)[..., None, :] * steps.permute(0, 1, 3, 2, 4)[..., None]).sum(3)
    else:
        added = e("bclhn,bclhp->bchpn", keys * rest, steps)
    first = torch.zeros_like(added[:, :1]) if state is None else state[:, None]
    line = torch.cat([first, added], 1)
    between = segments(F.pad(sums[..., -1], (1, 0)), o["segments"]).exp().transpose(1, 3)
    if by_sum:
        line = (between[..., None, None] * line[:, :, None]).sum(1)
    else:
        line = e("bzch,bzhpn->bchpn", between, line)
    states, final = line[:, :-1], line[:, -1]
    grown = sums.exp().permute(0, 2, 3, 1)[..., None]
    if by_sum:
        across = (C[..., None, :] * states[:, :, None]).sum(-1) * grown
    else:
        across = e("bclhn,bchpn->bclhp", C, states) * grown
    out = (inside + across).flatten(1, 2)
    if o["skip"] == "padded":
        out = (out + skip)[:, :seq]
    else:
        out = out[:, :seq] if o["skip"] != "whole" else out
        out = out + skip if o["skip"] == "cut" else out
    return (out, final) if o["final"] else out


def inputs(seq=10, dtype=torch.float64, heads=4, groups=2):
    torch.manual_seed(0)
    x, dt = torch.randn(2, seq, heads, 3, dtype=dtype), torch.rand(2, seq, heads, dtype=dtype)
    B, C = (torch.randn(2, seq, groups, 5, dtype=dtype) for _ in range(2))
    return [y.requires_grad_() for y in (x, dt, -torch.rand(heads, dtype=dtype), B, C, torch.randn(heads, dtype=dtype))]


def skips(report):
    return [s.reason for s in report.skipped(NAME)]


@pytest.mark.parametrize(
    "given, seq",
    [
        ({}, 10),
        ({"spelling": "sums", "skip": "cut", "segments": "differences"}, 10),
        ({"final": True, "start": True}, 10),
        pytest.param({"final": True, "skip": "none"}, 8, marks=pytest.mark.slow),
        pytest.param({"skip": "whole", "ratio": 1}, 10, marks=pytest.mark.slow),
        pytest.param({"chunk": 16}, 10, marks=pytest.mark.slow),
    ],
)
def test_spellings(given, seq):
    start = torch.randn(2, 4, 3, 5, dtype=torch.float64, requires_grad=True)
    first = [start] if (given := dict(given)).pop("start", False) else []
    args = inputs(seq, groups=4 // given.get("ratio", 2))
    report = function_agrees(lambda *a: chunked(*a, **given), *args, *first)
    assert report.counts[NAME] == 1 and not skips(report), skips(report)


@pytest.mark.parametrize(
    "given, reason",
    [
        ({"decay": "other"}, "is not the step of each token times a rate of each head"),
        ({"keys": "other"}, "is not bclhn, rest bhcl, bclhp -> bchpn"),
        pytest.param({"mask": 2}, None, marks=pytest.mark.slow),
    ],
)
def test_near_misses(given, reason):
    report = function_agrees(lambda *a: chunked(*a, **given), *inputs())
    assert report.counts[NAME] == 0
    assert any(reason in r for r in skips(report)) if reason else not skips(report), skips(report)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_function_of_transformers(dtype):
    mamba2_chunk_scan = part_of("models.mamba2.modeling_mamba2", "mamba2_chunk_scan")

    def f(x, dt, A, B, C, D, bias):
        limits = (1e-3, 2.0)
        return mamba2_chunk_scan(x, dt, A, B, C, 64, D=D, dt_bias=bias, dt_softplus=True, dt_limit=limits)

    x, dt, A, B, C, D = inputs(130, dtype)
    report = function_agrees(
        f, x, dt, A.detach().float().requires_grad_(), B, C, D, torch.randn(4, dtype=dtype),
        tolerance=2e-5 if dtype == torch.float32 else 2e-2,
    )  # fmt: skip
    assert report.counts[NAME] == 1 and not skips(report)


@pytest.mark.slow
def test_mamba2():
    """Two layers, two chunks, in float64 throughout: loss, every gradient, what is fused."""
    from tests.zoo import plans

    model, batch = plans.build("mamba2")
    args = tuple(batch.values())
    counts = fusion_counts(explain(copy.deepcopy(model), *args))
    assert counts[NAME] == 2 and counts["fusion.causal_conv1d"] == 2, counts
    assert_same_training(model, *args, tolerance=1e-9)


CONFIGS = {
    "bamba": ("BambaForCausalLM", dict(attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=2), 1),
    "falcon_h1": ("FalconH1ForCausalLM", dict(mamba_n_heads=8, mamba_d_head=8, mamba_d_ssm=64), 2),
}
SMALL = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    vocab_size=64, mamba_d_state=8, mamba_chunk_size=8, pad_token_id=None,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_hybrids_of_transformers(name):
    import transformers

    torch.manual_seed(0)
    model_type, own, count = CONFIGS[name]
    model = getattr(transformers, model_type)(transformers.AutoConfig.for_model(name, **SMALL | own)).train()

    def loss(ids):
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    counts = fusion_counts(explain(loss, torch.randint(3, 60, (2, 20))))
    assert counts[NAME] == count, counts
