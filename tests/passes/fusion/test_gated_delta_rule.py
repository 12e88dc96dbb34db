"""A gated delta rule that a model computes chunk by chunk becomes one operator."""

import copy
import inspect
import math

import pytest
import torch
import torch.nn.functional as F

from tests.models import assert_same_training, explain, function_agrees, fusion_counts
from tests.transformers_parts import part_of

NAME = "fusion.gated_delta_rule"
SETTINGS = dict(
    eps=1e-6,
    pad=True,
    ratio=2,
    chunk=4,
    norm=True,
    beta_on="rows",
    mask="upper",
    system="same",
    step="same",
    rows=False,
    final=False,
    by_chunk=False,
)


def by_rows(system):
    """The inverse of the unit lower triangle, as transformers builds it where it may not call a solver."""
    inverse = -system.tril(-1)
    for i in range(1, system.shape[-1]):
        row, block = inverse[..., i, :i].clone(), inverse[..., :i, :i].clone()
        inverse[..., i, :i] = row + (row.unsqueeze(-1) * block).sum(-2)
    return inverse + torch.eye(system.shape[-1], dtype=system.dtype)


def chunked(q, k, v, g, beta, state=None, **given):
    """The rule over chunks in one of its spellings, all in the type of the arguments: q and k [batch, seq, heads,
    k_dim], v [batch, seq, heads * ratio, v_dim], g and beta [batch, seq, heads * ratio]."""
    o = {**SETTINGS, **given}
    c, seq = o["chunk"], v.shape[1]
    q, k = (x.repeat_interleave(o["ratio"], 2) for x in (q, k))
    q, k, v, g, beta = (x.transpose(1, 2) for x in (q, k, v, g, beta))
    if o["norm"]:
        q = q * torch.rsqrt((q * q).sum(-1, keepdim=True) + o["eps"])
        k = k * torch.rsqrt(k.pow(2).sum(-1, keepdim=True) + (1e-2 if o["norm"] == "other" else o["eps"]))
    q = q / math.sqrt(q.shape[-1])
    q, k, v = (F.pad(x, (0, 0, 0, -seq % c)) for x in (q, k, v))
    g, beta = (F.pad(x, (0, -seq % c)) for x in (g, beta))
    q, k, v = (x.unflatten(2, (-1, c)) for x in (q, k, v))
    g, beta = (x.unflatten(2, (-1, c)) for x in (g, beta))
    gates = (g * 2 if o["step"] == "gates" else g).cumsum(-1)
    above = torch.ones(c, c, dtype=torch.bool).triu(0 if o["mask"] == "diagonal" else 1)
    if o["mask"] == "lower":
        above = ~torch.ones(c, c, dtype=torch.bool).tril()
    pairs = (gates.unsqueeze(-1) - gates.unsqueeze(-2)).masked_fill(above, -math.inf).exp()
    column = beta.unsqueeze(-1)
    if o["beta_on"] == "rows":
        system, decayed = (k * column) @ k.transpose(-1, -2) * pairs, k * column * gates.exp().unsqueeze(-1)
    else:
        system, decayed = pairs * column * (k @ k.mT), k * (beta * gates.exp()).unsqueeze(-1)
    if o["rows"]:
        inverse = by_rows(system)
        u, w = inverse @ (v * column), inverse @ decayed
    else:
        u = torch.linalg.solve_triangular(system, v * column, upper=False, unitriangular=True)
        other = system * 2 if o["system"] == "other" else system
        w = torch.linalg.solve_triangular(other, decayed, upper=False, unitriangular=True)
    s = torch.zeros(*k.shape[:2], k.shape[-1], v.shape[-1], dtype=v.dtype) if state is None else state
    scores, out = q @ k.transpose(-1, -2) * pairs, torch.zeros_like(u)
    plain_q, plain_k = q, k
    q, k = q * gates.exp().unsqueeze(-1), k * (gates[..., -1:] - gates).exp().unsqueeze(-1)
    last = gates[..., -1].exp()[..., None, None]
    for i in range(u.shape[2]):
        n = u[:, :, i] - w[:, :, i] @ s
        if o["by_chunk"]:  # as transformers has it before its release 5
            q_i, k_i, c_i = plain_q[:, :, i], plain_k[:, :, i], gates[:, :, i]
            seen = (q_i @ k_i.transpose(-1, -2) * pairs[:, :, i]).masked_fill_(above, 0)
            out[:, :, i] = (q_i * gates[:, :, i, :, None].exp()) @ s + seen @ n
            rest = (c_i[:, :, -1, None] - c_i).exp()[..., None]
            s = s * gates[:, :, i, -1, None, None].exp() + (k_i * rest).transpose(-1, -2) @ n
        else:
            out[:, :, i] = q[:, :, i] @ s + scores[:, :, i] @ n
            s = s * last[:, :, i] + k[:, :, i].transpose(-1, -2) @ n
        s = s * 1.5 if o["step"] == "scaled" else s
    out = out.flatten(2, 3)
    out = out[:, :, :seq].transpose(1, 2).contiguous()
    return (out, s) if o["final"] else out


