"""Linear layer whose three products multiply 8-bit floats: scales of whole tensors, of rows, or of blocks.

Each operand is multiplied by its scale, the largest 8-bit number over the largest magnitude of the part that shares it,
rounded to 8 bits (no number leaves their range), multiplied and summed wide, and the result divided by both scales.
A recipe says which part shares a scale, t being the dimension that the product sums over:

    "tensor"  the whole operand; the gradient of the result in e5m2, everything else in e4m3
    "row"     all of t: rows of one operand, columns of the other; scales are powers of two, all in e4m3
    "block"   128 of t in each row of activations and gradients, 128 x 128 of a weight; all in e4m3
    "mx"      32 of t in each row of every operand; scales are powers of two, all in e4m3
    "mx_square"  the same, 32 x 32 of a weight, whose scales then serve the forward and the backward

In the last two the scale is the power of two that brings the largest magnitude's exponent to that of the largest 8-bit
number (numbers above that become it); infinities and NaN make their part NaN.

Sources: torchao's float8 recipes "tensorwise" and "rowwise" (torchao/float8/config.py, float8_utils.py); DeepSeek-AI
2024, "DeepSeek-V3 Technical Report" (arXiv 2412.19437), section 3.3.2, for "block"; Open Compute Project 2023, "OCP
Microscaling Formats (MX) Specification" 1.0, section 6.3, for "mx"; MindSpeed's recipe mxfp8-32x32 for "mx_square".
"""

from __future__ import annotations

import math
from typing import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_fx.compat import cpp, dispatcher, symbols
from mindspeed_fx.compat.fake import hint
from mindspeed_fx.compat.placements import PARTIAL, REPLICATED
from mindspeed_fx.cost.operators import once
from mindspeed_fx.kernels.base import LIBRARY, accumulation_dtype, as_rows, operator
from mindspeed_fx.kernels.cpu import narrow_product

RECIPES = ("tensor", "row", "block", "mx", "mx_square")
BLOCKS = {"block": 128, "mx": 32, "mx_square": 32}
"""How many numbers along a side of a block share a scale."""
SMALLEST = 1e-12
"""Magnitude below which the scale does not grow, as torchao's."""
NARROW, FAR = torch.float8_e4m3fn, torch.float8_e5m2
"""Three bits of fraction, for values and weights; two, of a larger range, for gradients."""


def _fake(x, weight, recipe):
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@operator("linear_fp8(Tensor x, Tensor weight, str recipe) -> Tensor", _fake)
def linear_fp8(x: Tensor, weight: Tensor, recipe: str) -> Tensor:
    """x weight^T of 8-bit operands; the recipes stand at the top of this file.

    Args:
        x: [..., k], float; scales and sums are in float32 (float64 for float64).
        weight: [n, k], of the same type.
        recipe: one of :data:`RECIPES`.

    Returns:
        [..., n], of the type of ``x``. Both have gradients, of 8-bit operands too; rounding itself counts as identity.

    Raises:
        ValueError: an unknown recipe, or shapes that do not fit.
    """
    _check(x, weight, recipe)
    rows = rounded(as_rows(x), 1, recipe, NARROW)
    out = rows @ rounded(weight, 1, recipe, NARROW, is_weight=True).t()
    return out.to(x.dtype).view(*x.shape[:-1], weight.shape[0])


def _check(x: Tensor, weight: Tensor, recipe: str) -> None:
    torch._check_value(recipe in RECIPES, lambda: f"linear_fp8: recipe={recipe!r}; valid: {', '.join(RECIPES)}")
    torch._check_value(
        weight.dim() == 2 and x.dim() > 0 and x.shape[-1] == weight.shape[1],
        lambda: f"linear_fp8: x is {list(x.shape)}, weight {list(weight.shape)}; valid: [..., k] and [n, k]",
    )


