"""Tokens of a mixture of experts on their way to experts of other ranks, in a captured graph.

How many rows a rank receives is data. The counts are exchanged first and copied to the host once: the only wait of a
layer. From there on they are symbols of the graph, so that everything behind them has a shape.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_fx.megatron import collectives, groups


def is_needed(layer: Any) -> bool:
    """Whether experts, or parts of them, are on other ranks."""
    return groups.size(layer.ep_group) * groups.size(layer.token_dispatcher.tp_group) > 1


def routed(layer: Any, tokens: Tensor, routing_map: Tensor, probs: Tensor, dropless: bool) -> Tensor:
    """The sum of a token's experts, wherever they are: tokens [tokens, hidden] -> [tokens, hidden].

    Args:
        layer: Megatron's MoELayer with the dispatcher "alltoall" or "allgather".
        tokens: of this rank.
        routing_map: bool [tokens, experts].
        probs: [tokens, experts].
        dropless: every token has all its experts.
    """
    gathers = layer.config.moe_token_dispatcher_type == "allgather"
    if gathers:
        return _by_gathering(layer, tokens, routing_map, probs)
    rows = tokens.shape[0] * layer.config.moe_router_topk if dropless else None
    return _by_exchange(layer, tokens, routing_map, probs, rows)


def capacity(routing_map: Tensor, config: Any) -> int | None:
    """Rows of every expert where they are padded to its capacity; else None."""
    from megatron.core.transformer.moe.moe_utils import get_capacity

    if not config.moe_pad_expert_input_to_capacity:
        return None
    tokens, experts = routing_map.shape
    return min(tokens, get_capacity(tokens * config.moe_router_topk, experts, config.moe_expert_capacity_factor))


def _by_gathering(layer: Any, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> Tensor:
    """Every rank sees all tokens, and takes those that its experts were chosen for."""
    group, local = layer.token_dispatcher.tp_ep_group, _local_experts(layer)
    here = collectives.gather(routing_map, group)[:, local]
    share = collectives.gather_from_sequence_parallel_region(probs, group=group)[:, local]
    tokens = collectives.gather_from_sequence_parallel_region(tokens, group=group)
    counts = here.sum(0)
    (rows,) = _on_host(counts.sum().view(1))
    torch._check(rows <= here.numel())
    token_of_row, share = sort_by_expert(here, share, rows)
    output, _ = layer.experts(tokens.index_select(0, token_of_row), counts, share)
    summed = torch.zeros_like(tokens).index_add(0, token_of_row, output)
    own = collectives.reduce_scatter_to_sequence_parallel_region(summed.to(probs.dtype), group=group)
    return own.to(tokens.dtype)


def _by_exchange(layer: Any, tokens: Tensor, routing_map: Tensor, probs: Tensor, rows: int | None) -> Tensor:
    """Each row travels to every rank that has a part of its expert, and what they make of it travels back.

    Where experts are divided over tensor-parallel ranks, Megatron sends a row to one of them, which gathers; one
    exchange over all ranks moves as many rows, and its lengths are those of one direction alone.
    """
    dispatcher = layer.token_dispatcher
    group, parts = dispatcher.tp_ep_group, groups.size(dispatcher.tp_group)
    coming, sent, received = _exchange_counts(layer, routing_map)
    copies = sent[::parts]
    if rows is None:
        rows = sum(copies)
    else:
        torch._check(sum(copies) == rows)
    token_of_row, share = sort_by_expert(routing_map, probs, rows)
    outgoing = [_for_every_part(x, copies, parts) for x in (tokens.index_select(0, token_of_row), share)]
    incoming = [collectives.all_to_all(group, x, received, sent) for x in outgoing]

    order, inverse = _order_by_expert(coming, sum(received))
    x, share = (_Permute.apply(x, order, inverse) for x in incoming)
    output, _ = layer.experts(x, coming.sum(0), share)
    back = collectives.all_to_all(group, _Permute.apply(output, inverse, order), sent, received)
    back = _sum_of_parts(back.to(probs.dtype) if parts > 1 else back, copies, parts)
    return torch.zeros_like(tokens).index_add(0, token_of_row, back.to(tokens.dtype))


def _exchange_counts(layer: Any, routing_map: Tensor) -> tuple[Tensor, list[int], list[int]]:
    """Rows that come from each rank for each expert here, [ranks, experts]; rows sent to each rank; rows that come from
    each.
    """
    group, here = layer.token_dispatcher.tp_ep_group, _local_experts(layer)
    ranks, parts, padded = group.size(), groups.size(layer.token_dispatcher.tp_group), capacity(routing_map, layer.config)
    if padded is not None:
        number = here.stop - here.start
        coming = torch.full((ranks, number), padded, device=routing_map.device)
        return coming, [padded * number] * ranks, [padded * number] * ranks
    counts = routing_map.sum(0)
    coming = collectives.gather(counts, group).view(ranks, -1)[:, here]
    leaving = counts.view(ranks // parts, -1).sum(1).repeat_interleave(parts)
    sizes = _on_host(torch.cat([leaving, coming.sum(1)]))
    return coming, sizes[:ranks], sizes[ranks:]


def sort_by_expert(routing_map: Tensor, probs: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The chosen (expert, token) pairs in order, expert by expert: the token of each row and its probability.

    Rows beyond the pairs there are (tokens were dropped) get token 0 with probability 0.

    Args:
        routing_map: boolean [tokens, experts].
        probs: [tokens, experts].
        rows: at least the number of pairs.
    """
    tokens = routing_map.shape[0]
    chosen = routing_map.T.reshape(-1)
    place = torch.where(chosen, chosen.cumsum(0) - 1, rows)
    pair = torch.full((rows + 1,), chosen.shape[0], device=chosen.device).scatter(
        0, place, torch.arange(chosen.shape[0], device=chosen.device)
    )[:rows]
    share = F.pad(probs.T.reshape(-1), (0, 1)).index_select(0, pair)
    return torch.where(pair < chosen.shape[0], pair % tokens, 0), share


