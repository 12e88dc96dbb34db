"""Products into place against float64, by whichever kernel the processor and the sizes call for."""

import itertools

import pytest
import torch

from mindspeed_fx.compat import cpp, dispatcher
from mindspeed_fx.kernels.cpu import narrow_product, products, weight_gradient
from mindspeed_fx.kernels.cpu.products import product_of

served = pytest.mark.skipif(cpp.problem() is not None, reason=str(cpp.problem()))
WIDE = {torch.float32: torch.float32, torch.bfloat16: torch.float32, torch.float64: torch.float64}


@pytest.fixture
def calls(monkeypatch):
    """Names of our kernels that were called."""
    names = []
    for module, name in ((narrow_product, "multiply"), (weight_gradient, "weight_gradient")):
        kernel = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, n=name, k=kernel, **kw: (names.append(n), k(*args, **kw))[1])
    return names


def matrix(rows, columns, dtype, is_turned):
    return (torch.randn(columns, rows).t() if is_turned else torch.randn(rows, columns)).to(dtype)


@pytest.mark.parametrize("beats", [True, False])
@pytest.mark.parametrize("dtype", WIDE)
def test_every_layout_and_size_is_the_product(dtype, beats, monkeypatch):
    monkeypatch.setattr(dispatcher, "onednn_beats_blas", lambda: beats)
    monkeypatch.setattr(products, "WORK", 5000)
    torch.manual_seed(0)
    for m, k, n in ((0, 4, 5), (3, 0, 5), (5, 9, 3), (40, 30, 70), (33, 200, 16), (7, 90, 80)):
        for turned in itertools.product([False, True], repeat=3):
            a, b = matrix(m, k, dtype, turned[0]), matrix(k, n, dtype, turned[1])
            out = matrix(m, n, WIDE[dtype], turned[2])
            product_of(a, b, out)
            torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=1e-4, atol=1e-4)


@served
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_products_take_our_kernels_where_the_blas_is_slow(dtype, calls, monkeypatch):
    monkeypatch.setattr(dispatcher, "multiplies_narrow", lambda dtype: True)
    monkeypatch.setattr(dispatcher, "onednn_beats_blas", lambda: True)
    monkeypatch.setattr(cpp, "multiplies_pairs", lambda: False)
    x, weight, grad = (torch.randn(s, dtype=dtype) for s in ((128, 64), (192, 64), (128, 192)))
    out, gradient = torch.empty(128, 192), torch.empty(192, 64)
    product_of(x, weight.t(), out)
    product_of(grad.t(), x, gradient)
    assert calls == ["multiply", "weight_gradient" if dtype == torch.float32 else "multiply"]
    product_of(x[:4], weight.t(), out[:4])
    product_of(x[:20], weight.t(), out[:20])
    monkeypatch.setattr(dispatcher, "onednn_beats_blas", lambda: False)
    product_of(x, weight.t(), out)
    assert len(calls) == 2
    torch.testing.assert_close(out, x.float() @ weight.float().t(), rtol=1e-4, atol=1e-4)


@served
def test_sums_of_pairs_are_left_in_float32_where_the_processor_multiplies_them(calls, monkeypatch):
    monkeypatch.setattr(dispatcher, "multiplies_narrow", lambda dtype: True)
    monkeypatch.setattr(dispatcher, "onednn_beats_blas", lambda: False)
    x, weight = torch.randn(9, 64).bfloat16(), torch.randn(30, 64).bfloat16()
    for has_pairs in (False, True):
        monkeypatch.setattr(cpp, "multiplies_pairs", lambda: has_pairs)
        assert (narrow_product.unable_to_sum(torch.bfloat16, "cpu") is None) == has_pairs
    monkeypatch.undo()
    for out in (torch.empty(9, 30), torch.empty(9, 30).bfloat16()):
        product_of(x, weight.t(), out)
        eps = torch.finfo(out.dtype).eps
        torch.testing.assert_close(out.double(), x.double() @ weight.double().t(), rtol=eps, atol=1e-5)


@pytest.mark.parametrize("sizes", [((40, 8), (9, 30), (40, 30)), ((40, 8), (8, 30), (39, 30))])
def test_sizes_that_do_not_fit(sizes):
    with pytest.raises(ValueError, match="product of"):
        product_of(*(torch.ones(s) for s in sizes))
