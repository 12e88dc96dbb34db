"""Tokens of a mixture of experts sorted by expert from a routing map, which marks the experts of a token instead of
listing them.

Source: ``npu_moe_token_permute_with_routing_map`` of torch_npu, and Megatron-core's ``permute``. Every token has k
experts, so that all sizes are known. Pair (t, j) is token t with the j-th of its experts, by their numbers; the way
back is ``moe_unpermute``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_fx.compat.placements import REPLICATED, Even
from mindspeed_fx.cost.operators import Cost, once
from mindspeed_fx.kernels.base import LIBRARY, operator
from mindspeed_fx.kernels.moe_permute import moe_unpermute


def _fake(tokens, routing_map, probs, k):
    rows = tokens.shape[0] * k
    return tokens.new_empty(rows, tokens.shape[1]), probs.new_empty(rows), tokens.new_empty(rows, dtype=torch.int64)


def _scatter(rows: int | torch.SymInt, place: Tensor, values: Tensor) -> Tensor:
    """[rows] with ``values`` at ``place``; those at place ``rows`` are dropped."""
    return values.new_zeros(rows + 1).scatter(0, place.reshape(-1), values.reshape(-1))[:rows]


@operator("moe_permute_map(Tensor tokens, Tensor routing_map, Tensor probs, int k) -> (Tensor, Tensor, Tensor)", _fake)
def moe_permute_map(tokens: Tensor, routing_map: Tensor, probs: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Copies of the tokens in the order of their experts, tokens of one expert in their own order, and the probability
    of each copy.

    Args:
        tokens: [tokens, hidden].
        routing_map: bool [tokens, experts], True for k experts of every token; else what comes out is undefined.
        probs: [tokens, experts], float.
        k: experts of a token.

    Returns:
        permuted [tokens * k, hidden], probabilities [tokens * k] and, int64 [tokens * k], the row that holds pair t * k
        + j.
    """
    count, rows = tokens.shape[0], tokens.shape[0] * k
    chosen = routing_map.t().reshape(-1)
    place = torch.where(chosen, chosen.cumsum(0) - 1, rows)  # of (expert, token), expert by expert
    pair = _scatter(rows, place, torch.arange(chosen.shape[0], device=chosen.device))
    number = torch.arange(count, device=chosen.device).unsqueeze(1) * k + routing_map.cumsum(1) - 1
    inverse = _scatter(rows, torch.where(routing_map, number, rows), place.view(routing_map.shape[1], count).t())
    return tokens.index_select(0, pair % count if count else pair), probs.t().reshape(-1).index_select(0, pair), inverse


def _fake_backward(grad, grad_probs, sorted_indices, routing_map, k):
    tokens, experts = routing_map.shape
    return grad.new_empty(tokens, grad.shape[1]), grad_probs.new_empty(tokens, experts)


@operator(
    "moe_permute_map_backward(Tensor grad, Tensor grad_probs, Tensor sorted_indices, Tensor routing_map, int k) -> "
    "(Tensor, Tensor)",
    _fake_backward,
)
def moe_permute_map_backward(
    grad: Tensor, grad_probs: Tensor, sorted_indices: Tensor, routing_map: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """Gradients of tokens [tokens, hidden], the sum over a token's copies, and of probs [tokens, experts], zero where
    nothing is marked.
    """
    mine = grad_probs.index_select(0, sorted_indices).view(-1, k)
    nth = (routing_map.cumsum(1) - 1).clamp(0, k - 1)
    return moe_unpermute.reference(grad, sorted_indices, None, k), torch.where(
        routing_map, mine.gather(1, nth), 0.0
    ).contiguous()


def _setup(ctx, inputs, output):
    _, routing_map, _, ctx.k = inputs
    ctx.save_for_backward(output[2], routing_map)
    ctx.mark_non_differentiable(output[2])


def _backward(ctx, grad, grad_probs, _):
    sorted_indices, routing_map = ctx.saved_tensors
    grads = torch.ops.mindspeed.moe_permute_map_backward(grad, grad_probs, sorted_indices, routing_map, ctx.k)
    return grads[0] if ctx.needs_input_grad[0] else None, None, grads[1] if ctx.needs_input_grad[2] else None, None


torch.library.register_autograd("mindspeed::moe_permute_map", _backward, setup_context=_setup, lib=LIBRARY)


@moe_permute_map.shard
def _sharding_rule(tokens, routing_map, probs, k):
    return [([1, REPLICATED, REPLICATED], [1, REPLICATED, REPLICATED])]


@moe_permute_map_backward.shard
def _sharding_rule_backward(grad, grad_probs, sorted_indices, routing_map, k):
    """By width, or by token: whole tokens, whose copies lie anywhere in the rows."""
    return [
        ([1, REPLICATED], [1, REPLICATED, REPLICATED, REPLICATED]),
        ([0, 0], [REPLICATED, REPLICATED, Even(0, k), Even(0)]),
    ]


@moe_permute_map.costs
def _cost(out, tokens, routing_map, probs, k):
    """Every copy reads its row; the map is walked twice, once for each order."""
    permuted, share, order = out
    return Cost(
        vector=6 * routing_map.numel,
        read=permuted.bytes + share.bytes + 2 * routing_map.bytes,
        write=permuted.bytes + share.bytes + 2 * order.bytes,
    )


@moe_permute_map_backward.costs
def _backward_cost(out, grad, grad_probs, sorted_indices, routing_map, k):
    return once(out, grad, grad_probs, sorted_indices, routing_map, vector=grad.numel + routing_map.numel)
