"""``--balanced-moe-experts``: every rank computes its own tokens of the N experts with the most tokens itself, on
copies of their weights, so that no rank has all tokens of them (MindSpeed's balanced experts).

All ranks know how many tokens each of them has for each expert, and choose alike, N times: of the rank with the most
rows its expert with the most, whose rows every rank then keeps. Copies are a sum over ranks, to which all but the owner
give zeros, and so are their gradients, which the owner adds to those of its weights: values are those of the layer
without copies, but for the order of sums. Copies of N experts are made in every layer and call, and freed after it.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from torch import Tensor

from mindspeed_fx.errors import OptionError
from mindspeed_fx.megatron import collectives, dispatch, experts, fp8_linears

FLAG = "--balanced-moe-experts"


def count_of(layer: Any) -> int:
    """Experts of a layer that are copied."""
    return getattr(layer, "hot_experts", 0)


def prepare(model: Any, args: Namespace) -> None:
    """Tell every layer of experts of a GPTModel, or of a stage of one, how many experts it copies.

    Raises:
        OptionError: its experts are of another kind than Megatron's SequentialMLP.
    """
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer

    for layer in (m for m in model.modules() if isinstance(m, MoELayer)):
        if type(layer.experts) is not SequentialMLP:
            raise OptionError(f"{FLAG}: experts are a {type(layer.experts).__name__}; remove the flag")
        layer.hot_experts = args.balanced_moe_hot_expert_num if dispatch.is_needed(layer) else 0


def routed(layer: Any, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> Tensor:
    """The sum of a token's experts: tokens [tokens, hidden] -> [tokens, hidden].

    Args:
        layer: Megatron's MoELayer with the dispatcher "alltoall", its experts not divided.
        routing_map: bool [tokens, experts].
        probs: [tokens, experts].
    """
    group, local = layer.ep_group, len(layer.local_expert_indices)
    counts = routing_map.sum(0)
    of_ranks = collectives.gather(counts, group).view(group.size(), -1)
    hot = choose(of_ranks, local, count_of(layer))
    is_cold = torch.ones_like(counts).index_fill(0, hot, 0)
    own = counts.index_select(0, hot)
    coming, sent, received, (rows,) = dispatch.sizes(layer, of_ranks * is_cold, counts * is_cold, own.sum().view(1))
    torch._check(rows <= routing_map.numel())
    copies = [_Copies.apply(hot, layer.local_expert_indices[0], group, *weights) for weights in _weights(layer)]
    cold = dispatch.exchanged(layer, tokens, routing_map & is_cold.bool(), probs, coming, sent, received)
    token_of_row, share = dispatch.sort_by_expert(routing_map.index_select(1, hot), probs.index_select(1, hot), rows)
    kept = _mlp(layer, tokens.index_select(0, token_of_row), share, own, *copies)
    return cold.index_add(0, token_of_row, kept)


def choose(of_ranks: Tensor, local: int, number: int) -> Tensor:
    """The experts to copy, [number], in order.

    Args:
        of_ranks: rows that each rank has for each expert, [ranks, experts].
        local: experts of a rank; at least ``number``.
    """
    left, load = of_ranks.sum(0), of_ranks.sum(0).view(-1, local).sum(1)
    ranks = torch.arange(load.shape[0], device=load.device)
    chosen = []
    for _ in range(number):
        busiest = load.argmax()
        best = left.view(-1, local).index_select(0, busiest.view(1)).argmax()
        expert = (busiest * local + best).view(1)
        load = load - left.index_select(0, expert) * (ranks == busiest) + of_ranks.index_select(1, expert).view(-1)
        left = left.index_fill(0, expert, -1)
        chosen.append(expert)
    return torch.cat(chosen).sort().values


def _weights(layer: Any) -> tuple[list[Tensor], list[Tensor]]:
    own = layer.experts.local_experts
    return [e.linear_fc1.weight for e in own], [e.linear_fc2.weight for e in own]


def _mlp(layer: Any, rows: Tensor, share: Tensor, counts: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Experts with weights [experts, ...] on rows sorted by expert, each times its share."""
    recipe = fp8_linears.recipe_of(layer.experts.local_experts[0].linear_fc1.weight)
    inner = experts.multiply(rows, list(first.unbind(0)), counts, recipe)
    hidden = (experts.activation(inner, layer.config) * share.unsqueeze(-1)).to(rows.dtype)
    return experts.multiply(hidden, list(second.unbind(0)), counts, recipe)


@torch.library.custom_op("mindspeed::copy_hot_experts", mutates_args=())
def copy_hot_experts(weights: list[Tensor], hot: Tensor, first: int) -> Tensor:
    """The weights [out, in] of the experts ``hot`` [n] that are here, the others zero: [n, out, in].

    Args:
        first: the number of the expert ``weights[0]``.
    """
    copies = weights[0].new_zeros(hot.shape[0], *weights[0].shape)
    for copy, expert in zip(copies, hot.tolist(), strict=True):
        if first <= expert < first + len(weights):
            copy.copy_(weights[expert - first])
    return copies


@copy_hot_experts.register_fake
def _(weights: list[Tensor], hot: Tensor, first: int) -> Tensor:
    return weights[0].new_empty(hot.shape[0], *weights[0].shape)


@torch.library.custom_op("mindspeed::spread_hot_gradients", mutates_args=())
def spread_hot_gradients(grad: Tensor, hot: Tensor, first: int, number: int) -> Tensor:
    """Gradients [n, out, in] of copies as those of the ``number`` experts here, from ``first`` on: zero for others."""
    out = grad.new_zeros(number, *grad.shape[1:])
    for part, expert in zip(grad, hot.tolist(), strict=True):
        if first <= expert < first + number:
            out[expert - first].copy_(part)
    return out


@spread_hot_gradients.register_fake
def _(grad: Tensor, hot: Tensor, first: int, number: int) -> Tensor:
    return grad.new_empty(number, *grad.shape[1:])


class _Copies(torch.autograd.Function):
    """Forward: copies of chosen weights on all ranks. Backward: their gradients' sum, for the owner."""

    @staticmethod
    def forward(ctx, *args):
        # All in one: without gradients Dynamo (2.13) leaves ctx away where a signature has a name less than arguments.
        hot, first, group, *weights = args
        ctx.first, ctx.group, ctx.number = first, group, len(weights)
        ctx.save_for_backward(hot)
        return collectives.all_reduce(copy_hot_experts(list(weights), hot, first), group)

    @staticmethod
    def backward(ctx, grad):
        (hot,) = ctx.saved_tensors
        whole = collectives.all_reduce(grad, ctx.group)
        return None, None, None, *spread_hot_gradients(whole, hot, ctx.first, ctx.number).unbind(0)
