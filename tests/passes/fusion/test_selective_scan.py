"""Mamba's selective scan, unrolled or as an associative scan, becomes one operator."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch._higher_order_ops.associative_scan import associative_scan_op

from tests.models import assert_same_training, explain, function_agrees, fusion_counts
from tests.transformers_parts import part_of

NAME = "fusion.selective_scan"
SETTINGS = dict(softplus=True, shift=True, skip=True, gate=True, read="matmul", order="same", decay="same", final=False)


def scanned(u, dt, A, B, C, D, z, bias, state=None, **given):
    """The scan in one of its spellings: u, dt, z [batch, channels, seq], A [channels, n], B and C [batch, n, seq]."""
    o = {**SETTINGS, **given}
    dt = dt + bias[:, None] if o["shift"] else dt
    dt = F.softplus(dt) if o["softplus"] else dt
    decays = (
        (dt[..., None] * A[None, :, None]).exp() if o["decay"] == "same" else (dt[..., None] * A[:, None]).exp() + 1
    )
    added = (
        (u * dt)[..., None] * B.transpose(1, 2)[:, None]
        if o["read"] == "sum"
        else dt[..., None] * (B.transpose(1, 2)[:, None] * u[..., None])
    )
    state = torch.zeros_like(added[:, :, 0]) if state is None else state
    outs = []
    for t in range(u.shape[2]):
        place = -t if o["order"] == "other" else t
        state = decays[:, :, t] * state + added[:, :, place]
        if o["read"] == "sum":
            outs.append((state * C[:, :, t][:, None]).sum(-1))
        else:
            outs.append((state @ C.transpose(1, 2)[:, t, :, None])[:, :, 0])
        state = state * 2 if o["order"] == "scaled" else state
    y = torch.stack(outs, -1)
    y = y + u * D[:, None] if o["skip"] else y
    y = y * F.silu(z) if o["gate"] else y
    return (y, state) if o["final"] else y


def inputs(seq=6, dtype=torch.float64):
    torch.manual_seed(0)
    u, dt, z = (torch.randn(2, 5, seq, dtype=dtype) for _ in range(3))
    B, C = (torch.randn(2, 3, seq, dtype=dtype) for _ in range(2))
    D, bias = (torch.randn(5, dtype=dtype) for _ in range(2))
    return [x.requires_grad_() for x in (u, dt, -torch.rand(5, 3, dtype=dtype), B, C, D, z, bias)]


def skips(report):
    return [s.reason for s in report.skipped(NAME)]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"read": "sum", "final": True, "start": True},
        {"softplus": False, "skip": False},
        pytest.param({"shift": False, "gate": False, "final": True}, marks=pytest.mark.slow),
    ],
)
def test_spellings(given):
    start = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    first = [start] if (given := dict(given)).pop("start", False) else []
    report = function_agrees(lambda *a: scanned(*a, **given), *inputs(), *first)
    assert report.counts[NAME] == 1 and not skips(report), skips(report)


@pytest.mark.parametrize(
    "given, reason",
    [
        ({"order": "other"}, "decay, input and C of token 1 are not those of place 1"),
        ({"order": "scaled"}, "token 1 does not read the state that token 0 left"),
        ({"decay": "other"}, "are not exponentials of a step of each token times a rate of each channel"),
    ],
)
def test_near_misses(given, reason):
    report = function_agrees(lambda *a: scanned(*a, **given), *inputs())
    assert report.counts[NAME] == 0 and any(reason in r for r in skips(report)), skips(report)


@pytest.mark.parametrize(
    "dtype, seq, associative, last",
    [
        (torch.float32, 13, True, True),
        (torch.bfloat16, 12, False, False),
        pytest.param(torch.float32, 16, True, False, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, 5, True, False, marks=pytest.mark.slow),
    ],
)
def test_function_of_transformers(dtype, seq, associative, last):
    mamba_selective_scan = part_of("models.mamba.modeling_mamba", "mamba_selective_scan")

    def f(u, dt, A, B, C, D, z, bias):
        return mamba_selective_scan(
            u, dt, A, B, C, D, z, bias, delta_softplus=True, return_last_state=last, use_associative_scan=associative
        )

    u, dt, A, B, C, D, z, bias = inputs(seq, dtype)
    wide = [x.detach().float().requires_grad_() for x in (A, D, bias)]
    report = function_agrees(
        f, u, dt, wide[0], B, C, wide[1], z, wide[2], tolerance=1e-5 if dtype == torch.float32 else 3e-2
    )
    assert report.counts[NAME] == 1 and not skips(report), skips(report)


def minimal(u, dt, A, B, C, D, z, bias):
    """mamba-minimal's: tokens before channels."""
    u, dt, z, B, C = (x.transpose(1, 2) for x in (u, dt, z, B, C))
    dt = F.softplus(dt + bias)
    decays = torch.exp(torch.einsum("bld,dn->bldn", dt, A))
    added = torch.einsum("bld,bln,bld->bldn", dt, B, u)
    state, outs = torch.zeros(u.shape[0], A.shape[0], A.shape[1], dtype=u.dtype), []
    for t in range(u.shape[1]):
        state = decays[:, t] * state + added[:, t]
        outs.append(torch.einsum("bdn,bn->bd", state, C[:, t, :]))
    return (torch.stack(outs, dim=1) + u * D) * F.silu(z)


