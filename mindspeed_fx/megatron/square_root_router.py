"""DeepSeek-V4's routers: scores sqrt(softplus(l)) (``--moe-router-score-function sqrtsoftplus``), and experts by a
table of tokens (``--n-hash-layers``; Roller et al. 2021, arXiv 2106.04426, "Hash Layers").

With p = sqrt(softplus(l)) of each expert, a token goes to the k largest of p + b, b a bias that moves by the sign of
the load as for sigmoid routers, or in a layer with a table to the experts that stand there for the token, without a
bias. Its weights are p of these, over their sum, times a scale. The loss of each sequence is Megatron's, of p over its
sum and the k largest of it, or in a layer with a table of where tokens go.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mindspeed_fx.megatron.deepseek4.parts import wide

EPSILON = 1e-20
"""Added to sums of scores."""


def has_table(layer: Any) -> bool:
    """Whether a layer of experts chooses them by a table."""
    return hasattr(getattr(layer, "router", None), "tid2eid")


def change_routers(model: Any) -> None:
    """Give every router of a GPTModel, or of a stage of one, these scores."""
    from megatron.core.transformer.moe.router import TopKRouter

    for router in (m for m in model.modules() if isinstance(m, TopKRouter)):
        router.routing = functools.partial(route, router)


def add_table(layer: Any, tokens: int) -> None:
    """Choose a layer's experts by a table, which a checkpoint has, and which begins with experts in turn.

    Args:
        layer: of experts.
        tokens: of the vocabulary, with what pads it.
    """
    router = layer.router
    if router.enable_expert_bias:
        router.enable_expert_bias = False
        del router.expert_bias, router.local_tokens_per_expert
    device = torch.cuda.current_device()
    turns = torch.arange(tokens, device=device).unsqueeze(1) + torch.arange(router.topk, device=device)
    router.register_buffer("tid2eid", turns % router.config.num_moe_experts)


def route(router: Any, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``TopKRouter.routing``.

    Args:
        router: a TopKRouter.
        logits: [seq, batch, experts].
        padding_mask: for a router with a table the tokens [seq, batch]; else None.

    Returns:
        Weights [seq * batch, experts], and bool where a token goes.

    Raises:
        ValueError: tokens are missing, or there is padding.
    """
    table = getattr(router, "tid2eid", None)
    if (table is None) != (padding_mask is None):
        raise ValueError("a router with a table wants tokens, and another no mask of padding")
    (seq, batch), config = logits.shape[:2], router.config
    logits = router.apply_z_loss(logits.view(-1, logits.shape[-1]))
    scores = functional.softplus(wide(logits)).sqrt().to(logits.dtype)
    if table is None:
        chosen = _best(scores if router.expert_bias is None else scores + router.expert_bias, router)
    else:
        chosen = table[padding_mask.reshape(-1)]
    weights = scores.gather(1, chosen)
    if router.topk > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + EPSILON)
    weights = weights * (config.moe_router_topk_scaling_factor or 1.0)
    routing_map = torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)
    probs = torch.zeros_like(scores).scatter(1, chosen, weights)
    if router.training and torch.is_grad_enabled() and router.is_aux_loss_enabled():
        shares = scores / (scores.sum(-1, keepdim=True) + EPSILON)
        counted = routing_map
        if table is None:
            counted = torch.zeros_like(routing_map).scatter(1, shares.topk(router.topk, 1).indices, True)
        probs = router._apply_seq_aux_loss(probs, shares, counted, seq, batch)
    router._apply_expert_bias(routing_map)
    return probs, routing_map


def _best(scores: Tensor, router: Any) -> Tensor:
    """[tokens, k] of scores [tokens, experts], within the best groups where experts are in groups."""
    from megatron.core.transformer.moe.moe_utils import group_limited_topk

    config = router.config
    if not config.moe_router_group_topk:
        return scores.topk(router.topk, 1).indices
    tokens, experts = scores.shape
    groups = config.moe_router_num_groups, config.moe_router_group_topk
    return group_limited_topk(scores, router.topk, tokens, experts, *groups)[1]