def _local_experts(layer: Any) -> slice:
    first, last = layer.local_expert_indices[0], layer.local_expert_indices[-1]
    return slice(first, last + 1)


def _on_host(sizes: Tensor) -> list[int]:
    """``sizes`` as numbers, which a graph has as symbols: copied at once, and the only wait."""
    values = sizes.cpu().tolist()
    for n in values:
        torch._check(n >= 0)
    return values


def _for_every_part(rows: Tensor, sizes: list[int], parts: int) -> Tensor:
    """Rows for each rank of experts, once for every tensor-parallel part of these."""
    if parts == 1:
        return rows
    return torch.cat([block for block in rows.split(sizes) for _ in range(parts)])


def _sum_of_parts(rows: Tensor, sizes: list[int], parts: int) -> Tensor:
    if parts == 1:
        return rows
    blocks = rows.split([n for n in sizes for _ in range(parts)])
    return torch.cat([sum(blocks[i + 1 : i + parts], blocks[i]) for i in range(0, len(blocks), parts)])


def _order_by_expert(coming: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The order in which rows [rows], sorted by rank and expert, are sorted by expert and rank; and its inverse.

    Args:
        coming: rows of each rank for each expert here, [ranks, experts].
        rows: their sum.
    """
    ranks, experts = coming.shape
    expert = torch.arange(experts, device=coming.device).repeat(ranks)
    expert_of_row = torch.repeat_interleave(expert, coming.reshape(-1), output_size=rows)
    order = torch.sort(expert_of_row, stable=True)[1]
    places = torch.arange(rows, device=coming.device)
    return order, torch.empty_like(order).scatter(0, order, places)


class _Permute(torch.autograd.Function):
    """Rows in another order; the gradient gathers, where that of ``index_select`` would add up row by row."""

    @staticmethod
    def forward(ctx, x, order, inverse):
        ctx.save_for_backward(order, inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx, grad):
        order, inverse = ctx.saved_tensors
        return _Permute.apply(grad, inverse, order), None, None
