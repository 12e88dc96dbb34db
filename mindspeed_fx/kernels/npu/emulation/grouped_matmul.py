"""CPU kernels of torch_npu's grouped matrix product and of its permutation of tokens by expert."""

from __future__ import annotations

import torch

from mindspeed_fx.kernels.npu.emulation.registry import emulation

# --------------------------------------------------------------------------- grouped matrix product


def _fake_grouped(x, weight, *, group_list=None, split_item=0, group_type=None, **kwargs):
    torch._check(
        group_type in (-1, 0, 2),
        lambda: f"npu_grouped_matmul: group_type only supports -1, 0 and 2, but got {group_type}",
    )
    if group_type == -1:
        return [a.new_empty(*a.shape[:-1], w.shape[-1]) for a, w in zip(x, weight)]
    if group_type == 2:
        return [x[0].new_empty(group_list.shape[0], x[0].shape[0], weight[0].shape[1])]
    return [x[0].new_empty(x[0].shape[0], weight[0].shape[-1], dtype=_type_of_id(kwargs.get("output_dtype")))]


def _type_of_id(number):
    """A type by torch's number of it; None for none."""
    return None if number is None else _NUMBERS[number]


_NUMBERS = {5: torch.float16, 15: torch.bfloat16, 6: torch.float32}


def _quantized(x, weight, ends, scale, per_token_scale, output_dtype):
    """int8 rows times matrices of 8 bits, summed as integers, times the scales of columns and of rows."""
    assert x.dtype == weight.dtype == torch.int8 and scale.shape == (weight.shape[0], weight.shape[2])
    dtype = _type_of_id(output_dtype)
    assert scale.dtype == {torch.bfloat16: torch.bfloat16, torch.float16: torch.float32}[dtype], scale.dtype
    out = x.new_full((x.shape[0], weight.shape[2]), float("nan"), dtype=dtype)
    for i, j, matrix, columns in zip([0, *ends], ends, weight, scale):
        rows = (x[i:j].int() @ matrix.int()).float() * columns.float()
        out[i:j] = (rows if per_token_scale is None else rows * per_token_scale[i:j, None]).to(dtype)
    return [out]


@emulation("npu_grouped_matmul", _fake_grouped)
def npu_grouped_matmul(x, weight, *, group_list=None, split_item=0, group_type=None, group_list_type=0, **args):
    """Products of one x with one weight per group of rows (group_type 0; one tensor of them or a list), of one group of
    columns of x with the rows of weight (2), or of each pair (-1), in float32, rounded once. Rows that belong to no
    group are undefined."""
    if args.get("scale") is not None and group_type == 0 and group_list_type == 0:
        tokens = args.get("per_token_scale")
        scales = args["scale"][0], None if tokens is None else tokens[0]
        return _quantized(x[0], weight[0], group_list.tolist(), *scales, args.get("output_dtype"))
    if any(v for v in args.values() if v is not None):
        raise NotImplementedError(
            f"npu_grouped_matmul on CPU: {', '.join(k for k, v in args.items() if v is not None)} (quantization, "
            "biases, activations) are not emulated, for no lowering gives them; run this call on an NPU, or apply them "
            "outside"
        )
    if group_type == -1:
        return [(a.float() @ w.float()).to(a.dtype) for a, w in zip(x, weight)]
    if split_item not in (2, 3) or len(x) != 1 or (len(weight) != 1 and group_type != 0):
        raise NotImplementedError(
            f"npu_grouped_matmul on CPU: {len(x)} x, {len(weight)} weights, split_item {split_item} are not emulated, "
            "only one x with weights [groups, k, n] or one [k, n] each, and split_item 2 or 3 (one result); "
            "give split_item 3, or call it with group_type -1 for pairs"
        )
    (a,), w = x, weight[0] if len(weight) == 1 else weight
    assert group_list.dtype == torch.int64, f"npu_grouped_matmul: group_list is {group_list.dtype}"
    ends = (group_list if group_list_type == 0 else group_list.cumsum(0)).tolist()
    spans = list(zip([0, *ends], ends))
    if group_type == 2:
        return [torch.stack([a[:, i:j].float() @ w[i:j].float() for i, j in spans]).to(a.dtype)]
    if len(weight) > 1:
        assert a.dtype != torch.float32, "npu_grouped_matmul: float32 takes single tensors only"
    out = a.new_full((a.shape[0], weight[0].shape[-1]), float("nan"))
    for (i, j), matrix in zip(spans, w):
        out[i:j] = (a[i:j].float() @ matrix.float()).to(a.dtype)
    return [out]


@emulation("npu_grouped_matmul_add_", lambda input, *args, **kwargs: input)
def npu_grouped_matmul_add_(
    input, x, weight, group_list, *, transpose_x=True, transpose_weight=False, group_type=2, group_list_type=0
):
    """input [groups, m, n] += x^T weight of each group of rows of x [k, m] and weight [k, n], in float32."""
    assert (
        transpose_x
        and not transpose_weight
        and group_type == 2
        and x.dtype == weight.dtype != torch.float32 == input.dtype
        and group_list.dtype == torch.int64
    )
    assert x.shape[-1] < 65536 > weight.shape[-1] and group_list.shape[0] == input.shape[0] <= 1024
    ends = (group_list if group_list_type == 0 else group_list.cumsum(0)).tolist()
    for into, i, j in zip(input, [0, *ends], ends):
        into += x[i:j].float().t() @ weight[i:j].float()
    return input