def rounded(x: Tensor, axis: int, recipe: str, dtype: torch.dtype, is_weight: bool = False) -> Tensor:
    """What the product sees of an operand: numbers of 8 bits over their scales.

    Args:
        x: [rows, columns], float.
        axis: the dimension that is summed over.
        recipe: one of :data:`RECIPES`.
        dtype: of 8 bits.
        is_weight: whether blocks are square.

    Returns:
        [rows, columns], in float32 (float64 for float64).
    """
    if recipe in BLOCKS:
        return _rounded_blocks(x, axis, recipe, dtype, is_weight)
    numbers, scale = quantized(x, axis, recipe, dtype)
    return numbers.to(scale.dtype) / scale


def quantized(x: Tensor, axis: int, recipe: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(numbers of 8 bits, the scales that they were multiplied by) where no blocks share one, arguments as in
    :func:`rounded`. Scales have no dimension for whole tensors and size 1 in ``axis`` for rows; float32 (float64 for
    float64)."""
    wide = x.to(accumulation_dtype(x.dtype))
    if x.numel() == 0:
        scale = wide.new_ones(())
    elif recipe == "tensor":
        scale = _up_to_the_largest(wide.abs().amax(), dtype)
    else:
        scale = _up_to_the_largest(wide.abs().amax(axis, keepdim=True), dtype).log2().floor().exp2()
    scale = scale.to(wide.dtype)
    return _in_8_bits(wide, scale, dtype), scale


def _rounded_blocks(x: Tensor, axis: int, recipe: str, dtype: torch.dtype, is_weight: bool) -> Tensor:
    """:func:`rounded` where blocks share a scale; those at the ends are filled with zeros."""
    is_square = is_weight and recipe != "mx"
    sizes = [BLOCKS[recipe] if is_square or d == axis else 1 for d in (0, 1)]
    wide = F.pad(x.to(accumulation_dtype(x.dtype)), (0, -x.shape[1] % sizes[1], 0, -x.shape[0] % sizes[0]))
    blocks = wide.unflatten(1, (-1, sizes[1])).unflatten(0, (-1, sizes[0]))
    largest = blocks.abs().amax((1, 3), keepdim=True)
    scale = _up_to_the_largest(largest, dtype) if recipe == "block" else _to_the_exponent_of_the_largest(largest, dtype)
    scale = scale.to(wide.dtype)
    result = _in_8_bits(blocks, scale, dtype).to(wide.dtype) / scale
    return result.flatten(2, 3).flatten(0, 1)[: x.shape[0], : x.shape[1]]


def _in_8_bits(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Through float32, from which the conversion to 8 bits is defined."""
    top = torch.finfo(dtype).max
    return (x * scale).clamp(-top, top).float().to(dtype)


def _up_to_the_largest(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """float32; in float64 before: one number, whatever compiles this."""
    return (torch.finfo(dtype).max / largest.double().clamp(min=SMALLEST)).float()


def _to_the_exponent_of_the_largest(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """float32. Of bits: logarithms and powers of generated code need not be exact. Exponents of MX scales are -127 to
    127, so that those of what is multiplied are the same.
    """
    exponent = (largest.float().view(torch.int32) >> 23) - 127
    top = math.frexp(torch.finfo(dtype).max)[1] - 1
    scale = (((top - exponent).clamp(max=127) + 127) << 23).view(torch.float32)
    return torch.where(exponent == 128, math.nan, scale)


def _fake_backward(grad, x, weight, recipe, needed):
    return tuple(t.new_empty(t.shape) if need else x.new_empty(0) for t, need in zip((x, weight), needed))


@operator(
    "linear_fp8_backward(Tensor grad, Tensor x, Tensor weight, str recipe, bool[2] needed) -> (Tensor, Tensor)",
    _fake_backward,
)
def linear_fp8_backward(
    grad: Tensor, x: Tensor, weight: Tensor, recipe: str, needed: list[bool]
) -> tuple[Tensor, Tensor]:
    """Gradients (dx, dweight) of :func:`linear_fp8`, of size 0 where not needed: dx = grad weight, dweight = grad^T x
    over all rows, each of operands that are rounded for it."""
    dtype = FAR if recipe == "tensor" else NARROW
    rows, inputs = as_rows(grad), as_rows(x)
    dx, dweight = x.new_empty(0), x.new_empty(0)
    if needed[0]:
        dx = rounded(rows, 1, recipe, dtype) @ rounded(weight, 0, recipe, NARROW, is_weight=True)
        dx = dx.to(x.dtype).view(x.shape)
    if needed[1]:
        dweight = rounded(rows, 0, recipe, dtype).t() @ rounded(inputs, 0, recipe, NARROW)
        dweight = dweight.to(weight.dtype)
    return dx, dweight


def _setup(ctx, inputs, output):
    x, weight, ctx.recipe = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx, grad):
    needed = list(ctx.needs_input_grad[:2])
    grads = torch.ops.mindspeed.linear_fp8_backward(grad, *ctx.saved_tensors, ctx.recipe, needed)
    return *(g if need else None for g, need in zip(grads, needed)), None


torch.library.register_autograd("mindspeed::linear_fp8", _backward, setup_context=_setup, lib=LIBRARY)


@linear_fp8.shard
def _sharding_rule(x, weight, recipe):
    """By row of ``x``, where rows share no scale with others, and by column where those of the weight share none. With
    scales of rows that are powers of two also by summand: a part's own scale rounds alike, but for numbers that 8 bits
    lose beside the largest of the whole."""
    last = x.ndim - 1
    rows = [([d], [d, REPLICATED]) for d in range(last)]
    columns, summands = [([last], [REPLICATED, 0])], [([PARTIAL], [last, 1])]
    strategies = {
        "tensor": [],
        "row": rows + columns + summands,
        "block": rows,
        "mx": rows + columns,
        "mx_square": rows,
    }
    return strategies[recipe]


@linear_fp8_backward.shard
def _sharding_rule_backward(grad, x, weight, recipe, needed):
    """As the forward: rows are what the weight's gradient sums over."""

    def results(*placements):
        return [p if need else REPLICATED for p, need in zip(placements, needed)]

    last = x.ndim - 1
    rows = [(results(d, PARTIAL), [d, d, REPLICATED]) for d in range(last)]
    inputs = [(results(last, 1), [REPLICATED, last, 1])]
    if recipe == "row":
        return [*rows, (results(PARTIAL, 0), [last, REPLICATED, 0]), *inputs]
    own = inputs if recipe == "mx" else []
    return own + rows if recipe in BLOCKS and not needed[1] else own


NUMBERS = str(NARROW).removeprefix("torch.")


@linear_fp8.costs
def _cost(out, x, weight, recipe):
    """A product at the rate of 8 bits; each operand's magnitudes, scale, clamp and rounding on the vector units."""
    flops = 2 * x.numel * weight.shape[0]
    return once(out, x, weight, flops=flops, vector=5 * (x.numel + weight.numel) + out.numel, dtype=NUMBERS)


@linear_fp8_backward.costs
def _backward_cost(out, grad, x, weight, recipe, needed):
    """Two products, each of two operands that are rounded for it."""
    to_x, to_weight = (int(n) for n in needed)
    flops = 2 * (to_x + to_weight) * x.numel * weight.shape[0]
    read = [grad] + [weight] * to_x + [x] * to_weight
    return once(out, *read, flops=flops, vector=5 * sum(t.numel for t in read), dtype=NUMBERS)


# --------------------------------------------------------------------------- products of 8-bit numbers


Multiply = Callable[[Tensor, Tensor, Tensor, Tensor, torch.dtype], Tensor]
"""From numbers [m, t] and [t, n] and their scales, as of :func:`_operand`, to their product over these [m, n], of a
type."""


def _operand(x: Tensor, axis: int, recipe: str, dtype: torch.dtype, is_weight: bool = False) -> tuple[Tensor, Tensor]:
    """:func:`quantized`; of blocks the numbers over their scales, which no sum can be divided by, and 1."""
    if recipe in BLOCKS:
        blocks = rounded(x, axis, recipe, dtype, is_weight)
        return blocks, blocks.new_ones(())
    return quantized(x, axis, recipe, dtype)


def forward_by(multiply: Multiply) -> Callable[..., Tensor]:
    """:func:`linear_fp8` on products that ``multiply`` takes: its values but for the order of sums in float32."""

    def forward(x: Tensor, weight: Tensor, recipe: str) -> Tensor:
        a, a_scale = _operand(as_rows(x), 1, recipe, NARROW)
        b, b_scale = _operand(weight, 1, recipe, NARROW, is_weight=True)
        return multiply(a, b.t(), a_scale, b_scale.t(), x.dtype).view(*x.shape[:-1], weight.shape[0])

    return forward


def backward_by(multiply: Multiply) -> Callable[..., tuple[Tensor, Tensor]]:
    """:func:`linear_fp8_backward`, likewise."""

    def backward(grad: Tensor, x: Tensor, weight: Tensor, recipe: str, needed: list[bool]) -> tuple[Tensor, Tensor]:
        dtype = FAR if recipe == "tensor" else NARROW
        dx, dweight = x.new_empty(0), x.new_empty(0)
        if needed[0]:
            a, a_scale = _operand(as_rows(grad), 1, recipe, dtype)
            b, b_scale = _operand(weight, 0, recipe, NARROW, is_weight=True)
            dx = multiply(a, b, a_scale, b_scale, x.dtype).view(x.shape)
        if needed[1]:
            a, a_scale = _operand(as_rows(grad), 0, recipe, dtype)
            b, b_scale = _operand(as_rows(x), 0, recipe, NARROW)
            dweight = multiply(a.t(), b, a_scale.t(), b_scale, weight.dtype)
        return dx, dweight

    return backward


def scaled_mm(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """torch's product of 8-bit numbers, which wants rows of one and columns of the other beside each other."""
    columns = b.t().contiguous().t()
    scales = 1.0 / a_scale, 1.0 / b_scale
    return torch.ops.aten._scaled_mm.default(a.contiguous(), columns, *scales, out_dtype=dtype)


def _refuse_scaled_mm(x: Tensor, weight: Tensor, recipe: str, *sizes: object) -> str | None:
    """Tensor cores multiply 8-bit floats from sm_89 on, where every side is a multiple of 16; torch scales the rows of
    both operands in bfloat16 alone, and has no product of blocks that this was compared with."""
    if recipe in BLOCKS:
        return "scales of blocks"
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"operands of {x.dtype}".replace("torch.", "")
    if recipe == "row" and x.dtype != torch.bfloat16:
        return "scales of rows, and a result that is not bfloat16"
    if not all(symbols.statically_known_true(n % 16 == 0) for n in (*weight.shape, *sizes)):
        return "sizes that are not known to be multiples of 16"
    return None if dispatcher.multiplies_fp8(x.device) else "no device from sm_89 on is here"


def pairs(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """A product in bfloat16, which holds every number of 8 bits, also over a power of two; summed in float32."""
    sums = torch.ops.mindspeed.narrow_product(a.bfloat16(), b.bfloat16(), None, torch.float32)
    return (sums / (a_scale * b_scale)).to(dtype)


WORK = 1 << 25
"""Multiplications from which products of pairs pay: 1.6 of the emulated form's time at 2^22, 0.95 at 2^25, 0.83 at 2^27
and 0.46 at 2^31 (benchmarks/linear_fp8.py)."""


def _refuse_pairs(x: Tensor, weight: Tensor, recipe: str) -> str | None:
    if recipe == "block":
        return "scales of blocks that are no powers of two"
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"operands of {x.dtype}".replace("torch.", "")
    if hint(x.numel()) * weight.shape[0] < WORK:
        return "a small product"
    return narrow_product.unable_to_sum(torch.bfloat16, x.device.type) or (
        None if cpp.multiplies_pairs() else "this processor does not multiply pairs of bfloat16"
    )


linear_fp8.lower("cuda")("torch's product of 8-bit numbers", _refuse_scaled_mm)(forward_by(scaled_mm))
linear_fp8_backward.lower("cuda")(
    "torch's product of 8-bit numbers",
    lambda grad, x, weight, recipe, needed: _refuse_scaled_mm(x, weight, recipe, math.prod(x.shape[:-1])),
)(backward_by(scaled_mm))
linear_fp8.lower("cpu")("products of pairs of bfloat16", _refuse_pairs)(forward_by(pairs))
linear_fp8_backward.lower("cpu")(
    "products of pairs of bfloat16", lambda grad, x, weight, recipe, needed: _refuse_pairs(x, weight, recipe)
)(backward_by(pairs))
