"""Which matrix products go to oneDNN on a processor where it is the faster library."""

import pytest
import torch

from mindspeed_fx.compat import dispatcher
from mindspeed_fx.kernels.cpu import weight_gradient
from mindspeed_fx.passes.lowering import onednn

SIZE = 256  # 2^24 multiplications


def matrix(layout, rows=SIZE, dtype=torch.float32):
    x = torch.empty(2 * rows, 2 * SIZE, dtype=dtype)
    return {"rows": x[:rows, :SIZE], "columns": x.t()[:SIZE, :rows].t(), "neither": x[::2, ::2]}[layout]


@pytest.mark.parametrize(
    "a, b, reason",
    [
        (matrix("rows"), matrix("rows"), None),
        (matrix("rows"), matrix("rows").t(), None),
        (matrix("rows"), matrix("neither"), "neither row-major nor transposed"),
        (matrix("rows", SIZE - 1), matrix("rows"), "too small to gain"),
        (matrix("rows", dtype=torch.bfloat16), matrix("rows", dtype=torch.bfloat16), "float32 on cpu only"),
    ],
)
def test_which_products_go(a, b, reason):
    refusal = onednn._refusal(a, b)
    assert refusal is None if reason is None else reason in refusal


def test_a_weight_gradient_goes_where_our_own_kernel_takes_it(monkeypatch):
    a, b = matrix("rows").t(), matrix("rows")
    for problem in (None, "no such processor"):
        monkeypatch.setattr(weight_gradient, "problem", lambda a, b, problem=problem: problem)
        refusal = onednn._refusal(a, b)
        assert refusal is None if problem is None else problem in refusal
        assert onednn.packs(a, b) is (problem is None) and not onednn.packs(b, b)


@pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this torch is built without oneDNN")
@pytest.mark.parametrize("beats", [True, False])
def test_the_pass_calls_it(monkeypatch, beats):
    from tests.models import function_agrees

    monkeypatch.setattr(dispatcher, "onednn_beats_blas", lambda: beats)
    x, w = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)
    report = function_agrees(lambda x, w: x @ w, x, w, tolerance=1e-5)
    assert report.counts[onednn.NAME] == beats
