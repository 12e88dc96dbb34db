"""Mixture of experts in a captured graph: routing, permutation and auxiliary losses with shapes known before the run.

Where every expert is on this rank, tokens need no dispatch between ranks, and both of Megatron's dispatchers come to
the
same: sort the tokens by expert, run the experts, add the results up. The number of sorted rows is tokens times top-k
(or experts times capacity), so that nothing has to be counted on the host.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_fx.megatron import groups, patches

LAYER = "transformer.moe.moe_layer:MoELayer.forward"
DISPATCHER = "transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher"


def layer_forward(
    self: Any, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Tensor | None = None
) -> tuple[Tensor, None]:
    """``MoELayer.forward`` of hidden states [seq, batch, hidden] where all experts are here; Megatron's elsewhere."""
    from megatron.core.transformer.moe.experts import SequentialMLP

    config = self.config
    elsewhere = groups.size(self.ep_group) * groups.size(self.token_dispatcher.tp_group) > 1
    special = (
        config.moe_latent_size
        or config.moe_router_padding_for_quantization
        or self.shared_expert_overlap
        or self.moe_layer_recompute
    )
    if (
        elsewhere
        or special
        or intermediate_tensors is not None
        or type(self.experts) is not SequentialMLP
        or config.add_bias_linear
    ):
        return patches.original(LAYER)(self, hidden_states, intermediate_tensors, padding_mask)
    if padding_mask is not None:
        padding_mask = padding_mask.transpose(0, 1).bool()
    shared = self.shared_experts_compute(hidden_states)
    probs, routing_map = self.route(hidden_states, padding_mask)
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    summed = (_dropless if config.moe_expert_capacity_factor is None and padding_mask is None else _with_capacity)(
        self, tokens, routing_map, probs
    ).view(hidden_states.shape)
    return summed if shared is None else summed + shared, None


def _dropless(self: Any, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> Tensor:
    """Every token has its top-k experts, and torch_npu an operator for just that."""
    k = self.config.moe_router_topk
    permuted, share, places = torch.ops.mindspeed.moe_permute_map(tokens, routing_map, probs, k)
    output, _ = self.experts(permuted, routing_map.sum(0), share)
    return torch.ops.mindspeed.moe_unpermute(output, places, None, k)


def _with_capacity(self: Any, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> Tensor:
    """A token has top-k experts at most: how many is known when the program runs."""
    token_of_row, share = sort_by_expert(routing_map, probs, _rows(routing_map, self.config))
    output, _ = self.experts(tokens.index_select(0, token_of_row), routing_map.sum(0), share)
    return torch.zeros_like(tokens).index_add(0, token_of_row, output)


def _rows(routing_map: Tensor, config: Any) -> int:
    """How many (token, expert) pairs there are at most."""
    from megatron.core.transformer.moe.moe_utils import get_capacity

    tokens, experts = routing_map.shape
    if config.moe_pad_expert_input_to_capacity:
        return experts * min(
            tokens, get_capacity(tokens * config.moe_router_topk, experts, config.moe_expert_capacity_factor)
        )
    return tokens * config.moe_router_topk


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


def gating(self: Any, input: Tensor) -> Tensor:
    """``Router.gating`` without moving the weights to CUDA."""
    from megatron.core.transformer.moe.moe_utils import router_gating_linear

    dtype = {"fp32": torch.float32, "fp64": torch.float64}.get(self.config.moe_router_dtype, input.dtype)
    return router_gating_linear(input, self.weight, self.bias, dtype)


def router_gating_linear(inp: Tensor, weight: Tensor, bias: Tensor | None, router_dtype: torch.dtype) -> Tensor:
    """Router logits in ``router_dtype``."""
    return F.linear(inp.to(router_dtype), weight.to(router_dtype), None if bias is None else bias.to(router_dtype))


def to_host(self: Any, point: str, tokens_per_expert: Tensor | None = None) -> Tensor | None:
    """``MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize`` on a CPU: counts are on the host already; what sizes a
    collective becomes a list.
    """
    if not self.drop_and_pad and point == self.cuda_dtoh_point:
        for name in ("input_splits", "output_splits"):
            if isinstance(getattr(self, name), Tensor):
                setattr(self, name, getattr(self, name).tolist())
    return tokens_per_expert


@torch.library.custom_op("mindspeed::aux_loss_gradient", mutates_args=())
def aux_loss_gradient(grad: Tensor, aux_loss: Tensor) -> Tensor:
    """Megatron's scale of the auxiliary loss, which it sets between forward and backward; ``grad`` only says when."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    scale = MoEAuxLossAutoScaler.main_loss_backward_scale
    return torch.ones_like(aux_loss) if scale is None else torch.ones_like(aux_loss) * scale


@aux_loss_gradient.register_fake
def _(grad: Tensor, aux_loss: Tensor) -> Tensor:
    return torch.empty_like(aux_loss)


def attached_backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
    """``MoEAuxLossAutoScaler.backward``."""
    (aux_loss,) = ctx.saved_tensors
    return grad_output, aux_loss_gradient(grad_output, aux_loss)
