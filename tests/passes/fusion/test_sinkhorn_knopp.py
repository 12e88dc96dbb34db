"""Sinkhorn's algorithm, unrolled, becomes one operator."""

import pytest
import torch

from tests.models import explain, function_agrees, fusion_counts

NAME = "fusion.sinkhorn_knopp"


def divided(x, turns=7, eps=1e-6, first=-2, dim=-1, keep=True, more=False, other=None):
    """Rows of a softmax, columns and rows in turn; squares, for a sum of rows and columns has next to no gradient."""
    x = x.softmax(dim) + eps
    kept = []
    for turn in range(turns):
        along = first if turn % 2 == 0 else -3 - first
        total = x.sum(along, keepdim=True) + (other or eps)
        x = x / total
        kept.append(x)
    return (x.square(), kept[2].square()) if more else x.square()


def matrices(*shape, dtype=torch.float64):
    torch.manual_seed(0)
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize(
    "given, shape",
    [({}, (2, 5, 4, 4)), (dict(turns=1), (3, 3)), (dict(turns=39), (3, 4, 4)), (dict(eps=0.1), (5, 2, 2))],
)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-9), (torch.bfloat16, 0.05)])
def test_rewritten(given, shape, dtype, tolerance):
    report = function_agrees(lambda x: divided(x, **given), matrices(*shape, dtype=dtype), tolerance=tolerance)
    assert fusion_counts(report)[NAME] == 1


def test_a_last_division_of_rows_stays():
    report = function_agrees(lambda x: divided(x, turns=6), matrices(2, 4, 4))
    assert fusion_counts(report)[NAME] == 1


@pytest.mark.parametrize(
    "given, shape, reason",
    [
        (dict(first=-1), (2, 4, 4), None),  # rows of the softmax add up to one already: another function
        (dict(dim=-2), (2, 4, 4), None),
        (dict(other=1e-3), (2, 4, 4), None),
        ({}, (2, 3, 4), "matrices of 3 by 4"),
    ],
)
def test_left(given, shape, reason):
    report = function_agrees(lambda x: divided(x, **given), matrices(*shape))
    assert NAME not in fusion_counts(report)
    assert [s.reason for s in report.skipped(NAME) if reason in s.reason] if reason else not report.skipped(NAME)


def test_what_is_read_elsewhere_ends_the_chain():
    """Divisions up to the one that is read are fused; what follows stays."""
    report = function_agrees(lambda x: divided(x, more=True), matrices(2, 4, 4))
    assert fusion_counts(report)[NAME] == 1


@pytest.mark.parametrize("rows, fused", [(4, 1), (5, 0)])
def test_on_cuda_what_its_kernel_takes(rows, fused):
    report = explain(divided, matrices(2, rows, rows, dtype=torch.float32), target="cuda", hardware="h100")
    assert fusion_counts(report).get(NAME, 0) == fused
    assert any("matrices of 5 rows" in s.reason for s in report.skipped(NAME)) == (not fused)


def test_streams_of_transformers():
    """DeepSeek-V4's hyper-connections, values and gradients."""
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    config = modeling.DeepseekV4Config(hidden_size=16, hc_mult=4, num_hidden_layers=2)
    torch.manual_seed(0)
    connection = modeling.DeepseekV4HyperConnection(config)
    for parameter in connection.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randn(2, 5, 4, 16, requires_grad=True)

    def mixed(x):
        post, comb, collapsed = connection(x)
        return post.unsqueeze(-1) * collapsed.unsqueeze(-2) + comb.transpose(-1, -2) @ x

    report = function_agrees(mixed, x, tolerance=1e-4)
    assert fusion_counts(report)[NAME] == 1
