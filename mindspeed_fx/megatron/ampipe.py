"""``--ampipe-degree``: a layer of attention and experts in parts of the sequence, so that tokens of a part are
exchanged while the attention of the next one is computed (MindSpeed's Ampipe).

With a the attention of a part to all keys before its end, its projection, residual, norm and gate, x the exchange of
its tokens, p its experts and b the exchange back:

    a0 x0 a1 x1 .. p0 b0 p1 b1 ..                                starts; a wait stands before the first use

Rows of attention do not know of each other, so that values are those of the whole. With tensor and sequence parallelism
a part of the gathered sequence is that part of every rank's, and the projection's sum leaves each rank its own.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from mindspeed_fx.megatron import deepspeed_moe, documents, groups, pipe_experts


def divide_layers(model: Any, gate: deepspeed_moe.Gate) -> None:
    """Have the layers of a GPTModel, or of a stage of one, compute attention and experts in the gate's parts."""
    if gate.parts == 1 or gate.factor is None:
        return
    of_part = dataclasses.replace(gate, parts=1, share=1 / gate.parts)
    for layer in model.decoder.layers:
        if deepspeed_moe.is_layer_ours(layer.mlp) and _is_divisible(layer):
            layer.route_of_part = functools.partial(deepspeed_moe.route, layer.mlp.router, of_part)
            layer.forward = functools.partial(forward, layer)


def _is_divisible(layer: Any) -> bool:
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.transformer_layer import TransformerLayer

    config, attention = layer.config, layer.self_attention
    if type(layer) not in (TransformerLayer, *TransformerLayer.__subclasses__()) or "forward" in vars(layer):
        return False
    plain = type(attention) is SelfAttention and type(attention.core_attention) is DotProductAttention
    alone = config.context_parallel_size == 1 and isinstance(layer.cross_attention, IdentityOp)
    kept = not (layer.recompute_input_layernorm or layer.recompute_pre_mlp_layernorm or layer.recompute_mlp)
    special = config.window_size or config.attention_output_gate or config.fused_single_qkv_rope or config.no_rope_freq
    special = special or config.moe_router_force_load_balancing or config.masked_softmax_fusion
    kept = kept and not attention.checkpoint_core_attention and not layer.mlp.moe_layer_recompute
    return plain and alone and kept and not special and pipe_experts.is_ours(layer.mlp)


def forward(
    layer: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    context: Tensor | None = None,
    context_mask: Tensor | None = None,
    rotary_pos_emb: Any = None,
    **more: Any,
) -> tuple[Tensor, Tensor | None]:
    """``TransformerLayer.forward`` of hidden states [seq, batch, hidden], in parts where nothing but these arguments is
    given."""
    more.pop("dynamic_inference_decode_only", None)
    if any(value is not None for value in more.values()):
        first = (hidden_states, attention_mask, context, context_mask, rotary_pos_emb)
        return type(layer).forward(layer, *first, **more)
    moe = layer.mlp
    parts, ranks = moe.pieces.parts, groups.size(layer.self_attention.tp_group)
    query, key, value = _projections(layer, hidden_states, rotary_pos_emb)
    seq = key.shape[0]
    attention_mask = documents.seen(attention_mask, seq)
    own = torch.arange(seq, device=key.device).view(ranks, parts, -1)
    queries = query.view(ranks, parts, -1, *query.shape[1:])
    pipe, residuals = pipe_experts.Pipe(moe), []
    for part, residual in enumerate(hidden_states.chunk(parts)):
        end = seq if ranks > 1 or attention_mask is not None else (part + 1) * seq // parts
        mask = _mask(attention_mask, own[:, part].flatten(), end)
        rows = queries[:, part].flatten(0, 1)
        attended = _attend(layer.self_attention, rows, key[:end], value[:end], mask)
        residuals.append(_add(layer, attended, residual))
        normed = layer.pre_mlp_layernorm(residuals[-1])
        probs, routing_map = _route(layer, normed)
        pipe.send(normed.flatten(0, 1), routing_map, probs)
    hidden = torch.cat(residuals)
    return layer._forward_post_mlp((torch.cat(pipe.results()).view_as(hidden), None), hidden), context


def _projections(layer: Any, hidden_states: Tensor, rotary_pos_emb: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [seq, batch, heads, width] of the whole sequence."""
    from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb

    attention = layer.self_attention
    query, key, value = attention.get_query_key_value_tensors(layer.input_layernorm(hidden_states))
    if rotary_pos_emb is not None:
        pair = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb,) * 2
        rotate = functools.partial(apply_rotary_pos_emb, config=attention.config, cp_group=attention.pg_collection.cp)
        query, key = rotate(query, pair[0]), rotate(key, pair[1])
    return query, key, value


def _mask(whole: Tensor | None, rows: Tensor, end: int) -> Tensor:
    """bool [1 or batch, 1, rows, end], True where a row does not see a key.

    Args:
        whole: as attention takes it, [1 or batch, 1, seq, seq]; None: rows see keys up to their own.
    """
    if whole is not None:
        return whole.index_select(2, rows)
    return (rows.unsqueeze(1) < torch.arange(end, device=rows.device))[None, None]


def _attend(attention: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Any:
    from megatron.core.transformer.enums import AttnMaskType

    core = attention.core_attention
    out = core(query, key, value, mask, attn_mask_type=AttnMaskType.arbitrary)
    return attention.linear_proj(out)


def _add(layer: Any, attended: Any, residual: Tensor) -> Tensor:
    with layer.bias_dropout_add_exec_handler():
        add = layer.self_attn_bda(layer.training, layer.config.bias_dropout_fusion)
        return add(attended, residual, layer.hidden_dropout)


def _route(layer: Any, normed: Tensor) -> tuple[Tensor, Tensor]:
    """The gate's choice for a part [seq, batch, hidden], as the router's forward has it for the whole."""
    router = layer.mlp.router
    for hook in router._forward_pre_hooks.values():
        hook(router, (normed,))
    return layer.route_of_part(router.gating(router.apply_input_jitter(normed)))
