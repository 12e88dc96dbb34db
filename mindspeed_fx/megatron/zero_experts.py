"""LongCat's mixture of experts (Meituan LongCat Team 2025, arXiv 2509.01322, section 2.1), as MindSpeed-LLM has it:
experts that return their input, and a softmax router whose choice a bias moves.

A router scores E experts and Z zero-computation experts: p = softmax(logits), in float32 and then rounded. A token goes
to the k largest of p + b, with weights p times a scale; b, a bias of each expert, moves by the sign of its load after
every step, as for sigmoid routers. A zero expert adds its weight times the token itself, on the token's own rank.
"""

from __future__ import annotations

import copy
import functools
from argparse import Namespace
from typing import Any

import torch
from torch import Tensor, nn

from mindspeed_fx.megatron import deepspeed_moe, expert_placement, hot_experts, square_root_router, zero_memory


def count_of(layer: Any) -> int:
    """Zero-computation experts of a layer of experts."""
    return getattr(layer, "zero_experts", 0)


def is_layer_ours(layer: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether a layer of experts is computed by our code in eager mode too."""
    is_asked = zero_memory.is_asked(layer) or deepspeed_moe.is_layer_ours(layer)
    is_asked = is_asked or hot_experts.count_of(layer) > 0 or expert_placement.is_asked(layer)
    return count_of(layer) > 0 or is_asked or square_root_router.has_table(layer)


def split(layer: Any, tokens: Tensor, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(what the zero experts make of the tokens, weights and map of the others).

    Args:
        layer: of experts, with zero experts.
        tokens: [tokens, hidden].
        probs, routing_map: [tokens, experts and zero experts].
    """
    others = probs.shape[1] - count_of(layer)
    returned = tokens * probs[:, others:].sum(1, keepdim=True).to(tokens.dtype)
    return returned, probs[:, :others], routing_map[:, :others]


def add_zero_experts(model: Any, args: Namespace) -> None:
    """Give every layer of experts of a GPTModel, or of a stage of one, what ``args`` ask for."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    has_bias = bool(getattr(args, "softmax_has_expert_bias", False))
    model.config.moe_router_enable_expert_bias = has_bias  # Megatron moves a bias of softmax scores, and refuses one
    for layer in (m for m in model.modules() if isinstance(m, MoELayer)):
        layer.zero_experts = args.num_zero_experts or 0
        _widen(layer.router, layer.zero_experts)
        if has_bias:
            _add_bias(layer.router)
        layer.router.routing = functools.partial(route, layer.router)


def _widen(router: Any, more: int) -> None:
    """More rows in the weights of a router, drawn as the others."""
    router.config = copy.copy(router.config)
    router.config.num_moe_experts += more
    router.num_experts = router.config.num_moe_experts
    shape = (router.num_experts, router.config.hidden_size)
    router.weight = nn.Parameter(router.weight.new_empty(shape, dtype=torch.float32))
    router.reset_parameters()


def _add_bias(router: Any) -> None:
    for name, is_kept in (("local_tokens_per_expert", False), ("expert_bias", True)):
        zeros = torch.zeros(router.num_experts, dtype=torch.float32, device=torch.cuda.current_device())
        delattr(router, name)
        router.register_buffer(name, zeros, persistent=is_kept)
    router.enable_expert_bias = True


def route(router: Any, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``TopKRouter.routing``.

    Args:
        router: a TopKRouter.
        logits: [seq, batch, experts and zero experts].
        padding_mask: must be None.

    Returns:
        Weights [tokens, experts and zero experts], and bool where a token goes.

    Raises:
        NotImplementedError: there is padding.
    """
    if padding_mask is not None:
        raise NotImplementedError("--num-zero-experts: this router has no mask of padding")
    logits = router.apply_z_loss(logits.view(-1, logits.shape[-1]))
    scores = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)).to(logits.dtype)
    wanted = scores if router.expert_bias is None else scores + router.expert_bias
    chosen = wanted.topk(router.topk, dim=1).indices
    weights = scores.gather(1, chosen)
    weights = weights * (router.config.moe_router_topk_scaling_factor or 1.0)
    routing_map = torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)
    router._apply_expert_bias(routing_map)
    return torch.zeros_like(scores).scatter(1, chosen, weights), routing_map
