"""CPU kernels of torch_npu's permutation of tokens by a routing map. Source: its documentation; the gradient is that of
the formula.

It stands in lowered graphs alone, so that the gradient that torch_npu has for it is not needed here (and torch.library
takes none for a tensor that is given by name).
"""

from __future__ import annotations

import torch

from mindspeed_fx.kernels.npu.emulation.registry import emulation


def _fake(tokens, routing_map, *, probs=None, num_out_tokens=None, drop_and_pad=False):
    rows = (
        (tokens.shape[0] if num_out_tokens is None else num_out_tokens) // routing_map.shape[0] * routing_map.shape[0]
    )
    return (
        tokens.new_empty(rows, tokens.shape[1]),
        None if probs is None else probs.new_empty(rows),
        tokens.new_empty(rows, dtype=torch.int32),
    )


def _pairs(routing_map):
    """(token, expert) of every pair that is marked, expert by expert."""
    expert, token = routing_map.t().nonzero(as_tuple=True)
    return token, expert


@emulation("npu_moe_token_permute_with_routing_map", _fake)
def npu_moe_token_permute_with_routing_map(tokens, routing_map, *, probs=None, num_out_tokens=None, drop_and_pad=False):
    """(permuted, probabilities or nothing, sorted_indices int32): permuted[sorted_indices[i]] = tokens[i // k], k marks
    in every row of the map.
    """
    k = (num_out_tokens or tokens.shape[0]) // max(1, tokens.shape[0])
    marked = routing_map.bool()
    assert not drop_and_pad and (marked.sum(1) == k).all(), (
        "npu_moe_token_permute_with_routing_map: as many experts for every token as num_out_tokens says"
    )
    token, expert = _pairs(marked)
    share = None if probs is None else probs[token, expert]
    return tokens[token], share, torch.argsort(token, stable=True).to(torch.int32)


def _fake_grad(permuted_token_out_grad, probs_grad, sorted_indices, routing_map, experts_num, tokens_num, drop_and_pad):
    result = permuted_token_out_grad.new_empty(tokens_num, permuted_token_out_grad.shape[1])
    return result, None if probs_grad is None else probs_grad.new_empty(tokens_num, experts_num)


@emulation("npu_moe_token_permute_with_routing_map_grad", _fake_grad)
def npu_moe_token_permute_with_routing_map_grad(
    permuted_token_out_grad, probs_grad, sorted_indices, routing_map, experts_num, tokens_num, drop_and_pad
):
    """(gradient of the tokens, the sum over their copies; that of the probabilities [tokens, experts], zero where
    nothing is marked).
    """
    k = sorted_indices.shape[0] // max(1, tokens_num)
    copies = permuted_token_out_grad.float()[sorted_indices.long()].view(
        tokens_num, k, permuted_token_out_grad.shape[1]
    )
    dprobs = None
    if probs_grad is not None:
        dprobs = probs_grad.new_zeros(tokens_num, experts_num)
        dprobs[_pairs(routing_map.bool())] = probs_grad
    return copies.sum(1).to(permuted_token_out_grad.dtype), dprobs
