"""DeepSeek-V4's attention: one head of keys, which are the values too (DeepSeek-V4, section 2.3).

With c = norm(W_c x), heads q = rope(norm(W_q c)) and one key v = rope(norm(W_v x)) of each token, a token sees those of
its window and, where the layer pools tokens, entries of pools that end up to it: all, or those that its indexer
chooses. Each head has a learnt score s besides, which no value belongs to:

    o = rope^-1(sum over seen t of exp(q v_t / sqrt(width)) v_t / (exp(s) + sum of exp(q v_t / sqrt(width)))),

back by the position of the query. Heads in groups: y = W_o [A_1 o_1, A_2 o_2, ...].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mindspeed_fx.megatron import collectives
from mindspeed_fx.megatron.deepseek4 import rotation
from mindspeed_fx.megatron.deepseek4.compressor import Compressor
from mindspeed_fx.megatron.deepseek4.indexer import Indexer, loss_of
from mindspeed_fx.megatron.deepseek4.parts import linear, norm, plain_rms_norm, wide
from mindspeed_fx.megatron.deepseek4.sequence import Ranks
from mindspeed_fx.megatron.deepseek4.settings import CHOSEN, Settings
from mindspeed_fx.megatron.groups import size
from mindspeed_fx.megatron.sparse_attention import attach_loss


class Attention(nn.Module):
    """Of one layer, in place of Megatron's latent attention; parts by MindSpeed-LLM's names.

    Args:
        config: an MLATransformerConfig.
        layer_number: from one; layers of multi-token prediction are behind the last.
        settings: of the layers.
        pg_collection: Megatron's groups.
        others: what Megatron's latent attention is told besides, of no matter here.
    """

    def __init__(
        self, config: Any, layer_number: int, settings: Settings, pg_collection: Any = None, **others: Any
    ) -> None:
        super().__init__()
        self.config, self.layer_number, self.settings = config, layer_number, settings
        self.tp_group, context = pg_collection.tp, getattr(pg_collection, "cp", None)
        self.ranks = Ranks(self.tp_group if config.sequence_parallel else None, context)
        self.width, self.ratio = config.qk_head_dim, settings.ratio_of(layer_number)
        self.heads, self.groups = _divide(config, settings, size(self.tp_group))
        self.frequency = rotation.frequencies(settings, config.qk_pos_emb_head_dim, self.ratio > 1)
        self._build_projections()
        self.attn_sink = nn.Parameter(
            torch.zeros(self.heads, device=torch.cuda.current_device(), dtype=config.params_dtype)
        )
        for name, value in dict(tensor_model_parallel=True, partition_dim=0, partition_stride=1).items():
            setattr(self.attn_sink, name, value)
        self.compressor = self.indexer = None
        if self.ratio > 1:
            self.compressor = Compressor(config, self.ratio, self.width, self.frequency, self.ranks, is_local=True)
        if self.ratio == CHOSEN:
            self.indexer = Indexer(config, settings, self.frequency, context)

    def _build_projections(self) -> None:
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

        config, settings, heads = self.config, self.settings, self.config.num_attention_heads
        common = dict(config=config, bias=False, skip_bias_add=False, is_expert=False, tp_group=self.tp_group)
        columns = dict(common, init_method=config.init_method, gather_output=False)
        self.linear_q = linear(config, config.hidden_size, config.q_lora_rank, is_local=True)
        self.linear_kv = linear(config, config.hidden_size, self.width, is_local=True)
        self.q_layernorm = norm(config, config.q_lora_rank, is_local=True)
        self.kv_layernorm = norm(config, self.width, is_local=True)
        self.linear_q_up_proj = ColumnParallelLinear(config.q_lora_rank, heads * self.width, **columns)
        inputs, outputs = heads * self.width // settings.output_groups, settings.output_groups * settings.output_rank
        self.linear_o_down_proj = ColumnParallelLinear(inputs, outputs, **columns)
        self.linear_o_up_proj = RowParallelLinear(
            outputs, config.hidden_size, init_method=config.output_layer_init_method, input_is_parallel=True, **common
        )

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, **others: Any) -> tuple[Tensor, Tensor | None]:
        """(output, bias) of hidden states [rows / tensor-parallel ranks, batch, hidden]; the mask is not read."""
        latent = self.q_layernorm(self.linear_q(hidden_states))
        q = self.linear_q_up_proj(latent)[0]
        q = plain_rms_norm(q.view(*q.shape[:2], self.heads, self.width), self.config.layernorm_epsilon)
        positions = self.ranks.positions(q.shape[0], q.device)
        angle = rotation.angles(positions, self.frequency)
        q = rotation.rotate(q, angle)
        keys = self.ranks.gather(self.kv_layernorm(self.linear_kv(hidden_states)))
        places = torch.arange(keys.shape[0], device=q.device)
        keys = rotation.rotate(keys, rotation.angles(places, self.frequency))
        behind = positions.unsqueeze(1) - places
        seen, loss = ((behind >= 0) & (behind < self.settings.window)).expand(q.shape[1], -1, -1), None
        if self.compressor is not None and (entries := self.compressor(hidden_states)).shape[0]:
            chosen, loss = self._choose(hidden_states, latent, positions, q, entries)
            keys, seen = torch.cat([keys, entries]), torch.cat([seen, chosen], -1)
        out = self._attend(q, keys, seen)
        if loss is not None:
            out = attach_loss(out, loss, self.layer_number - 1, self.config, size(self.ranks.context))
        out = rotation.rotate(out, angle, is_back=True)
        return self.linear_o_up_proj(self._down(out))

    def _choose(
        self, x: Tensor, latent: Tensor, positions: Tensor, q: Tensor, entries: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """(bool [batch, rows, entries] where an entry is seen, the indexer's loss if there is one)."""
        ends = (torch.arange(entries.shape[0], device=q.device) + 1) * self.ratio
        is_over = ends <= positions.unsqueeze(1) + 1
        if self.indexer is None:
            return is_over.expand(q.shape[1], -1, -1), None
        scores = self.indexer(self.ranks.own(x.detach()), self.ranks.own(latent.detach()), positions)
        chosen = self.indexer.choose(scores, is_over)
        if not (self.training and torch.is_grad_enabled()) or not self.settings.loss_coefficient:
            return chosen, None
        target = self._target(q.detach(), entries.detach(), chosen)
        return chosen, loss_of(scores, target, chosen) * self.settings.loss_coefficient

    def _target(self, q: Tensor, entries: Tensor, chosen: Tensor) -> Tensor:
        """How all heads attend to the chosen entries alone: [batch, rows, entries], adding up to 1, or to 0."""
        with torch.no_grad():
            scores = torch.einsum("sbhd,tbd->bhst", wide(q), wide(entries)) * self.width**-0.5
            scores = scores.masked_fill(~chosen.unsqueeze(1), torch.finfo(scores.dtype).min)
            heads = (scores.softmax(-1) * chosen.unsqueeze(1)).sum(1)
            if size(self.tp_group) > 1:
                heads = collectives.all_reduce(heads, self.tp_group)
            return functional.normalize(heads, p=1.0, dim=-1)

    def _attend(self, q: Tensor, keys: Tensor, seen: Tensor) -> Tensor:
        """[rows, batch, heads, width] of q, keys [positions and entries, batch, width] and seen [batch, rows, ...]."""
        q, keys = q.permute(1, 2, 0, 3), keys.transpose(0, 1).unsqueeze(1)
        scores = torch.matmul(q, keys.transpose(-1, -2)) * self.width**-0.5
        scores = scores.masked_fill(~seen.unsqueeze(1), float("-inf"))
        sinks = self.attn_sink.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = wide(torch.cat([scores, sinks], -1)).softmax(-1)[..., :-1].to(q.dtype)
        return torch.matmul(weights, keys).permute(2, 0, 1, 3)

    def _down(self, out: Tensor) -> Tensor:
        """[rows, batch, groups * rank] of out [rows, batch, heads, width]."""
        grouped = out.reshape(*out.shape[:2], self.groups, -1)
        weight = self.linear_o_down_proj.weight.view(self.groups, self.settings.output_rank, -1)
        return torch.einsum("sbgd,gld->sbgl", grouped, weight).flatten(2)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> dict:
        """For Megatron's dist_checkpointing: the sinks are divided over tensor-parallel ranks."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default

        state = {"attn_sink": self.attn_sink}
        axes = {"attn_sink": 0}
        result = make_sharded_tensors_for_checkpoint(
            state, prefix, axes, sharded_offsets, tp_group=self.tp_group, dp_cp_group=metadata["dp_cp_group"]
        )
        for name, module in self.named_children():
            result |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
            )
        return result


def _divide(config: Any, settings: Settings, ranks: int) -> tuple[int, int]:
    """(heads, groups of heads) of a tensor-parallel rank.

    Raises:
        ValueError: they do not divide.
    """
    heads, groups = config.num_attention_heads, settings.output_groups
    if heads % groups or groups % ranks:
        valid = [n for n in range(ranks, heads + 1, ranks) if heads % n == 0]
        raise ValueError(
            f"--o-groups {groups}: {heads} heads (--num-attention-heads) do not divide by the groups, or these by "
            f"{ranks} tensor-parallel ranks; valid: {valid}"
        )
    return heads // ranks, groups // ranks
