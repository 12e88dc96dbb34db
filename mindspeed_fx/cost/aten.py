"""Cost of ATen operators, before and after decomposition, and of the fused operators of torch_npu.

An operator is one of few kinds; what no table names is "each input read once, each output written once, one vector FLOP
per element" (kind "other"), which is what almost every remaining operator does.
"""

from __future__ import annotations

import math
from typing import Any, Callable

from mindspeed_fx.cost import npu_operators
from mindspeed_fx.cost.operators import (
    FREE,
    SOFTMAX,
    SPECIAL,
    Cost,
    Spec,
    attention,
    elements,
    once,
    product,
    rows_taken,
    size,
    tensors,
)
from mindspeed_fx.graph.op_sets import is_pointwise

SPECIAL_OPERATORS = frozenset(
    "exp exp2 expm1 log log2 log1p sqrt rsqrt sin cos tan tanh sigmoid erf erfc gelu silu mish softplus elu selu celu "
    "logit log_sigmoid logsigmoid hardswish pow "
    "gelu_backward silu_backward mish_backward softplus_backward glu glu_backward log_sigmoid_forward "
    "log_sigmoid_backward xlogy logaddexp".split()
)
"""Pointwise operators with a special function in them."""


ROWS = {
    "softmax": SOFTMAX,
    "_softmax": SOFTMAX,
    "_safe_softmax": SOFTMAX,
    "log_softmax": SOFTMAX,
    "_log_softmax": SOFTMAX,
    "_softmax_backward_data": 4,
    "_log_softmax_backward_data": SPECIAL + 3,
    "logsumexp": SOFTMAX,
    "layer_norm": 8,
    "native_layer_norm": 8,
    "native_layer_norm_backward": 14,
    "rms_norm": 5,
    "_fused_rms_norm": 5,
    "_fused_rms_norm_backward": 10,
    "group_norm": 8,
    "native_group_norm": 8,
    "native_group_norm_backward": 14,
    "cross_entropy_loss": SOFTMAX,
    "var": 4,
    "var_mean": 4,
    "std": 4,
    "norm": 2,
    "linalg_vector_norm": 2,
    **npu_operators.ROWS,
}
"""Operators that take several vector FLOP per element of their largest tensor, and how many."""

REDUCTIONS = frozenset(
    "sum mean amax amin max min prod any all argmax argmin std var var_mean norm linalg_vector_norm logsumexp "
    "count_nonzero".split()
)
GATHERS = frozenset("index_select gather index embedding take take_along_dim _unsafe_index".split())
CREATIONS = frozenset(
    "zeros ones full arange zeros_like ones_like full_like new_zeros new_ones new_full scalar_tensor eye linspace rand "
    "randn randint rand_like randn_like tril_indices triu_indices".split()
)
UNFILLED = frozenset(
    "empty empty_like new_empty empty_strided new_empty_strided empty_permuted sym_size sym_stride sym_numel "
    "sym_storage_offset _assert_scalar _assert_async _assert_tensor_metadata lift_fresh lift_fresh_copy device item "
    "_local_scalar_dense".split()
)
COPIES = frozenset(
    "_to_copy clone contiguous copy where masked_fill cat stack constant_pad_nd pad roll flip repeat tril triu fill "
    "repeat_interleave slice_scatter select_scatter expand_copy reshape flatten to type_as convert_element_type".split()
)
"""Data movement: no arithmetic. Those that may be views are free where their result shares its argument's memory."""


def _matmul(out: Any, a: Spec, b: Spec, *more: Any, **kw: Any) -> Cost:
    return product(out, a.shape[-1], a, b, *more, *kw.values())


def _bias_first(out: Any, bias: Spec, a: Spec, b: Spec, *more: Any, **kw: Any) -> Cost:
    return product(out, a.shape[-1], a, b, bias, vector=out.numel)


def _einsum(out: Any, equation: str, operands: list, *more: Any, **kw: Any) -> Cost:
    """Two operands: every index once. One operand moves data; more are taken as pairs from the left, as torch does."""
    letters = [t.strip() for t in equation.split("->")[0].split(",")]
    if "." in equation or len(operands) != 2:
        return once(out, operands, flops=2 * out.numel if len(operands) > 1 else 0, dtype=operands[0].dtype)
    sizes = {c: n for text, t in zip(letters, operands) for c, n in zip(text, t.shape)}
    return once(out, operands, flops=2 * math.prod(sizes.values()), dtype=operands[0].dtype)


