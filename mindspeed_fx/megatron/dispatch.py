"""Tokens of a mixture of experts on their way to experts of other ranks, in a captured graph.

How many rows a rank receives is data. The counts are exchanged first and copied to the host once: the only wait of a
layer. From there on they are symbols of the graph, so that everything behind them has a shape.
"""

from __future__ import annotations

from typing import Any, Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_fx.megatron import adaptive_memory, collectives, deepspeed_moe, experts, groups, zero_memory


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
    if layer.config.moe_token_dispatcher_type == "allgather":
        return _by_gathering(layer, tokens, routing_map, probs)
    return exchanged(layer, tokens, routing_map, probs, *_exchange_counts(layer, routing_map), dropless)


def exchanged(
    layer: Any,
    tokens: Tensor,
    routing_map: Tensor,
    probs: Tensor,
    coming: Tensor,
    sent: list[int],
    received: list[int],
    dropless: bool = False,
) -> Tensor:
    """:func:`routed` by the dispatcher "alltoall", with the numbers of rows of :func:`sizes`."""
    exchange = _Exchange(layer.token_dispatcher, sent, received)
    if zero_memory.level_of(layer) == zero_memory.LEVEL1 and torch.compiler.is_compiling():
        exchange.move = collectives.plain_all_to_all
    k = layer.config.moe_router_topk

    def leave(tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if dropless:  # every token has its k experts, and torch_npu an operator for just that
            torch._check(exchange.rows == tokens.shape[0] * k)
            return torch.ops.mindspeed.moe_permute_map(tokens, routing_map, probs, k)
        token_of_row, share = sort_by_expert(routing_map, probs, exchange.rows)
        return tokens.index_select(0, token_of_row), share, token_of_row

    back, places = _run_experts(layer, leave, tokens, probs, coming, exchange)
    if dropless:
        return torch.ops.mindspeed.moe_unpermute(back, places, None, k)
    return torch.zeros_like(tokens).index_add(0, places, back)


def capacity(layer: Any, routing_map: Tensor) -> int | None:
    """Rows of every expert of a layer where they are padded to its capacity; else None."""
    from megatron.core.transformer.moe.moe_utils import get_capacity

    if deepspeed_moe.is_layer_ours(layer):
        return layer.deepspeed_gate.rows(*routing_map.shape)
    config = layer.config
    if not config.moe_pad_expert_input_to_capacity:
        return None
    tokens, experts = routing_map.shape
    return min(tokens, get_capacity(tokens * config.moe_router_topk, experts, config.moe_expert_capacity_factor))


def _by_gathering(layer: Any, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> Tensor:
    """Every rank sees all tokens, and takes those that its experts were chosen for."""
    group, local = layer.token_dispatcher.tp_ep_group, _local_experts(layer)
    whole = adaptive_memory.choose(layer, collectives.gather(routing_map, group))
    here = whole[:, local]
    share = collectives.gather_from_sequence_parallel_region(probs, group=group)[:, local]
    tokens = collectives.gather_from_sequence_parallel_region(tokens, group=group)
    counts = here.sum(0)
    (rows,) = _on_host(counts.sum().view(1))
    torch._check(rows <= here.numel())

    def enter(tokens: Tensor, share: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        token_of_row, share = sort_by_expert(here, share, rows)
        return tokens.index_select(0, token_of_row), share, token_of_row

    output, token_of_row = experts.run(layer, enter, counts, tokens, share)
    summed = torch.zeros_like(tokens).index_add(0, token_of_row, output)
    own = collectives.reduce_scatter_to_sequence_parallel_region(summed.to(probs.dtype), group=group)
    return own.to(tokens.dtype)


class _Exchange:
    """The way of rows, sorted by expert, to every rank that has a part of their expert, and back.

    Where experts are divided over tensor-parallel ranks, Megatron sends a row to one of them, which gathers; one
    exchange over all ranks moves as many rows, and its lengths are those of one direction alone.
    """

    def __init__(self, dispatcher: Any, sent: list[int], received: list[int]) -> None:
        self.group, self.parts = dispatcher.tp_ep_group, groups.size(dispatcher.tp_group)
        self.sent, self.received = sent, received
        self.sizes = sent[:: self.parts]
        self.rows = sum(self.sizes)
        self.move = collectives.all_to_all

    def send(self, x: Tensor) -> Tensor:
        """Rows [rows, ...] of this rank -> those that come, by rank and expert."""
        if self.parts > 1:
            x = torch.cat([block for block in x.split(self.sizes) for _ in range(self.parts)])
        return self.move(self.group, x, self.received, self.sent)

    def send_back(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """What came, or its like, back to where it came from; what the parts of an expert make is added up in
        ``dtype``.
        """
        out = self.move(self.group, x, self.sent, self.received)
        if self.parts == 1:
            return out
        blocks = out.to(dtype).split(self.sent)
        sums = [sum(blocks[i + 1 : i + self.parts], blocks[i]) for i in range(0, len(blocks), self.parts)]
        return torch.cat(sums).to(x.dtype)


def _run_experts(
    layer: Any, leave: Callable, tokens: Tensor, probs: Tensor, coming: Tensor, exchange: _Exchange
) -> tuple[Tensor, Tensor]:
    """What the experts make of the rows that ``leave`` makes of tokens and probabilities, each times its share, in the
    same order; and what else ``leave`` returns.
    """
    order, inverse = _order_by_expert(coming, sum(exchange.received))
    counts = coming.sum(0)

    def sort(x: Tensor) -> Tensor:
        return _Permute.apply(x, order, inverse)

    def send(tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, share, places = leave(tokens, probs)
        return sort(exchange.send(rows)), sort(exchange.send(share)), places

    def enter(received: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
        return sort(received), part

    if zero_memory.level_of(layer) == zero_memory.LEVEL1:
        output, places = experts.run(layer, send, counts, tokens, probs)
    else:
        rows, share, places = leave(tokens, probs)
        (output,) = experts.run(layer, enter, counts, exchange.send(rows), sort(exchange.send(share)))
    return exchange.send_back(_Permute.apply(output, inverse, order), probs.dtype), places


def _exchange_counts(layer: Any, routing_map: Tensor) -> tuple[Tensor, list[int], list[int]]:
    """Rows that come from each rank for each expert here, [ranks, experts]; rows sent to each rank; rows that come from
    each.
    """
    here, group = _local_experts(layer), layer.token_dispatcher.tp_ep_group
    ranks, padded = group.size(), capacity(layer, routing_map)
    if padded is not None:
        number = here.stop - here.start
        coming = torch.full((ranks, number), padded, device=routing_map.device)
        return coming, [padded * number] * ranks, [padded * number] * ranks
    counts = routing_map.sum(0)
    of_ranks = adaptive_memory.choose(layer, collectives.gather(counts, group).view(ranks, -1))
    return sizes(layer, of_ranks, counts)[:3]


def sizes(
    layer: Any, of_ranks: Tensor, counts: Tensor, more: Tensor | None = None
) -> tuple[Tensor, list[int], list[int], list[int]]:
    """Rows that come from each rank for each expert here, [ranks, experts]; rows sent to each rank; rows that come from
    each; and ``more``: the last three on the host, by one copy.

    Args:
        of_ranks: rows of each rank for each expert, [ranks, all experts].
        counts: those of this rank, [all experts].
        more: further numbers, [n].
    """
    parts, ranks = groups.size(layer.token_dispatcher.tp_group), of_ranks.shape[0]
    coming = of_ranks[:, _local_experts(layer)]
    leaving = counts.view(ranks // parts, -1).sum(1).repeat_interleave(parts)
    numbers = _on_host(torch.cat([leaving, coming.sum(1), *([] if more is None else [more])]))
    return coming, numbers[:ranks], numbers[ranks : 2 * ranks], numbers[2 * ranks :]


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
