"""``--use-pipe-experts`` and ``--ampipe-degree``: DeepSpeed's experts of a fixed capacity piece by piece, the exchange
of a piece while another is computed (MindSpeed's pipe-experts; Zhang et al. 2023, "MPipeMoE").

A rank has R ranks' rows for E experts, C of each, [E, R, C, hidden]. A piece is a part of the sequence (Ampipe), of it
one expert or all, and of its capacity one of N slices. With exchange x, gather g over tensor-parallel ranks, product p
and exchange back b the order is

    x0 x1 x2 ..   g0   g1 p0   g2 p1 b0   ..   bn            starts; a wait stands before the first use

and with ``--pipe-experts-multi-stream`` x0 g0 x1 g1 .., so that exchanges and gathers do not run at once on one link.
The backward is in the opposite order (:mod:`mindspeed_fx.megatron.begun`). Gathers and the sums after products wait
where overlap.schedule has them wait; without it, at once. Rows are the ones of the layer without
pieces, so that the values are, but for gradients of weights, which are sums over the pieces.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_fx.megatron import (
    begun,
    collectives,
    dispatch,
    experts,
    fp8_linears,
    groups,
    main_grad,
    zero_memory,
)
from mindspeed_fx.training import gradient_ready


def is_ours(layer: Any) -> bool:
    """Whether a layer of experts is computed in pieces."""
    config = layer.config
    if getattr(layer, "pieces", None) is None or not dispatch.is_needed(layer):
        return False
    divided = groups.size(layer.token_dispatcher.tp_group) > 1
    return not (zero_memory.level_of(layer) or config.moe_apply_probs_on_input or divided and config.add_bias_linear)


def routed(layer: Any, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> Tensor:
    """The sum of a token's experts: tokens [tokens, hidden] -> [tokens, hidden].

    Args:
        layer: Megatron's MoELayer with DeepSpeed's gate.
        routing_map, probs: [tokens, experts], of which every expert has as many tokens as its capacity in every part.
    """
    parts = layer.pieces.parts
    divided = (x.chunk(parts) for x in (tokens, routing_map, probs))
    pipe = Pipe(layer)
    for part in zip(*divided, strict=True):
        pipe.send(*part)
    return torch.cat(pipe.results())


class Pipe:
    """The pieces of one call of a layer."""

    def __init__(self, layer: Any) -> None:
        self.layer, self.pieces = layer, layer.pieces
        self.exchanging, self.dividing = layer.ep_group, layer.token_dispatcher.tp_group
        self.ranks = groups.size(self.exchanging)
        self.local = len(layer.local_expert_indices)
        self.routes: list[tuple[Tensor, Tensor, Tensor]] = []
        self.coming: list[Tensor] = []
        self.gathered: list[Tensor] = []

    @property
    def _starts_late(self) -> bool:
        """Whether an exchange starts behind the gather before it."""
        return self.pieces.alternates and self.pieces.parts == 1

    def send(self, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> None:
        """Starts the exchanges of a part [tokens, ...], but where they take turns with gathers.

        Raises:
            ValueError: more slices than rows of an expert.
        """
        rows = self.layer.deepspeed_gate.capacity(*routing_map.shape)
        if self.pieces.slices > rows:
            raise ValueError(
                f"--pipe-experts-multi-data makes {self.pieces.slices} slices of the {rows} rows that an expert takes; "
                f"give {rows} or fewer"
            )
        token_of_row, share = dispatch.sort_by_expert(routing_map, probs, rows * routing_map.shape[1])
        self.routes.append((tokens, token_of_row, share))
        for piece in self._cut(tokens.index_select(0, token_of_row), rows):
            self.coming.append(piece if self._starts_late else begun.begin(piece, self.exchanging))

    def _cut(self, x: Tensor, rows: int) -> list[Tensor]:
        """x [ranks * local * rows, ...], sorted by expert -> pieces [ranks * n, ...]."""
        blocks = x.view(self.ranks, self.local, rows, *x.shape[1:])
        each = blocks.split(1 if self.pieces.by_expert else self.local, 1)
        return [p.flatten(0, 2) for block in each for p in block.tensor_split(self.pieces.slices, 2)]

    def _join(self, pieces: list[Tensor]) -> Tensor:
        """The inverse of :meth:`_cut`."""
        number = 1 if self.pieces.by_expert else self.local
        shaped = [p.view(self.ranks, number, -1, *p.shape[1:]) for p in pieces]
        n = self.pieces.slices
        blocks = [torch.cat(shaped[i : i + n], 2) for i in range(0, len(shaped), n)]
        return torch.cat(blocks, 1).flatten(0, 2)

    def _gather(self, index: int) -> None:
        coming = self.coming[index]
        came = begun.wait(begun.begin(coming, self.exchanging) if self._starts_late else coming, self.exchanging)
        self.gathered.append(collectives.gather_from_sequence_parallel_region(came, group=self.dividing))

    def results(self) -> list[Tensor]:
        """What the experts make of every part, [tokens, hidden]; each token's sum of its experts times its weights."""
        going: list[Tensor] = []
        last, ahead = len(self.coming) - 1, int(groups.size(self.dividing) > 1)
        leaving: list[Tensor] = []
        for index in range(last + 1):
            while len(self.gathered) <= min(index + ahead, last):
                self._gather(len(self.gathered))
            output = self._compute(index, self.gathered[index])
            leaving.append(collectives.reduce_scatter_to_sequence_parallel_region(output, group=self.dividing))
            if index >= ahead:
                going.append(begun.begin(leaving[index - ahead], self.exchanging))
        going += [begun.begin(x, self.exchanging) for x in leaving[len(going) :]]
        back = [begun.wait(x, self.exchanging) for x in going]
        of_part = len(back) // len(self.routes)
        return [self._sum(*route, back[i * of_part : (i + 1) * of_part]) for i, route in enumerate(self.routes)]

    def _compute(self, index: int, rows: Tensor) -> Tensor:
        """The experts of piece ``index`` on ``rows`` [tensor-parallel ranks * ranks * n, hidden]."""
        all_experts = list(self.layer.experts.local_experts)
        if not self.pieces.by_expert:
            return self._compute_all(all_experts, rows, is_last=index == 0)
        of_part = self.local * self.pieces.slices
        is_last = index < of_part and index % self.pieces.slices == 0  # in the backward, which has the opposite order
        return _mlp([all_experts[index % of_part // self.pieces.slices]], rows, None, is_last)

    def _compute_all(self, all_experts: list[Any], rows: Tensor, is_last: bool) -> Tensor:
        """All experts on rows sorted by rank and then by expert."""
        sources = self.ranks * groups.size(self.dividing)
        blocks = rows.unflatten(0, (sources, self.local, -1))
        by_expert = blocks.transpose(0, 1).flatten(0, 2)
        counts = torch.full((self.local,), rows.shape[0] // self.local, device=rows.device)
        out = _mlp(all_experts, by_expert, counts, is_last)
        return out.view(self.local, *blocks.shape[:1], *blocks.shape[2:]).transpose(0, 1).flatten(0, 2)

    def _sum(self, tokens: Tensor, token_of_row: Tensor, share: Tensor, pieces: list[Tensor]) -> Tensor:
        weighted = (self._join(pieces) * share.unsqueeze(-1)).to(tokens.dtype)
        return torch.zeros_like(tokens).index_add(0, token_of_row, weighted)


def _mlp(chosen: list[Any], rows: Tensor, counts: Tensor | None, is_last: bool) -> Tensor:
    """Experts on rows sorted by expert, an equal number of each.

    Args:
        chosen: Megatron's MLPs of one expert or more.
        counts: rows of each, [experts]; None where there is one expert.
        is_last: no later gradient of their weights comes in this backward.
    """
    inner = _multiply(rows, [e.linear_fc1 for e in chosen], counts, is_last)
    hidden = experts.activation(inner, chosen[0].config)
    return _multiply(hidden, [e.linear_fc2 for e in chosen], counts, is_last)


def _multiply(x: Tensor, linears: list[Any], counts: Tensor | None, is_last: bool) -> Tensor:
    out = experts.multiply_experts(x, linears, counts, is_last) if counts is not None else _linear(x, *linears, is_last)
    if linears[0].bias is None:
        return out
    bias = torch.stack([linear.bias for linear in linears])
    return (out.view(len(linears), -1, out.shape[-1]) + bias.unsqueeze(1)).flatten(0, 1)


def _linear(x: Tensor, linear: Any, is_last: bool) -> Tensor:
    weight = linear.weight
    if recipe := fp8_linears.recipe_of(weight):
        return fp8_linears.linear(x, weight, None, recipe)
    if not main_grad.adds_to_main_grad(linear.gradient_accumulation_fusion, [weight]):
        return F.linear(x, weight)
    key = gradient_ready.key_of(weight) if is_last else gradient_ready.NOBODY
    dummy = is_last and main_grad.needs_dummy(weight, key)
    return main_grad.linear_main_grad(x, weight, weight.main_grad, dummy, key)