def inputs(seq=10, dtype=torch.float64, heads=2, ratio=2):
    torch.manual_seed(0)
    q, k = (torch.randn(2, seq, heads, 3, dtype=dtype, requires_grad=True) for _ in range(2))
    v = torch.randn(2, seq, heads * ratio, 5, dtype=dtype, requires_grad=True)
    g = (-torch.rand(2, seq, heads * ratio, dtype=dtype)).requires_grad_()
    return q, k, v, g, torch.rand(2, seq, heads * ratio, dtype=dtype, requires_grad=True)


def start():
    return torch.randn(2, 4, 3, 5, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    "given, seq",
    [
        ({}, 10),
        ({"norm": False, "beta_on": "system", "mask": "lower"}, 12),
        pytest.param({"ratio": 1, "eps": 0.5}, 10, marks=pytest.mark.slow),
        pytest.param({"final": True}, 12, marks=pytest.mark.slow),
        ({"final": True, "start": True}, 10),
        ({"chunk": 16}, 10),
        ({"by_chunk": True, "final": True, "start": True}, 10),
        ({"rows": True, "final": True, "start": True}, 10),
    ],
)
def test_spellings(given, seq):
    first = [start()] if (given := dict(given)).pop("start", False) else []
    report = function_agrees(lambda *a: chunked(*a, **given), *inputs(seq, ratio=given.get("ratio", 2)), *first)
    assert report.counts[NAME] == 1 and not skips(report)


def skips(report):
    return [s.reason for s in report.skipped(NAME)]


@pytest.mark.parametrize(
    "given, reason",
    [
        pytest.param(
            {"norm": "other"}, "queries are normalized with eps 1e-06 and keys with 0.01", marks=pytest.mark.slow
        ),
        pytest.param({"mask": "diagonal"}, "is not what a chunk may not see", marks=pytest.mark.slow),
        pytest.param({"system": "other"}, "is not solved from the system of linalg_solve", marks=pytest.mark.slow),
        ({"step": "scaled"}, "chunk 1 does not read the state that chunk 0 left"),
        ({"step": "gates"}, "is not the running sum of the gates in each chunk"),
    ],
)
def test_near_misses(given, reason):
    report = function_agrees(lambda *a: chunked(*a, **given), *inputs())
    assert report.counts[NAME] == 0 and any(reason in r for r in skips(report)), skips(report)


def test_solutions_of_other_systems_are_no_near_miss():
    def f(a, b):
        return torch.linalg.solve_triangular(a, b, upper=False, unitriangular=True)

    system = torch.eye(4, dtype=torch.float64).expand(2, 2, 3, 4, 4).clone().requires_grad_()
    report = function_agrees(f, system, torch.randn(2, 2, 3, 4, 5, dtype=torch.float64))
    assert report.counts[NAME] == 0 and not skips(report)


def of_transformers(q, k, v, g, beta):
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    return torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]


@pytest.mark.parametrize(
    "dtype, seq", [pytest.param(torch.float32, 130, marks=pytest.mark.slow), (torch.bfloat16, 128)]
)
def test_function_of_transformers(dtype, seq):
    function = part_of("models.qwen3_next.modeling_qwen3_next", "torch_chunk_gated_delta_rule")
    if "solve_triangular" not in inspect.getsource(function):
        pytest.skip("this transformers solves the systems of chunks row by row, in place")
    q, k, v, g, beta = inputs(seq, dtype)
    if "repeat_interleave" not in inspect.getsource(function):  # its caller repeats the heads of keys
        q, k = (x.detach().repeat_interleave(v.shape[2] // x.shape[2], 2).requires_grad_() for x in (q, k))
    report = function_agrees(
        of_transformers, q, k, v, g.detach().float().requires_grad_(), beta,
        tolerance=1e-5 if dtype == torch.float32 else 2e-2,
    )  # fmt: skip
    assert report.counts[NAME] == 1


@pytest.mark.slow
def test_qwen3_next():
    """Two layers, one of each kind, two chunks, in float64 throughout: loss, every gradient, what is fused."""
    from tests.zoo import plans

    model, batch = plans.build("qwen3_next")
    args = tuple(x.repeat(1, 5) for x in batch.values())  # 80 tokens
    counts = fusion_counts(explain(copy.deepcopy(model), *args))
    assert counts[NAME] == 1 and counts["fusion.attention"] == 1, counts
    assert_same_training(model, *args, tolerance=1e-9)
