"""Tokens sorted by expert from a routing map on NPU: ``npu_moe_token_permute_with_routing_map`` and its backward.

The way back is :mod:`mindspeed_fx.kernels.npu.grouped_matmul`'s: ``npu_moe_token_unpermute_with_routing_map`` computes
the same, by default not deterministically.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_fx.compat.fake import hint
from mindspeed_fx.kernels.moe_permute_map import moe_permute_map, moe_permute_map_backward
from mindspeed_fx.kernels.npu import FLOATS, check_types, first, lowering, within

npu = torch.ops.npu
LARGEST = 16777214
"""Of numbers that a float32 counts exactly: "less than 16777215"."""


def _supports(tokens, routing_map, probs, k):
    op = "npu_moe_token_permute_with_routing_map"
    return first(
        check_types(tokens=tokens), _share(tokens, probs), _map(op, tokens.shape[0], routing_map, k),
        within(f"{op}: copies of tokens", hint(tokens.shape[0]) * k, 0, LARGEST),
    )  # fmt: skip


def _share(tokens: Tensor, probs: Tensor) -> str | None:
    """Probabilities have the type of the tokens, or float32 beside bfloat16."""
    return check_types(
        (torch.bfloat16, torch.float32) if tokens.dtype == torch.bfloat16 else (tokens.dtype,), probs=probs
    )


def _map(op: str, tokens: int, routing_map: Tensor, k: int) -> str | None:
    return first(
        check_types((torch.bool, torch.int8), routing_map=routing_map), within(f"{op}: tokens", tokens, 0, LARGEST),
        within(f"{op}: experts", routing_map.shape[1], 0, LARGEST), within(f"{op}: choices of a token", k, 1, 511),
    )  # fmt: skip


@lowering(
    moe_permute_map, "npu_moe_token_permute_with_routing_map", _supports, ("npu_moe_token_permute_with_routing_map",)
)
def _permute(tokens, routing_map, probs, k):
    permuted, share, sorted_indices = npu.npu_moe_token_permute_with_routing_map(
        tokens, routing_map, probs=probs, num_out_tokens=tokens.shape[0] * k
    )
    return permuted, share, sorted_indices.to(torch.int64)


def _supports_backward(grad, grad_probs, sorted_indices, routing_map, k):
    op = "npu_moe_token_permute_with_routing_map_grad"
    return first(
        check_types(FLOATS, grad=grad), _share(grad, grad_probs), _map(op, routing_map.shape[0], routing_map, k)
    )


@lowering(
    moe_permute_map_backward,
    "npu_moe_token_permute_with_routing_map_grad",
    _supports_backward,
    ("npu_moe_token_permute_with_routing_map_grad",),
)
def _permute_backward(grad, grad_probs, sorted_indices, routing_map, k):
    return npu.npu_moe_token_permute_with_routing_map_grad(
        grad, grad_probs, sorted_indices.to(torch.int32), routing_map, routing_map.shape[1], routing_map.shape[0], False
    )
