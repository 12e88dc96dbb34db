"""MindSpeed's operators by their names and arguments there (``mindspeed.ops``), on every device and in graphs.

Each is an operator of :mod:`mindspeed_fx.kernels`: its reference in plain torch runs on any device, on npu the nearest
call of torch_npu does. Those of inference have no gradient, and say so where one is asked for. Formulas: MindSpeed's
documentation of its custom operators.
"""

from __future__ import annotations

from typing import Any, Sequence

import torch
from torch import Tensor

from mindspeed_fx import kernels  # noqa: F401  defines the operators
from mindspeed_fx.arguments import check_word, refuse
from mindspeed_fx.kernels.ffn import ACTIVATIONS
from mindspeed_fx.kernels.quant_grouped_matmul import DTYPES

ops = torch.ops.mindspeed


def npu_gmm(
    x: Tensor,
    weight: Tensor,
    *,
    group_list: Sequence[int] | Tensor,
    group_type: int = 0,
    gemm_fusion: bool = False,
    original_weight: Tensor | None = None,
) -> Tensor:
    """Products of the rows of each group with a matrix of their own.

    Args:
        x: [tokens, k], sorted by group.
        weight: [groups, k, n].
        group_list: where each group ends, rising.
        group_type: 0, the only one that has a gradient.
        gemm_fusion: add the gradient of the weight to ``original_weight.main_grad``, one buffer for all groups, and
            give none: :func:`npu_groupmatmul_add_fp32` in the backward.
        original_weight: the parameter, of as many elements as ``weight``; None: ``weight`` itself.

    Returns:
        [tokens, n].

    Raises:
        OptionError: another group_type; gemm_fusion without a main_grad of the weight's size.
    """
    if group_type != 0:
        refuse("npu_gmm", "group_type", group_type, "0 is expected: products by rows")
    offsets = _ends("npu_gmm", group_list, weight.shape[0], x.device)
    if not gemm_fusion:
        return ops.grouped_matmul(x, weight, offsets)
    owner = weight if original_weight is None else original_weight
    main_grad = getattr(owner, "main_grad", None)
    if main_grad is None or main_grad.numel() != weight.numel():
        size = "none" if main_grad is None else f"one of {main_grad.numel()} elements"
        refuse("npu_gmm", "gemm_fusion", True, f"a main_grad of {weight.numel()} elements is expected, there is {size}")
    return ops.grouped_matmul_main_grad(x, weight, offsets, main_grad.view(weight.shape))


def npu_gmm_v2(x: Tensor, weight: Tensor, *, group_list: Tensor, **more: Any) -> Tensor:
    """:func:`npu_gmm` with the number of rows of each group in ``group_list``."""
    return npu_gmm(x, weight, group_list=torch.as_tensor(group_list).cumsum(0), **more)


def npu_groupmatmul_add_fp32(x: Tensor, dy: Tensor, group_list: Sequence[int] | Tensor, grad: Tensor) -> None:
    """``grad_e += x_e^T dy_e`` in float32, in place, for the rows of each group.

    Args:
        x: [tokens, k]; dy: [tokens, n].
        group_list: where each group ends, rising.
        grad: float32 of groups * k * n elements, contiguous: one buffer for the main gradients of all groups.

    Raises:
        OptionError: a buffer of another size or type.
    """
    offsets = _ends("npu_groupmatmul_add_fp32", group_list, len(group_list), x.device)
    shape = (len(group_list), x.shape[1], dy.shape[1])
    if grad.numel() != shape[0] * shape[1] * shape[2] or grad.dtype != torch.float32 or not grad.is_contiguous():
        refuse(
            "npu_groupmatmul_add_fp32",
            "grad",
            f"{grad.dtype} {list(grad.shape)}",
            f"contiguous float32 of {list(shape)} is expected",
        )
    ops.grouped_matmul_add(grad.view(shape), x, dy, offsets)


def npu_ffn(
    x: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    activation: str,
    *,
    expert_tokens: Sequence[int] | None = None,
    expert_tokens_index: Sequence[int] | None = None,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
) -> Tensor:
    """``act(x W1 + b1) W2 + b2``, for inference.

    Args:
        x: [..., k]; of experts [tokens, k], sorted by expert.
        weight1, weight2: [k, n], [n, m], of experts with a dimension of them in front; n doubled in ``weight1`` for
            "geglu", "swiglu", "reglu".
        activation: "fastgelu", "gelu", "relu", "silu", "geglu", "swiglu" or "reglu".
        expert_tokens: rows of each expert; or ``expert_tokens_index``: where each expert's end.

    Raises:
        OptionError: another activation; both lists; a gradient is asked for.
    """
    check_word("npu_ffn", "activation", activation, ACTIVATIONS)
    _without_gradient("npu_ffn", x, weight1, weight2, bias1, bias2)
    counts = None if expert_tokens is None else [int(n) for n in expert_tokens]
    if expert_tokens_index is not None:
        if counts is not None:
            refuse("npu_ffn", "expert_tokens", expert_tokens, "one of it and expert_tokens_index is expected")
        ends = [int(n) for n in expert_tokens_index]
        counts = [end - start for start, end in zip([0, *ends], ends)]
    if counts is not None and (weight1.dim() != 3 or len(counts) != weight1.shape[0] or sum(counts) > x.shape[0]):
        refuse("npu_ffn", "expert_tokens", counts, f"one for each expert, together {x.shape[0]} rows, are expected")
    return ops.ffn(x, weight1, weight2, bias1, bias2, counts, activation)


