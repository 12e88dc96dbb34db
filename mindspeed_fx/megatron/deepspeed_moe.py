"""``--moe-model-type deepspeed_moe``: DeepSpeed's gate (Rajbhandari et al. 2022, arXiv 2201.05596; GShard's, Lepikhin
et al. 2020, arXiv 2006.16668), as MindSpeed has it, as the router of Megatron's layer of experts.

Of a rank's n tokens p = softmax(x W) over E experts, in float32. One expert: the largest p_i with weight p_i. Two: the
largest p_i and p_j, with weights p_i / (p_i + p_j) and p_j / (p_i + p_j). An expert takes C = ceil(n k f / E) tokens (k
experts of a token, factor f; at least 4, at most n) in the order of the sequence, first all those of which it is the
first choice; a token that finds no place is dropped, and what is left of its two weights is divided by its sum. Every
expert computes C rows, so that nothing is counted on the host; without dropping the rows there are, and no padding
whose length would have to be agreed on or predicted.
"""

from __future__ import annotations

import copy
import functools
import math
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_fx.megatron.pieces import pieces_of
from mindspeed_fx.megatron.sinkhorn import sinkhorn

NAME = "deepspeed_moe"
FEWEST = 4
JITTER = 0.01


@dataclass(frozen=True)
class Gate:
    """The settings of a layer's gate.

    Args:
        topk: experts of a token, 1 or 2.
        factor: of the capacity; None: no token is dropped.
        is_noisy: with one expert, in training: the largest of the logits plus Gumbel noise, not of p.
        balances: logits go through Sinkhorn's iteration first.
        parts: of the sequence, each with a capacity of its own (Ampipe).
        share: of the loss of balance that a call has: less than 1 where a call sees a part of the sequence.
    """

    topk: int
    factor: float | None
    is_noisy: bool = False
    balances: bool = False
    parts: int = 1
    share: float = 1.0

    def capacity(self, tokens: int, experts: int) -> int | None:
        """Rows of an expert for ``tokens`` tokens of a part; None where none is dropped."""
        if self.factor is None:
            return None
        rows = math.ceil(_single(_single(tokens / experts) * _single(self.factor * self.topk)))
        return min(max(rows, FEWEST), tokens)

    def rows(self, tokens: int, experts: int) -> int | None:
        """Rows of an expert for all ``tokens`` of a rank."""
        capacity = self.capacity(tokens // self.parts, experts)
        return None if capacity is None else capacity * self.parts


def _single(x: float) -> float:
    """``x`` rounded to float32, in which DeepSpeed multiplies (Veltkamp's splitting, which can be traced)."""
    high = x * (2.0**29 + 1)
    return high - (high - x)


def is_layer_ours(layer: Any) -> bool:
    """Whether a layer of experts has such a gate."""
    return getattr(layer, "deepspeed_gate", None) is not None


def set_gates(model: Any, args: Namespace) -> Gate:
    """Give every layer of experts of a GPTModel, or of a stage of one, the gate that ``args`` ask for; returns it."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    gate = Gate(
        args.moe_router_topk,
        None if args.moe_no_drop else args.moe_train_capacity_factor,
        args.noisy_gate_policy == "RSample",
        args.moe_use_sinkhorn,
        args.ampipe_degree,
    )
    for layer in (m for m in model.modules() if isinstance(m, MoELayer)):
        layer.deepspeed_gate, layer.pieces = gate, pieces_of(args)
        router = layer.router
        if args.noisy_gate_policy == "Jitter":
            router.config = copy.copy(router.config)
            router.config.moe_input_jitter_eps = JITTER
            router.register_forward_pre_hook(_set_jitter)
        router.routing = functools.partial(route, router, gate)
        if router.config.perform_initialization:  # as torch.nn.Linear starts
            bound = router.config.hidden_size**-0.5
            torch.nn.init.uniform_(router.weight, -bound, bound)
    return gate


def _set_jitter(router: Any, inputs: Any) -> None:
    router.config.moe_input_jitter_eps = JITTER if router.training else None


def route(router: Any, gate: Gate, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``TopKRouter.routing``.

    Args:
        router: a TopKRouter.
        logits: [seq, batch, experts].
        padding_mask: must be None.

    Returns:
        Weights [tokens, experts], and bool where a token goes; where tokens are dropped, every expert has as many of
        every part as its capacity, some with weight 0.

    Raises:
        NotImplementedError: there is padding.
        ValueError: the sequence is no whole number of parts.
    """
    if padding_mask is not None:
        raise NotImplementedError("--moe-model-type deepspeed_moe has no mask of padding")
    if logits.shape[0] % gate.parts:
        raise ValueError(f"--ampipe-degree {gate.parts} does not divide the {logits.shape[0]} tokens of a rank")
    routes = [_route(router, gate, part.flatten(0, 1)) for part in logits.chunk(gate.parts)]
    probs, kept = torch.cat([p for p, _, _ in routes]), torch.cat([k for _, k, _ in routes])
    coefficient = router.get_aux_loss_coeff("aux_loss")
    if coefficient > 0 and gate.topk == 2 and router.training and torch.is_grad_enabled():
        loss = sum(loss for _, _, loss in routes) / gate.parts
        tokens = round(probs.shape[0] / gate.share)
        group, scaled = router.tp_cp_group, coefficient * gate.share / router.tp_cp_group.size()
        probs = router.attach_and_log_load_balancing_loss(
            probs, coefficient, loss * scaled, "load_balancing_loss", group, valid_token_count=tokens
        )
    if gate.factor is not None:
        parts = kept.chunk(gate.parts)
        kept = torch.cat([_filled(part, gate.capacity(*part.shape)) for part in parts])
    return probs, kept


def _route(router: Any, gate: Gate, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weights [tokens, experts], where a token goes, and the loss of balance, of one part."""
    logits = router.apply_z_loss(logits)
    if gate.balances:
        logits = sinkhorn(logits)
    p = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    capacity = gate.capacity(*p.shape)
    if gate.topk == 1:
        wanted = _with_noise(logits) if gate.is_noisy and router.training else p
        first = F.one_hot(wanted.argmax(-1), p.shape[1])
        kept = _those_with_a_place(first, 0, capacity)
        probs = p * kept
    else:
        first, second = F.one_hot(p.topk(2, dim=-1).indices, p.shape[1]).unbind(1)
        kept = _those_with_a_place(first, 0, capacity) | _those_with_a_place(second, first.sum(0), capacity)
        weights = p * kept
        probs = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(p.dtype).eps)
    balance = (p.mean(0) * first.to(p.dtype).mean(0)).mean() * p.shape[1] ** 2
    return probs, kept, balance


def _with_noise(logits: Tensor) -> Tensor:
    """Logits plus Gumbel noise, for a choice alone."""
    noise = logits.detach().clone().exponential_()  # of what was computed: draws of a graph stay in this order
    return logits.detach() - noise.log()


def _those_with_a_place(chosen: Tensor, before: Tensor | int, capacity: int | None) -> Tensor:
    """The choices [tokens, experts] (of 0 and 1) that stand among the first ``capacity`` of their expert, as bool.

    Args:
        before: of an expert, places that are taken already.
    """
    if capacity is None:
        return chosen.bool()
    return chosen.bool() & (chosen.cumsum(0) - 1 + before < capacity)


def _filled(kept: Tensor, rows: int) -> Tensor:
    """``kept`` and as many tokens more, the first ones, as make ``rows`` of every expert."""
    return kept | ((~kept).cumsum(0) <= rows - kept.sum(0)) & ~kept
