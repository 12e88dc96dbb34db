"""Linear layers of 8-bit operands: by formula, element by element; gradients; graphs; what torchao's layers give."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from mindspeed_fx.kernels import REGISTRY
from mindspeed_fx.kernels import linear_fp8 as fp8
from mindspeed_fx.kernels.linear_fp8 import RECIPES

ops = torch.ops.mindspeed
E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2


def by_formula(a: torch.Tensor, b: torch.Tensor, recipe: str, dtypes: tuple, squares: tuple) -> torch.Tensor:
    """a [m, t] b [t, n] of 8-bit operands, each part that shares a scale on its own."""
    return eighth(a, 1, recipe, dtypes[0], squares[0]) @ eighth(b, 0, recipe, dtypes[1], squares[1])


def eighth(x: torch.Tensor, axis: int, recipe: str, dtype: torch.dtype, square: bool) -> torch.Tensor:
    result, (rows, columns) = torch.empty_like(x), x.shape
    high, wide = {
        "tensor": (rows, columns),
        "row": (1, columns) if axis == 1 else (rows, 1),
        "block": (128, 128) if square else (1, 128) if axis == 1 else (128, 1),
        "mx": (1, 32) if axis == 1 else (32, 1),
        "mx_square": (32, 32) if square else (1, 32) if axis == 1 else (32, 1),
    }[recipe]
    for i, j in itertools.product(range(0, rows, high), range(0, columns, wide)):
        part = x[i : i + high, j : j + wide]
        largest = part.abs().max().item()
        scale = torch.tensor(torch.finfo(dtype).max / max(largest, 1e-12), dtype=torch.float32)
        if recipe == "row":
            scale = 2.0 ** scale.log2().floor()
        if recipe.startswith("mx"):  # from [2^n, 2^(n+1)) to [256, 512), of which 8 bits have no more than 448
            scale = torch.tensor(2.0 ** (9 - math.frexp(largest)[1]))
        numbers = (part * scale).clamp(-448, 448) if recipe.startswith("mx") else part * scale
        result[i : i + high, j : j + wide] = numbers.float().to(dtype).double() / scale
    return result


@pytest.mark.parametrize("recipe", RECIPES)
def test_products_and_gradients_by_formula(recipe):
    x, weight, grad = (torch.randn(n, dtype=torch.double) * 3 for n in ((2, 70, 150), (133, 150), (2, 70, 133)))
    x[0, 3], weight[:, 5] = x[0, 3] * 1000, 0  # a far row, and a column of no magnitude
    x.requires_grad_(), weight.requires_grad_()
    out = ops.linear_fp8(x, weight, recipe)
    out.backward(grad)
    g, rows, w = grad.flatten(0, 1), x.detach().flatten(0, 1), weight.detach()
    far = E5 if recipe == "tensor" else E4
    want = by_formula(rows, w.t(), recipe, (E4, E4), (False, True))
    torch.testing.assert_close(out.detach().flatten(0, 1), want, rtol=1e-12, atol=1e-12)
    want = by_formula(g, w, recipe, (far, E4), (False, True))
    torch.testing.assert_close(x.grad.flatten(0, 1), want, rtol=1e-12, atol=1e-12)
    want = by_formula(g.t(), rows, recipe, (far, E4), (False, False))
    torch.testing.assert_close(weight.grad, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("recipe", ["mx", "mx_square"])
def test_edges_of_microscaling_formats(recipe):
    """Powers of two, next to them, above 448 of 512, the smallest, none, and what is no number."""
    x = torch.zeros(10, 40)
    firsts = (1.0, 1.0 - 2**-24, 2.0 - 2**-23, 1.75, 1.8125, 2.0**-120, 2.0**127, -1.8125)
    for row, first in enumerate(firsts):
        x[row, :2] = torch.tensor([first, first * 2**-16])
    x[8, 3], x[9, 35] = math.inf, math.nan
    back = fp8.rounded(x, 1, recipe, E4)
    assert back[:8, 0].tolist() == [1.0, 0.875, 1.75, 1.75, 1.75, 2.0**-120, 2.0**127, -1.75]
    smallest = [2.0**-16, 2.0**-16, 2.0**-15, 2.0**-15, 2.0**-15, 2.0**-136, 2.0**111, -(2.0**-15)]
    assert back[:8, 1].tolist() == smallest  # few steps of what 8 bits have least
    assert back.isnan().nonzero().tolist() == [*([8, j] for j in range(32)), *([9, j] for j in range(32, 40))]


def test_a_square_of_a_weight_is_rounded_alike_along_both_dimensions():
    weight = torch.randn(70, 100)
    one, other = (fp8.rounded(weight, axis, "mx_square", E4, is_weight=True) for axis in (0, 1))
    assert torch.equal(one, other)
    assert not torch.equal(*(fp8.rounded(weight, axis, "mx", E4, is_weight=True) for axis in (0, 1)))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_near_as_8_bits_are(recipe, dtype):
    """Three bits of fraction: a relative rounding of at most 1/16 in each operand, 1/8 where a gradient has two."""
    x, weight = torch.randn(64, 256).to(dtype).requires_grad_(), torch.randn(96, 256).to(dtype).requires_grad_()
    out, plain = ops.linear_fp8(x, weight, recipe), torch.nn.functional.linear(x.double(), weight.double())
    grad = torch.randn_like(out)
    out.backward(grad)
    wanted = plain, grad.double() @ weight.detach().double(), grad.double().t() @ x.detach().double()
    for have, want, bound in zip((out, x.grad, weight.grad), wanted, (0.06, 0.09, 0.09)):
        assert have.dtype == dtype
        assert 0.005 < (have.double() - want).norm() / want.norm() < bound


@pytest.mark.parametrize("needed", [(True, False), (False, True)])
def test_only_what_is_asked_for(needed):
    x, weight = torch.randn(5, 16, requires_grad=needed[0]), torch.randn(3, 16, requires_grad=needed[1])
    ops.linear_fp8(x, weight, "row").sum().backward()
    assert (x.grad is not None, weight.grad is not None) == needed
    grads = ops.linear_fp8_backward(torch.ones(5, 3), x.detach(), weight.detach(), "row", list(needed))
    assert tuple(g.numel() > 0 for g in grads) == needed


@pytest.mark.parametrize("recipe", RECIPES)
def test_rules_of_custom_operators(recipe):
    x, weight = torch.randn(2, 5, 16, requires_grad=True), torch.randn(3, 16, requires_grad=True)
    results = torch.library.opcheck(ops.linear_fp8.default, (x, weight, recipe), raise_exception=False)
    assert set(results.values()) == {"SUCCESS"}, results
    assert ops.linear_fp8(torch.empty(0, 16), weight, recipe).shape == (0, 3)


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="recipe='rows'; valid: tensor, row, block, mx, mx_square"):
        ops.linear_fp8(torch.randn(2, 16), torch.randn(3, 16), "rows")
    with pytest.raises(ValueError, match=r"x is \[2, 15\], weight \[3, 16\]; valid: \[\.\.\., k\] and \[n, k\]"):
        ops.linear_fp8(torch.randn(2, 15), torch.randn(3, 16), "row")


class Layer(torch.nn.Module):
    def __init__(self, recipe: str):
        super().__init__()
        self.recipe, self.weight = recipe, torch.nn.Parameter(torch.randn(24, 16))

    def forward(self, x):
        return ops.linear_fp8(torch.nn.functional.silu(x), self.weight, self.recipe).square().mean()


@pytest.mark.parametrize(
    "codegen, recipe",
    [*(("eager", r) for r in RECIPES), *(pytest.param("inductor", r, marks=pytest.mark.slow) for r in RECIPES)],
)
def test_a_compiled_step_is_the_eager_one(codegen, recipe):
    layer, x = Layer(recipe), torch.randn(2, 130, 16, requires_grad=True)
    layer(x).backward()
    want, layer.weight.grad, x.grad = (layer.weight.grad, x.grad), None, None
    torch.compile(layer, backend="mindspeed", fullgraph=True, options={"codegen": codegen})(x).backward()
    for have, w in zip((layer.weight.grad, x.grad), want):
        torch.testing.assert_close(have, w, rtol=1e-5, atol=1e-6)
        assert have.abs().sum() > 0


@pytest.mark.parametrize("recipe, name", [("tensor", "tensorwise"), ("row", "rowwise")])
def test_torchaos_layer_gives_the_same(recipe, name):
    float8 = pytest.importorskip("torchao.float8", reason="torchao is not installed")
    config = float8.Float8LinearConfig.from_recipe_name(name)
    object.__setattr__(config, "emulate", True)
    plain = torch.nn.Linear(64, 32, bias=False)
    theirs = float8.convert_to_float8_training(torch.nn.Sequential(plain), config=config)
    x, weight = torch.randn(48, 64, requires_grad=True), plain.weight.detach().clone().requires_grad_()
    ops.linear_fp8(x, weight, recipe).square().sum().backward()
    other = x.detach().clone().requires_grad_()
    theirs(other).square().sum().backward()
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(weight.grad, theirs[0].weight.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchaos_microscaling_tensor_is_the_same(dtype):
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason="torchao is not installed")
    x = (torch.randn(48, 64) * torch.randn(48, 1).exp2()).to(dtype)
    power, want = mx.to_mx(x, E4, 32)
    want = want.float().unflatten(1, (-1, 32)) * power.float().unsqueeze(-1)
    assert torch.equal(fp8.rounded(x, 1, "mx", E4), want.flatten(1))


def rows_are_scaled_on_cpu():
    a, scales = torch.zeros(16, 16, dtype=torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(a, a.t(), scales, scales.t())
    except RuntimeError:
        return False
    return True


BY = [(fp8.scaled_mm, r) for r in ("tensor", "row")] + [(fp8.pairs, r) for r in RECIPES if r != "block"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("multiply, recipe", BY)
def test_products_of_8_bit_numbers_are_the_emulated(multiply, recipe, dtype):
    """Sums in another order, and in the type of the arguments one rounding more."""
    if multiply is fp8.scaled_mm and recipe == "row" and not rows_are_scaled_on_cpu():
        pytest.skip("torch._scaled_mm of this torch takes no scales of rows on cpu")
    x, weight = (3 * torch.randn(2, 40, 96)).to(dtype), torch.randn(64, 96).to(dtype)
    grad = torch.randn(2, 40, 64).to(dtype)
    x[0, 3] *= 1000
    have = [fp8.forward_by(multiply)(x, weight, recipe)]
    have += fp8.backward_by(multiply)(grad, x, weight, recipe, [True, True])
    want = [ops.linear_fp8(x, weight, recipe), *ops.linear_fp8_backward(grad, x, weight, recipe, [True, True])]
    bound = 2e-6 if dtype == torch.float32 else 8e-3
    for a, b in zip(have, want):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert (a.double() - b.double()).abs().max() < bound * b.double().abs().max()


def test_which_products_serve(monkeypatch):
    x, weight = (torch.empty(32, 64, dtype=torch.bfloat16, device="meta") for _ in range(2))
    choose = REGISTRY[ops.linear_fp8.default].choose
    assert "no device from sm_89" in choose("cuda", (x, weight, "row"), {})[1][0]
    monkeypatch.setattr(fp8.dispatcher, "multiplies_fp8", lambda device: True)
    assert choose("cuda", (x, weight, "row"), {})[0] is not None
    assert "multiples of 16" in choose("cuda", (x[:, :40], weight[:, :40], "tensor"), {})[1][0]
    assert "not bfloat16" in choose("cuda", (x.float(), weight.float(), "row"), {})[1][0]
    assert all("scales of blocks" in choose("cuda", (x, weight, r), {})[1][0] for r in fp8.BLOCKS)
    back = REGISTRY[ops.linear_fp8_backward.default].choose
    assert "multiples of 16" in back("cuda", (x[:9, :32], x[:9], weight[:32], "row", [True, True]), {})[1][0]
    assert "a small product" in choose("cpu", (x, weight, "row"), {})[1][0]
    assert "no powers of two" in choose("cpu", (x, weight, "block"), {})[1][0]


@pytest.mark.parametrize("recipe", ["tensor", "row", "mx", "mx_square"])
def test_a_compiled_layer_on_products_of_pairs(recipe, monkeypatch):
    monkeypatch.setattr(fp8, "WORK", 1)
    if fp8._refuse_pairs(torch.empty(8, 8), torch.empty(8, 8), recipe):
        pytest.skip("this processor does not multiply pairs of bfloat16")
    x, weight = torch.randn(2, 40, 96, requires_grad=True), torch.randn(64, 96, requires_grad=True)
    step = torch.compile(lambda x, w: ops.linear_fp8(x, w, recipe), backend="mindspeed", options={"codegen": "eager"})
    grad = torch.randn(2, 40, 64)
    have = torch.autograd.grad(step(x, weight), (x, weight), grad)
    want = torch.autograd.grad(ops.linear_fp8(x, weight, recipe), (x, weight), grad)
    for a, b in zip(have, want):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * b.abs().max().item())