def npu_quant_gmm(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    per_token_scale: Tensor | None = None,
    group_list: Sequence[int] | Tensor,
    output_dtype: torch.dtype = torch.float16,
) -> Tensor:
    """8-bit rows times 8-bit matrices by group, times scales, for inference.

    Args:
        x: [tokens, k], int8 or float8; weight: [groups, k, n], the same.
        scale: [groups, n]; per_token_scale: [tokens] or None.
        group_list: where each group ends, rising.

    Raises:
        OptionError: other types.
    """
    if x.dtype not in DTYPES or weight.dtype != x.dtype:
        refuse("npu_quant_gmm", "x", f"{x.dtype} beside weights of {weight.dtype}", f"one of {DTYPES} for both")
    offsets = _ends("npu_quant_gmm", group_list, weight.shape[0], x.device)
    return ops.quant_grouped_matmul(x, weight, offsets, scale, per_token_scale, output_dtype)


def npu_quant_gmm_v2(x: Tensor, weight: Tensor, scale: Tensor, *, group_list: Tensor, **more: Any) -> Tensor:
    """:func:`npu_quant_gmm` with the number of rows of each group in ``group_list``."""
    return npu_quant_gmm(x, weight, scale, group_list=torch.as_tensor(group_list).cumsum(0), **more)


def npu_mm_all_reduce_add_rms_norm(
    x1: Tensor,
    x2: Tensor,
    residual: Tensor,
    gamma: Tensor,
    hcom: str,
    reduce_op: str = "sum",
    epsilon: float = 1e-6,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``y = all_reduce(x1 x2 + bias) + residual`` and RMSNorm(y) times gamma, for inference.

    Args:
        hcom: the name of a process group (``group.group_name``).

    Raises:
        OptionError: another reduction than "sum"; a gradient is asked for.
    """
    check_word("npu_mm_all_reduce_add_rms_norm", "reduce_op", reduce_op, ("sum",))
    _without_gradient("npu_mm_all_reduce_add_rms_norm", x1, x2, residual, gamma, bias)
    return ops.mm_all_reduce_add_rms_norm(x1, x2, residual, gamma, hcom, epsilon, bias)


def npu_mm_all_reduce_add_rms_norm_(
    x1: Tensor, x2: Tensor, residual: Tensor, gamma: Tensor, hcom: str, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """:func:`npu_mm_all_reduce_add_rms_norm`, with y in the place of ``residual``."""
    y, normal = npu_mm_all_reduce_add_rms_norm(x1, x2, residual, gamma, hcom, *args, **kwargs)
    return residual.copy_(y), normal


def npu_grouped_mat_mul_all_reduce(
    x: list[Tensor],
    weight: list[Tensor],
    hcomm_info: str,
    *,
    bias: list[Tensor] | None = None,
    reduce_op: str = "sum",
) -> list[Tensor]:
    """``y_i = all_reduce(x_i w_i) + bias_i`` by one collective, for inference.

    Args:
        hcomm_info: the name of a process group (``group.group_name``).

    Raises:
        OptionError: lists of different lengths; another reduction; a gradient is asked for.
    """
    check_word("npu_grouped_mat_mul_all_reduce", "reduce_op", reduce_op, ("sum",))
    if not x or len(x) != len(weight) or (bias is not None and len(bias) != len(x)):
        lengths = [len(x), len(weight), *([len(bias)] if bias is not None else [])]
        refuse("npu_grouped_mat_mul_all_reduce", "x", f"lists of {lengths}", "a weight, and a bias if any, for each")
    _without_gradient("npu_grouped_mat_mul_all_reduce", *x, *weight, *(bias or ()))
    return ops.grouped_mm_all_reduce(x, weight, bias or [], hcomm_info)


def _ends(function: str, group_list: Sequence[int] | Tensor, groups: int, device: torch.device) -> Tensor:
    ends = torch.as_tensor(group_list, dtype=torch.int64, device=device)
    if ends.shape != (groups,):
        refuse(function, "group_list", list(ends.shape), f"one end for each of {groups} groups is expected")
    return ends


def _without_gradient(function: str, *tensors: Tensor | None) -> None:
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        refuse(function, "requires_grad", True, "it is for inference: call it under torch.no_grad()")