def reference(u, dt, A, B, C, D, z, bias):
    """``selective_scan_ref`` of state-spaces/mamba."""
    dt = F.softplus(dt + bias[..., None])
    decays = torch.exp(torch.einsum("bdl,dn->bdln", dt, A))
    added = torch.einsum("bdl,bnl,bdl->bdln", dt, B, u)
    state, outs = A.new_zeros((u.shape[0], A.shape[0], A.shape[1])), []
    for t in range(u.shape[2]):
        state = decays[:, :, t] * state + added[:, :, t]
        outs.append(torch.einsum("bdn,bn->bd", state, C[:, :, t]))
    y = torch.stack(outs, dim=2)
    return (y + u * D[:, None]) * F.silu(z)


@pytest.mark.parametrize("function", [minimal, reference])
def test_einsums_of_known_repositories(function):
    report = function_agrees(function, *inputs())
    assert report.counts[NAME] == 1 and not skips(report), skips(report)
    assert "aten.silu" not in next(r for r in report.graphs[0].runs if r.report.name == NAME).after


def pointwise(decays, added, swapped=False):
    """What ``associative_scan`` with combine_mode="pointwise" calls, which asks for CUDA before it does."""

    def combine(a, b, c, d):
        return [a * c, a * d + b if swapped else c * b + d]

    return associative_scan_op(combine, [x.movedim(2, 0) for x in (decays, added)], ())[1].movedim(0, 2)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_scan_of_cuda(swapped):
    def f(u, dt, A, B, C, D, z, bias):
        dt = F.softplus(dt + bias[:, None])
        added = dt[..., None] * (B.transpose(1, 2)[:, None] * u[..., None])
        states = pointwise((dt[..., None] * A[None, :, None]).exp(), added, swapped)
        y = (states.transpose(1, 2) @ C.transpose(1, 2)[..., None]).squeeze(-1).transpose(1, 2)
        return (y + u * D[:, None]) * F.silu(z)

    report = explain(f, *inputs())
    assert report.counts[NAME] == (not swapped) and not skips(report)
    left = next(run.after for run in report.graphs[0].runs if run.report.name == "fusion.swiglu")
    calls = [line for line in left.splitlines() if "#" not in line]
    assert any("associative_scan" in line for line in calls) == swapped, calls


def test_values_and_gradients_of_a_scan_of_cuda():
    def f(u, dt, A, B, C):
        added = dt[..., None] * (B.transpose(1, 2)[:, None] * u[..., None])
        states = pointwise((dt[..., None] * A[None, :, None]).exp(), added)
        return (states.transpose(1, 2) @ C.transpose(1, 2)[..., None]).squeeze(-1).transpose(1, 2)

    def results(run):
        values = inputs()[:5]
        y = run(*values)
        return [y, *torch.autograd.grad(y.sin().sum(), values)]

    plain = dict(softplus=False, shift=False, skip=False, gate=False)
    want = results(lambda *values: scanned(*values, None, None, None, **plain))
    have = results(torch.compile(f, backend="mindspeed", options={"codegen": "eager"}))
    for a, b in zip(have, want, strict=True):
        assert (a - b).abs().max() < 1e-11


def test_c_may_be_a_product_as_of_a_norm_with_its_weight():
    mamba_selective_scan = part_of("models.mamba.modeling_mamba", "mamba_selective_scan")

    def f(u, dt, A, B, C, weight):
        return mamba_selective_scan(u, dt, A, B, C * weight[:, None], use_associative_scan=True)

    values = [x.detach().float().requires_grad_() for x in inputs(4)[:5]]
    report = function_agrees(f, *values, torch.rand(3, requires_grad=True), tolerance=1e-5)
    assert report.counts[NAME] == 1 and not skips(report), skips(report)


@pytest.mark.slow
def test_mamba():
    """Two layers in float64 throughout: loss, every gradient, what is fused."""
    from tests.zoo import plans

    model, batch = plans.build("mamba")
    args = tuple(batch.values())
    counts = fusion_counts(explain(copy.deepcopy(model), *args))
    assert counts[NAME] == 2 and counts["fusion.causal_conv1d"] == 2, counts
    assert_same_training(model, *args, tolerance=1e-9)


@pytest.mark.parametrize("width, reason", [(4, None), (40, "states 40 wide, the kernel takes up to 32")])
def test_associative_scans_on_accelerators(width, reason):
    """Where a kernel walks through the tokens; else they stay."""
    mamba_selective_scan = part_of("models.mamba.modeling_mamba", "mamba_selective_scan")

    def f(u, dt, A, B, C):
        return mamba_selective_scan(u, dt, A, B, C, use_associative_scan=True)

    u, dt, a, b, c = inputs(4, torch.float32)[:5]
    a, b, c = (x.new_ones((*x.shape[:1], width, *x.shape[2:])) for x in (a, b, c))
    report = explain(f, u, dt, -a, b, c, target="npu", hardware="ascend910b2")
    assert report.counts[NAME] == (reason is None)
    assert reason is None or any(reason in r and "each token's step" in r for r in skips(report)), skips(report)
