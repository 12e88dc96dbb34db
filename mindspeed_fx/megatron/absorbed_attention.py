"""Latent attention in its absorbed form: up-projections of keys and values move to queries and to results.

With c_t the latent of a token, W_k and W_v the up-projections of a head, and r the rotated parts,

    q k_t = q_n (W_k c_t) + q_r r_t = (W_k^T q_n) c_t + q_r r_t,    sum of p_t (W_v c_t) = W_v (sum of p_t c_t),

so that all heads share one key, the latent and the rotated part, and one value, the latent. The same values; nothing of
keys times heads is made, which is what attention to few chosen keys is to gather. Products of a score are wider (the
latent's width and not a head's), so that attention to all keys has more work, done where it is asked for without an
indexer. Source: DeepSeek-AI 2024, DeepSeek-V2, section 2.1.2; MindSpeed's --enable-mla-absorb.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import Tensor

from mindspeed_fx.megatron import collectives
from mindspeed_fx.megatron.groups import size


class NotMultiplied:
    """The up-projection of keys and values, whose products nobody reads: its weight is taken, its result is zero."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        ranks = size(self.tp_group) if self.sequence_parallel else 1  # type: ignore[attr-defined]
        rows = self.weight.shape[0]  # type: ignore[attr-defined]
        return x.new_zeros(()).expand(x.shape[0] * ranks, *x.shape[1:-1], rows), None


def absorb(attention: Any) -> None:
    """Have an MLASelfAttention hand its core attention queries [seq, batch, heads, latent + rotated], keys [seq, batch,
    1, latent + rotated] and the latent as values [seq, batch, 1, latent].
    """
    linear = attention.linear_kv_up_proj
    linear.__class__ = type(f"NotMultiplied{type(linear).__name__}", (NotMultiplied, type(linear)), {})
    attention.get_query_key_value_tensors = types.MethodType(_tensors, attention)


def absorb_all(model: Any) -> None:
    """Absorb the up-projections of every latent attention of a GPTModel, whose core is Megatron's."""
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    for attention in [m for m in model.modules() if isinstance(m, MLASelfAttention)]:
        absorb(attention)
        core, heads = attention.core_attention, attention.num_attention_heads_per_partition
        core.num_query_groups_per_partition = 1
        core.hidden_size_per_partition = heads * attention.config.kv_lora_rank
        core.register_forward_hook(functools.partial(_multiply, (attention,)))


def _multiply(held: tuple[Any], core: Any, args: tuple[Any, ...], out: Tensor) -> Tensor:
    """What core attention makes of latents, times the up-projections of the values.

    Args:
        held: the latent attention, in a tuple, so that it is not a part of its core too.
    """
    (attention,) = held
    return values_of(attention, out.unflatten(-1, (attention.num_attention_heads_per_partition, -1)))


def _tensors(self: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    query, key, _, q_latent, latent = type(self).get_query_key_value_tensors(self, *args, **kwargs)
    width = self.config.qk_head_dim
    if self.linear_kv_up_proj.sequence_parallel:
        whole = collectives.gather_from_sequence_parallel_region(latent, group=self.tp_group)
    else:
        whole = collectives.copy_to_tensor_model_parallel_region(latent, group=self.tp_group)
    of_keys, _ = weights_of(self)
    query = torch.cat([torch.einsum("sbhd,hdc->sbhc", query[..., :width], of_keys), query[..., width:]], -1)
    value = whole.unsqueeze(2)
    return query, torch.cat([value, key[:, :, :1, width:]], -1), value, q_latent, latent


def weights_of(attention: Any) -> tuple[Tensor, Tensor]:
    """Up-projections of the keys [heads, width, latent] and of the values [heads, v_width, latent] of this rank."""
    config, weight = attention.config, attention.linear_kv_up_proj.weight
    both = weight.view(attention.num_attention_heads_per_partition, -1, weight.shape[1])
    return both.split([config.qk_head_dim, config.v_head_dim], 1)


def values_of(attention: Any, out: Tensor) -> Tensor:
    """What attention makes of latents [seq, batch, heads, latent], as [seq, batch, heads * v_width]."""
    return torch.einsum("sbhc,hdc->sbhd", out, weights_of(attention)[1]).flatten(2)
