"""Mixture of experts in a captured graph: routing, permutation and auxiliary losses with shapes known before the run.

Where every expert is on this rank, tokens need no dispatch between ranks, and both of Megatron's dispatchers come to
the
same: sort the tokens by expert, run the experts, add the results up. The number of sorted rows is tokens times top-k
(or experts times capacity), so that nothing has to be counted on the host.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_fx.megatron import (
    adaptive_memory,
    checkpoint,
    collectives,
    dispatch,
    expert_placement,
    experts,
    hot_experts,
    patches,
    pipe_experts,
    square_root_router,
    zero_experts,
    zero_memory,
)

LAYER = "transformer.moe.moe_layer:MoELayer.forward"
DISPATCHER = "transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher"


def layer_forward(
    self: Any, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Tensor | None = None
) -> tuple[Tensor, None]:
    """``MoELayer.forward`` of hidden states [seq, batch, hidden] where all experts are here; Megatron's elsewhere.

    Args:
        padding_mask: bool [batch, seq]; for a router with a table of experts the tokens.
    """
    has_table = square_root_router.has_table(self)
    if intermediate_tensors is not None or not zero_memory.is_of_our_parts(self):
        if has_table:
            raise ValueError(
                "--n-hash-layers: experts are Megatron's SequentialMLP there, in the type of the model; remove "
                "--moe-latent-size, --moe-router-padding-for-quantization, --fp8-format, --fp4-format"
            )
        return patches.original(LAYER)(self, hidden_states, intermediate_tensors, padding_mask)
    if padding_mask is not None:
        padding_mask = padding_mask.transpose(0, 1)
        padding_mask = padding_mask if has_table else padding_mask.bool()
    if self.moe_layer_recompute and self.training:
        return checkpoint.checkpoint(_forward, False, self, hidden_states, padding_mask), None
    return _forward(self, hidden_states, padding_mask), None


def _forward(self: Any, hidden_states: Tensor, padding_mask: Tensor | None) -> Tensor:
    config = self.config
    zero_memory.await_parameters(self.experts)
    shared = zero_memory.whole(self, _shared, self, hidden_states)
    probs, routing_map = self.route(hidden_states, padding_mask)
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    is_padded = padding_mask is not None and not square_root_router.has_table(self)
    dropless = config.moe_expert_capacity_factor is None and not is_padded
    returned = None
    if zero_experts.count_of(self):  # some of a token's experts are none of those that compute
        returned, probs, routing_map = zero_experts.split(self, tokens, probs, routing_map)
        dropless = False
    if expert_placement.is_asked(self):
        probs, routing_map = expert_placement.by_slot(self, probs, routing_map)
    if pipe_experts.is_ours(self):
        summed = pipe_experts.routed(self, tokens, routing_map, probs)
    elif hot_experts.count_of(self):
        summed = hot_experts.routed(self, tokens, routing_map, probs)
    elif dispatch.is_needed(self):
        summed = dispatch.routed(self, tokens, routing_map, probs, dropless)
    else:
        routing_map = adaptive_memory.choose(self, routing_map)
        summed = (_dropless if dropless else _with_capacity)(self, tokens, routing_map, probs)
    summed = (summed if returned is None else summed + returned).view(hidden_states.shape)
    return summed if shared is None else summed + shared


def _shared(self: Any, x: Tensor) -> Tensor | None:
    """What the shared experts make of hidden states; the compiler decides what runs beside it, whatever Megatron would
    lay on a stream of its own.
    """
    overlap, level = self.shared_expert_overlap, zero_memory.level_of(self)
    if not self.use_shared_expert or not overlap and level != zero_memory.LEVEL0:
        return self.shared_experts_compute(x)
    shared, parallel = self.shared_experts, self.config.sequence_parallel
    if not overlap:
        return _gated(shared, x, _shared_products(self, x))
    # the linears do not communicate
    enter = collectives.gather_from_sequence_parallel_region
    leave = collectives.reduce_scatter_to_sequence_parallel_region
    if not parallel:
        enter = collectives.copy_to_tensor_model_parallel_region
        leave = collectives.reduce_from_tensor_model_parallel_region
    return _gated(shared, x, leave(_shared_products(self, enter(x))))


def _shared_products(self: Any, x: Tensor) -> Tensor:
    from megatron.core.transformer.mlp import MLP

    shared = self.shared_experts
    if zero_memory.level_of(self) != zero_memory.LEVEL0:
        return MLP.forward(shared, x)[0]
    inner, _ = shared.linear_fc1(x)  # Megatron's shared experts have no bias
    hidden, discard = zero_memory.made_again(self, functools.partial(experts.activation, config=self.config), inner)
    output, _ = shared.linear_fc2(hidden)
    discard(output)
    return output


def _gated(shared: Any, x: Tensor, output: Tensor) -> Tensor:
    return output * torch.sigmoid(F.linear(x, shared.gate_weight)) if shared.use_shared_expert_gate else output


def _dropless(self: Any, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> Tensor:
    """Every token has its top-k experts, and torch_npu an operator for just that."""
    k = self.config.moe_router_topk

    def enter(tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.ops.mindspeed.moe_permute_map(tokens, routing_map, probs, k)

    output, places = experts.run(self, enter, routing_map.sum(0), tokens, probs)
    return torch.ops.mindspeed.moe_unpermute(output, places, None, k)


def _with_capacity(self: Any, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> Tensor:
    """A token has top-k experts at most: how many is known when the program runs."""
    capacity = dispatch.capacity(self, routing_map)
    if capacity is not None:
        rows = capacity * routing_map.shape[1]
    elif torch.compiler.is_compiling():  # the grouped product leaves rows behind the last expert's alone
        rows = tokens.shape[0] * self.config.moe_router_topk
    else:
        rows = int(routing_map.sum())

    def enter(tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        token_of_row, share = dispatch.sort_by_expert(routing_map, probs, rows)
        return tokens.index_select(0, token_of_row), share, token_of_row

    output, token_of_row = experts.run(self, enter, routing_map.sum(0), tokens, probs)
    return torch.zeros_like(tokens).index_add(0, token_of_row, output)


def gating(self: Any, input: Tensor) -> Tensor:
    """``Router.gating`` without moving the weights to CUDA."""
    from megatron.core.transformer.moe.moe_utils import router_gating_linear

    dtype = {"fp32": torch.float32, "fp64": torch.float64}.get(self.config.moe_router_dtype, input.dtype)
    return router_gating_linear(input, self.weight, self.bias, dtype)


def convert_router(self: Any, fn: Any, recurse: bool = True) -> Any:
    """``torch.nn.Module._apply`` of a router, whose biases of experts stay float32: Megatron's own turn them back at
    their first call, which changes a tensor's type.
    """
    result = torch.nn.Module._apply(self, fn, recurse)
    self._maintain_float32_expert_bias()
    return result


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


def apply_input_jitter(self: Any, input: Tensor) -> Tensor:
    """``TopKRouter.apply_input_jitter``, whose distribution Megatron makes in the first call and keeps."""
    eps = self.config.moe_input_jitter_eps
    if eps is None:
        return input
    low, high = (input.new_full((), 1.0 + sign * eps) for sign in (-1, 1))
    noise = input.detach().clone().uniform_()  # of what was computed: draws of a graph stay in this order
    return input * (low + noise * (high - low))