def _convolution(out: Any, x: Spec, weight: Spec, *more: Any, **kw: Any) -> Cost:
    return once(out, x, weight, *more, flops=2 * out.numel * (weight.numel // weight.shape[0]), dtype=x.dtype)


def _convolution_backward(out: Any, grad: Spec, x: Spec, weight: Spec, *more: Any, **kw: Any) -> Cost:
    asked = [o for o in out[:2] if isinstance(o, Spec)]
    return once(
        asked, grad, x, weight, flops=len(asked) * 2 * grad.numel * (weight.numel // weight.shape[0]), dtype=x.dtype
    )


def _first(out: Any) -> Spec:
    return tensors(out)[0]


def _sdpa(
    out: Any,
    q: Spec,
    k: Spec,
    v: Spec,
    mask: Any = None,
    dropout: float = 0.0,
    causal: Any = False,
    *more: Any,
    **kw: Any,
) -> Cost:
    return attention(tensors(out)[:2], q, k, v, bool(kw.get("is_causal", causal)), mask, kw.get("attn_mask"))


def _flash(
    out: Any, q: Spec, k: Spec, v: Spec, dropout: float = 0.0, causal: Any = False, *more: Any, **kw: Any
) -> Cost:
    return attention(tensors(out)[:2], q, k, v, bool(kw.get("is_causal", causal)), kw.get("attn_mask"))


def _efficient(
    out: Any,
    q: Spec,
    k: Spec,
    v: Spec,
    bias: Any,
    lse: bool = False,
    dropout: float = 0.0,
    causal: Any = False,
    *more: Any,
    **kw: Any,
) -> Cost:
    return attention(tensors(out)[:2], q, k, v, bool(kw.get("is_causal", causal)), bias)


def _flash_backward(out: Any, grad: Spec, q: Spec, k: Spec, v: Spec, *more: Any, **kw: Any) -> Cost:
    causal = any(m is True for m in more) or bool(kw.get("is_causal"))
    return attention(tensors(out)[:3], q, k, v, causal, grad, tensors(*more), kw.get("attn_mask"), backward=True)


def _grouped_cost(out: Any, a: Spec, b: Spec, *more: Any, **kw: Any) -> Cost:
    """Every row times one matrix, as if each had a group; the product of two 2-D operands has a group dimension
    instead.
    """
    one = _first(out)
    return once(
        one,
        a,
        b,
        *more,
        flops=2 * a.numel * (b.shape[-1] if len(b.shape) == 3 or len(a.shape) == 3 else one.shape[-1]),
        dtype=a.dtype,
    )


def _scatter(out: Any, *args: Any, **kw: Any) -> Cost:
    """Functional: the target is copied, then the source's elements are added to it."""
    target, rest = tensors(*args)[0], tensors(*args, *kw.values())[1:]
    source = max(rest, key=lambda t: len(t.shape), default=target)
    return Cost(
        vector=source.numel, read=target.bytes + size(rest) + source.bytes, write=_first(out).bytes + source.bytes
    )


def _embedding_backward(out: Any, grad: Spec, indices: Spec, *more: Any, **kw: Any) -> Cost:
    return Cost(vector=grad.numel, read=2 * grad.bytes + indices.bytes, write=_first(out).bytes + grad.bytes)


def _sort(out: Any, x: Spec, *more: Any, **kw: Any) -> Cost:
    """A radix sort passes over the data about as often as the type has bytes."""
    result = tensors(out)
    return Cost(vector=8 * x.numel, read=x.bytes + 8 * size(result), write=8 * size(result), launches=8)


FORMULAS: dict[str, Callable[..., Cost]] = {
    **dict.fromkeys(
        ("mm", "bmm", "matmul", "linear", "_scaled_mm", "mv", "dot", "_linear_pointwise", "mkl_linear"), _matmul
    ),
    **dict.fromkeys(("addmm", "baddbmm", "addmv", "addbmm"), _bias_first),
    "einsum": _einsum,
    "convolution": _convolution,
    "_convolution": _convolution,
    "conv1d": _convolution,
    "conv2d": _convolution,
    "conv3d": _convolution,
    "convolution_backward": _convolution_backward,
    "scaled_dot_product_attention": _sdpa,
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_for_cpu": _flash,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_cudnn_attention": _efficient,
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention_backward",
            "_scaled_dot_product_flash_attention_for_cpu_backward",
            "_scaled_dot_product_efficient_attention_backward",
            "_scaled_dot_product_cudnn_attention_backward",
        ),
        _flash_backward,
    ),
    **dict.fromkeys(("_grouped_mm", "grouped_mm_fallback"), _grouped_cost),
    **npu_operators.FORMULAS,
    **dict.fromkeys(
        (
            "scatter",
            "scatter_add",
            "scatter_reduce",
            "index_put",
            "_unsafe_index_put",
            "index_add",
            "index_copy",
            "masked_scatter",
        ),
        _scatter,
    ),
    "embedding_dense_backward": _embedding_backward,
    "sort": _sort,
    "argsort": _sort,
    "topk": lambda out, x, *more, **kw: once(out, x, vector=4 * x.numel),
}


def kind(name: str, overload: Any = None) -> str:
    """ "matrix", "pointwise", "copy", "rows" (a reduction over rows), "reduction", "gather", "creation", "free" or
    "other".
    """
    if name in FORMULAS:
        return "matrix"
    for label, table in (
        ("free", UNFILLED),
        ("copy", COPIES),
        ("gather", GATHERS),
        ("creation", CREATIONS),
        ("reduction", REDUCTIONS),
        ("rows", ROWS),
    ):
        if name in table:
            return label
    return "pointwise" if name in SPECIAL_OPERATORS or is_pointwise(overload) else "other"


def vector_flops(name: str, out: Any, *inputs: Any) -> Any:
    """FLOP of the vector units for one operator that has no formula of its own."""
    if kind(name) in ("copy", "gather", "creation", "free"):
        return 0
    each = ROWS.get(name, SPECIAL if name in SPECIAL_OPERATORS else 1)
    return each * elements(out, *inputs)


def cost(name: str, out: Any, args: tuple, kwargs: dict) -> Cost:
    """Cost of one ATen or torch_npu operator that is not a view.

    Args:
        name: without namespace and overload, e.g. "mm".
        out: :class:`Spec` of the result, or a tuple of them.
        args, kwargs: as in the graph, tensors as specs.
    """
    if name in FORMULAS:
        return FORMULAS[name](out, *args, **kwargs)
    what = kind(name)
    if what == "free":
        return FREE
    if what == "creation":
        return once(out)
    if what == "gather":
        return rows_taken(_first(out), *tensors(*args, *kwargs.values())[1:])
    return once(out, *args, *kwargs.values(), vector=vector_flops(name, out, *args, *kwargs.values()))
