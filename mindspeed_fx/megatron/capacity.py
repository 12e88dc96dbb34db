"""Experts whose capacity counts the tokens of all tensor-parallel ranks, as MindSpeed's dispatcher ``alltoall_seq`` has
it; Megatron counts those of a rank.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor

from mindspeed_fx.megatron import collectives


def count_over_sequence(model: Any) -> None:
    """Have the routers of ``model`` drop tokens by a capacity of the whole sequence."""
    from megatron.core.transformer.moe.router import TopKRouter

    for router in (m for m in model.modules() if isinstance(m, TopKRouter)):
        config, router.config = router.config, copy.copy(router.config)
        router.config.moe_expert_capacity_factor = None
        settings = (config.moe_router_topk, config.moe_expert_capacity_factor, config.moe_token_drop_policy)
        router.register_forward_hook(
            lambda module, inputs, output, settings=settings: drop_tokens(*output, *settings, module.tp_group)
        )


def drop_tokens(
    probs: Tensor, routing_map: Tensor, topk: int, factor: float, policy: str, group: Any
) -> tuple[Tensor, Tensor]:
    """What is kept of a rank's tokens where an expert takes ``ceil(topk * tokens / experts * factor)`` of the tokens of
    all ranks.

    Args:
        probs: [tokens of this rank, experts], zero where a token does not go.
        routing_map: the same shape, bool.
        policy: "probs" keeps the most probable tokens, "position" the first.
        group: ranks that share the sequence, in its order.

    Returns:
        Both with the dropped tokens taken out.
    """
    from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping

    every_map = collectives.gather(routing_map, group)
    _, kept = apply_router_token_dropping(collectives.gather(probs, group), every_map, topk, factor, policy)
    own = kept.narrow(0, group.rank() * probs.shape[0], probs.shape[0])
    return probs * own, own
