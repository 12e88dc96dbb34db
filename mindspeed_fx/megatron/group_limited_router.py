"""``--moe-router-load-balancing-type group_limited_greedy``: DeepSeek-V2's router (2024, arXiv 2405.04434, section
2.2), as MindSpeed-LLM has it: a token goes to experts of M of D groups, which stand for devices.

Of a token s = softmax(logits) over E experts; its M groups are those with the largest best expert, its K experts the
largest of those groups, with weights s times a scale, or s divided by their sum. Over T tokens, with n_i of them at
expert i and m_d at group d:

    f_i = n_i E / (K T),   P_i = mean s_i,   F_d = mean f_i of the group,   Q_d = sum P_i of it,   G_d = m_d D / (M T),

and the losses are a1 sum f_i P_i (experts), a2 sum F_d Q_d (devices), a3 sum G_d Q_d (messages); ``--seq-aux``: those
of each sequence, their mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindspeed_fx.megatron import collectives
from mindspeed_fx.megatron.groups import size


@dataclass(frozen=True)
class Groups:
    """The settings of a router.

    Args:
        number: D.
        chosen: M.
        scale: of the weights; None: they add up to 1.
        coefficients: of the losses of experts, devices and messages.
        by_sequence: losses are those of each sequence.
    """

    number: int
    chosen: int
    scale: float | None
    coefficients: tuple[float, float, float]
    by_sequence: bool


def route(router: Any, logits: Tensor, padding_mask: Tensor | None = None, *, groups: Groups) -> tuple[Tensor, Tensor]:
    """``TopKRouter.routing``.

    Args:
        router: a TopKRouter.
        logits: [seq, batch, experts].
        padding_mask: must be None.

    Returns:
        Weights [tokens, experts], and bool where a token goes.

    Raises:
        NotImplementedError: there is padding.
    """
    if padding_mask is not None:
        raise NotImplementedError("--moe-router-load-balancing-type group_limited_greedy has no mask of padding")
    logits = router.apply_z_loss(logits.transpose(0, 1))  # by sequence
    scores = logits.softmax(-1)
    weights, chosen = choose(scores, groups, router.topk)
    probs = torch.zeros_like(scores).scatter(-1, chosen, weights)
    routing_map = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, chosen, True)
    probs, routing_map = (x.transpose(0, 1).flatten(0, 1) for x in (probs, routing_map))
    if router.training and torch.is_grad_enabled() and any(groups.coefficients):
        group = router.tp_cp_group
        sent = routing_map.view(*logits.shape[1::-1], -1).transpose(0, 1)
        loss = balance(scores, sent, groups, router.topk, group) / size(group)
        probs = router.attach_and_log_load_balancing_loss(probs, 1.0, loss, "load_balancing_loss", group)
    return probs, routing_map


def choose(scores: Tensor, groups: Groups, topk: int) -> tuple[Tensor, Tensor]:
    """Weights and experts [..., topk] for scores [..., experts]."""
    by_group = scores.unflatten(-1, (groups.number, -1))
    best = by_group.amax(-1).topk(groups.chosen, dim=-1).indices
    is_open = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter(-1, best, True)
    weights, chosen = by_group.masked_fill(~is_open.unsqueeze(-1), 0.0).flatten(-2).topk(topk, dim=-1)
    if groups.scale is None:
        return weights / (weights.sum(-1, keepdim=True) + 1e-20), chosen
    return weights * groups.scale, chosen


def balance(scores: Tensor, sent: Tensor, groups: Groups, topk: int, group: Any = None) -> Tensor:
    """The sum of the three losses times their coefficients.

    Args:
        scores: [batch, seq, experts].
        sent: bool, of the same shape: where a token goes.
        group: ranks that share the sequences; P is of this rank's tokens, everything else of all.
    """
    dims = (1,) if groups.by_sequence else (0, 1)
    at_group = sent.unflatten(-1, (groups.number, -1)).any(-1)
    counts = torch.cat([sent.sum(dims), at_group.sum(dims)], -1).to(scores.dtype)
    if size(group) > 1:
        counts = collectives.all_reduce(counts, group)
    experts = scores.shape[-1]
    tokens = size(group) * (scores.shape[1] if groups.by_sequence else scores[..., 0].numel())
    per_expert, per_group = counts.split([experts, groups.number], -1)
    f, p = per_expert * (experts / (topk * tokens)), scores.mean(dims)
    devices = f.unflatten(-1, (groups.number, -1)).mean(-1)
    q = p.unflatten(-1, (groups.number, -1)).sum(-1)
    messages = per_group * (groups.number / (groups.chosen * tokens))
    losses = ((f * p).sum(-1), (devices * q).sum(-1), (messages * q).sum(-1))
    return torch.stack([loss.mean() * a for loss, a in zip(losses, groups.coefficients, strict=True)]).sum()
