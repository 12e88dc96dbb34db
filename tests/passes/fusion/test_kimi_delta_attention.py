"""Kimi Delta Attention that a model computes chunk by chunk becomes one operator."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from tests.models import assert_same_training, explain, function_agrees, fusion_counts
from tests.transformers_parts import part_of
from tests.zoo import planned_uses

NAME = "fusion.kimi_delta_attention"
SETTINGS = dict(norm=True, whole=False, beta_on="rows", gates="channels", step="same", mask="upper", final=False)
CHUNK = 4


def chunked(q, k, v, g, beta, state=None, **given):
    """The rule over chunks in one of its spellings, all in the type of the arguments: q, k and g [batch, seq, heads,
    k_dim], v [batch, seq, heads, v_dim], beta [batch, seq, heads]."""
    o = {**SETTINGS, **given}
    seq = v.shape[1]
    q, k, v, g, beta = (x.transpose(1, 2) for x in (q, k, v, g, beta))
    if o["norm"]:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q = q / math.sqrt(q.shape[-1])
    alike = F.pad(g[..., 0], (0, -seq % CHUNK)).unflatten(2, (-1, CHUNK)).cumsum(-1)
    g = g[..., :1] if o["gates"] == "shared" else g
    q, k, v, g = (F.pad(x, (0, 0, 0, -seq % CHUNK)).unflatten(2, (-1, CHUNK)) for x in (q, k, v, g))
    column = F.pad(beta, (0, -seq % CHUNK)).unflatten(2, (-1, CHUNK)).unsqueeze(-1)
    c = (g * 2 if o["gates"] == "double" else g).cumsum(-2)
    above = torch.ones(CHUNK, CHUNK, dtype=torch.bool).triu(0 if o["mask"] == "diagonal" else 1)
    if o["gates"] == "one":  # for all channels of a head, by which pairs are summed all the same
        pairs = (alike.unsqueeze(-1) - alike.unsqueeze(-2)).masked_fill(above, -math.inf).exp().unsqueeze(-1)
        grow, rest = alike.exp().unsqueeze(-1), (alike[..., -1:] - alike).exp().unsqueeze(-1)
        last = alike[..., -1].exp()[..., None, None]
    else:
        pairs = (c.unsqueeze(-2) - c.unsqueeze(-3)).masked_fill(above[..., None], -math.inf).exp()
        grow, rest, last = c.exp(), (c[..., -1:, :] - c).exp(), c[..., -1, :].exp().unsqueeze(-1)
    if o["beta_on"] == "rows":
        system = ((k * column).unsqueeze(-2) * k.unsqueeze(-3) * pairs).sum(-1)
    else:
        system = (pairs * (k.unsqueeze(-2) * k.unsqueeze(-3))).sum(-1) * column
    u = torch.linalg.solve_triangular(system, v * column, upper=False, unitriangular=True)
    w = torch.linalg.solve_triangular(system, k * column * grow, upper=False, unitriangular=True)
    s = torch.zeros(*k.shape[:2], k.shape[-1], v.shape[-1], dtype=v.dtype) if state is None else state
    out = torch.zeros_like(u)
    whole = (q * grow, (q.unsqueeze(-2) * k.unsqueeze(-3) * pairs).sum(-1), k * rest)
    for i in range(u.shape[2]):
        n = u[:, :, i] - w[:, :, i] @ s
        q_i, k_i, c_i = q[:, :, i], k[:, :, i], c[:, :, i]
        if o["whole"]:
            q_decayed, scores, k_decayed = (x[:, :, i] for x in whole)
        else:
            q_decayed, k_decayed = q_i * c_i.exp(), k_i * (c_i[:, :, -1:] - c_i).exp()
            scores = (q_i.unsqueeze(-2) * k_i.unsqueeze(-3) * pairs[:, :, i]).sum(-1).masked_fill(above, 0)
        out[:, :, i] = q_decayed @ s + scores @ n
        kept = last[:, :, i] if o["whole"] else c_i[:, :, -1].exp().unsqueeze(-1)
        if o["step"] == "columns":
            kept = c_i[:, :, -1].exp().unsqueeze(-2)
        elif o["step"] == "first":
            kept = c_i[:, :, 0].exp().unsqueeze(-1)
        s = s * kept + k_decayed.transpose(-1, -2) @ n
    out = out.flatten(2, 3)[:, :, :seq].transpose(1, 2).contiguous()
    return (out, s) if o["final"] else out


def inputs(seq=10, dtype=torch.float64, k_dim=3, v_dim=5):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, seq, 2, d, dtype=dtype, requires_grad=True) for d in (k_dim, k_dim, v_dim))
    g = (-torch.rand(2, seq, 2, k_dim, dtype=dtype)).requires_grad_()
    return q, k, v, g, torch.rand(2, seq, 2, dtype=dtype, requires_grad=True)


def skips(report):
    return [s.reason for s in report.skipped(NAME)]


@pytest.mark.parametrize(
    "given, seq",
    [
        ({}, 10),
        ({"whole": True, "norm": False}, 12),
        ({"final": True, "start": True, "beta_on": "system"}, 10),
    ],
)
def test_spellings(given, seq):
    given = dict(given)
    first = [torch.randn(2, 2, 3, 5, dtype=torch.float64, requires_grad=True)] if given.pop("start", False) else []
    report = function_agrees(lambda *a: chunked(*a, **given), *inputs(seq), *first)
    assert report.counts[NAME] == 1 and not skips(report)
    assert report.counts["fusion.gated_delta_rule"] == 0 and not report.skipped("fusion.gated_delta_rule")


@pytest.mark.parametrize(
    "given, reason",
    [
        ({"step": "first"}, "is no decay between two tokens of a chunk"),
        ({"step": "columns"}, "the state after chunk 0 is not S e^c + k^T N"),
        ({"gates": "one", "whole": True}, "pairs of tokens are summed by channels, of which"),
        ({"gates": "shared", "whole": True}, "are not one for every channel of the keys"),
        ({"gates": "double"}, "is not the running sum of the gates in each chunk"),
        ({"mask": "diagonal"}, "is not what a chunk may not see"),
    ],
)
def test_near_misses(given, reason):
    report = function_agrees(lambda *a: chunked(*a, **given), *inputs(v_dim=3))
    assert report.counts[NAME] == 0 and any(reason in r for r in skips(report)), skips(report)


@pytest.mark.parametrize(
    "name, dtype, seq",
    [
        ("kimi_linear", torch.float32, 130),
        pytest.param("kimi_linear", torch.bfloat16, 128, marks=pytest.mark.slow),
        pytest.param("bailing_hybrid", torch.float32, 64, marks=pytest.mark.slow),
        ("glm5_next", torch.float32, 64),
    ],
)
def test_functions_of_transformers(name, dtype, seq):
    function = part_of(f"models.{name}.modeling_{name}", "chunk_kimi_delta_attention")
    q, k, v, g, beta = inputs(seq, dtype, k_dim=8, v_dim=8)
    report = function_agrees(
        lambda q, k, v, g, beta: function(
            q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True, output_final_state=True
        ),
        q, k, v, g.detach().float().requires_grad_(), beta,
        tolerance=1e-5 if dtype == torch.float32 else 2e-2,
    )  # fmt: skip
    assert report.counts[NAME] == 1


class Loss(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, labels):
        return self.model(input_ids=input_ids, labels=labels)


@pytest.mark.parametrize("name", ["kimi_linear", pytest.param("bailing_hybrid", marks=pytest.mark.slow)])
def test_models(name):
    """Tiny models of transformers, two chunks: loss, every gradient, what is fused."""
    try:
        model, batch = planned_uses.build(name, "plain")
    except Exception as error:  # noqa: BLE001  the model is not ours
        pytest.skip(f"{name} is not built by this transformers: {error}")
    model = Loss(model)
    args = tuple(batch[k].repeat(1, 5) for k in ("input_ids", "labels"))  # 80 tokens
    counts = fusion_counts(explain(copy.deepcopy(model), *args))
    assert counts[NAME] >= 1 and "fusion.gated_delta_rule" not in counts, counts
    assert_same_training(model, *args, tolerance=1e-5)
