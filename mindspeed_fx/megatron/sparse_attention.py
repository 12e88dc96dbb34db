"""DeepSeek-V3.2's sparse attention in Megatron's latent attention (``--enable-dsa-indexer``; DeepSeek-AI 2025, section
2.1, as MindSpeed-LLM's dsa_indexer.py has it).

An indexer scores all earlier tokens t for a token s, and attention sees the ``topk`` best of them. With x the layer's
normed input and c the normed latent of its queries, neither of which gets a gradient from here,

    q = rope(W_q c) of every head,  k = rope(LayerNorm(W_k x)),  w = W_w x / sqrt(heads width),
    score_st = sum over heads of w_sh relu(q_sh k_t),

where the first channels of q and k are rotated. It learns from a loss of its own, the mean over s of

    KL(a || softmax(score)) over the chosen t,  a_t = attention to t, added up over heads, over its sum.

The Hadamard rotation that MindSpeed-LLM puts before quantization is orthogonal: scores are the same without it.

By default choice and attention are a mask over all keys. With MindSpeed's flags for its fused operators they are
operators, by which no tensor of tokens times tokens is made and attention reads the chosen keys alone
(``mindspeed::lightning_indexer``, ``mindspeed::sparse_attention``); its keys are then the latent of all heads
(:mod:`absorbed_attention`) where that is asked for too.
"""

from __future__ import annotations

import copy
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mindspeed_fx.megatron import absorbed_attention, collectives, index_sharing
from mindspeed_fx.megatron.groups import current_device, size

EPSILON = 1e-8
"""Added to both distributions of the loss."""
NORM_EPSILON = 1e-6
"""Of the norm of keys."""


@dataclass(frozen=True)
class Settings:
    """Of an indexer.

    Args:
        heads: of its queries.
        width: of a head.
        topk: tokens that a token sees at most.
        pairs_neighbours: whether channels 2i and 2i+1 are rotated together; else i and i + half.
        loss_coefficient: of its loss.
        by_operators: attention reads the chosen keys alone.
        absorbed: all heads share one key, the latent; by operators alone.
    """

    heads: int
    width: int
    topk: int
    pairs_neighbours: bool
    loss_coefficient: float
    by_operators: bool = False
    absorbed: bool = False


BY_OPERATORS = (
    "use_fused_lightning_indexer",
    "use_fused_lightning_indexer_loss",
    "use_fused_lightning_indexer_kl_loss",
    "use_sparse_flash_attn",
    "use_fused_sparse_flash_attention",
)
ABSORBED = ("enable_mla_absorb", "use_dsa_absorb")
"""Arguments of MindSpeed's flags."""


def settings_of(args: Namespace) -> Settings:
    """Of MindSpeed-LLM's flags."""
    absorbed = any(getattr(args, name, False) for name in ABSORBED)
    return Settings(
        args.index_n_heads,
        args.index_head_dim,
        args.index_topk,
        args.apply_rope_no_in_complex,
        args.indexer_loss_coeff,
        absorbed or any(getattr(args, name, False) for name in BY_OPERATORS),
        absorbed,
    )


class Indexer(nn.Module):
    """Scores of earlier tokens; every tensor-parallel rank has all of it, and all tokens.

    Args:
        config: an MLATransformerConfig.
        settings: of the indexer.
        rotation: of the latent attention, with its ``rope_type``.
    """

    def __init__(self, config: Any, settings: Settings, rotation: Any) -> None:
        super().__init__()
        self.settings, self.rotated, self.rope_type = settings, config.qk_pos_emb_head_dim, config.rope_type
        if self.rotated > settings.width:
            raise ValueError(
                f"--index-head-dim {settings.width}: fewer channels than the {self.rotated} that are rotated "
                "(--qk-pos-emb-head-dim)"
            )
        self.wq_b = _linear(config, config.q_lora_rank, settings.heads * settings.width)
        self.wk = _linear(config, config.hidden_size, settings.width)
        self.weights_proj = _linear(config, config.hidden_size, settings.heads)
        placed = dict(device=torch.cuda.current_device(), dtype=config.params_dtype)
        self.k_norm = nn.LayerNorm(settings.width, eps=NORM_EPSILON, **placed)
        self._rotation = (rotation,)  # in a tuple, so that it is not a part of this module too

    def forward(self, x: Tensor, latent: Tensor) -> Tensor:
        """Scores [batch, seq, seq] of tokens (second) for tokens (first), in float32 or better, later ones too.

        Args:
            x: [seq, batch, hidden].
            latent: [seq, batch, q_lora_rank].
        """
        q, k, weights = self.factors(x, latent)
        kind = torch.promote_types(q.dtype, torch.float32)
        products = torch.einsum("sbhd,tbd->bhst", q.to(kind), k.to(kind)).relu()
        return (products * weights.permute(1, 2, 0).unsqueeze(-1)).sum(1)

    def choose(self, x: Tensor, latent: Tensor) -> tuple[Tensor, Tensor]:
        """The scores of the chosen earlier tokens of every token, minus infinity where there are fewer, and their
        places, int32, -1 there: [batch, seq, topk], of the arguments of :meth:`forward`.
        """
        q, k, weights = (t.transpose(0, 1).contiguous() for t in self.factors(x, latent))
        count = min(self.settings.topk, x.shape[0])
        return torch.ops.mindspeed.lightning_indexer(q, k, weights.to(q.dtype), count)

    def factors(self, x: Tensor, latent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [seq, batch, heads, width], keys [seq, batch, width] and weights [seq, batch, heads]."""
        heads, width = self.settings.heads, self.settings.width
        angles, factor = self._angles(x.shape[0])
        q = self._rotate(self.wq_b(latent).view(*latent.shape[:-1], heads, width), angles, factor)
        k = self._rotate(self._norm(self.wk(x)).unsqueeze(2), angles, factor).squeeze(2)
        return q, k, self.weights_proj(x) * (heads * width) ** -0.5

    def _norm(self, k: Tensor) -> Tensor:
        kind = torch.promote_types(k.dtype, torch.float32)
        norm = self.k_norm
        normed = functional.layer_norm(
            k.to(kind), norm.normalized_shape, norm.weight.to(kind), norm.bias.to(kind), norm.eps
        )
        return normed.to(k.dtype)

    def _angles(self, length: int) -> tuple[Tensor, float]:
        """[seq, 1, 1, rotated], those of a pair at i and i + half; and the factor of cosines and sines."""
        (rotation,) = self._rotation
        if self.rope_type == "rope":
            return rotation(length), 1.0
        return rotation(length)

    def _rotate(self, x: Tensor, angles: Tensor, factor: float) -> Tensor:
        turned, kept = x.split([self.rotated, self.settings.width - self.rotated], -1)
        if self.settings.pairs_neighbours:
            turned = torch.cat([turned[..., 0::2], turned[..., 1::2]], -1)
        one, other = turned.chunk(2, -1)
        cos, sin = (angles.cos() * factor).to(x.dtype), (angles.sin() * factor).to(x.dtype)
        return torch.cat([turned * cos + torch.cat([-other, one], -1) * sin, kept], -1)


def _linear(config: Any, inputs: int, outputs: int) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=False, device=torch.cuda.current_device(), dtype=config.params_dtype)
    if config.perform_initialization:
        config.init_method(linear.weight)
    return linear


class SparseAttention(nn.Module):
    """Core attention that sees what the indexer has chosen.

    Args:
        config: an MLATransformerConfig.
        indexer: None for a layer that takes the choice of an earlier one.
        settings: of the indexer.
        softmax_scale: of the scores of attention.
        group: tensor-parallel ranks, which share the heads of attention.
        place: where its loss is logged.
    """

    def __init__(
        self, config: Any, indexer: Indexer | None, settings: Settings, softmax_scale: float, group: Any, place: int
    ) -> None:
        super().__init__()
        self.config, self.settings, self.softmax_scale, self.place = config, settings, softmax_scale, place
        self.indexer, self.tp_group = indexer, group
        self.absorbed: tuple[Any, ...] = ()
        """The latent attention that this is the core of, where its up-projections are absorbed."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        x: Tensor,
        qr: Tensor,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """[seq, batch, heads * v_width].

        Args:
            query, key: [seq, batch, heads, width]; value: [seq, batch, heads, v_width].
            attention_mask: an :class:`index_sharing.Shared` where layers share choices; else not read: it is causal.
            x: the layer's normed input [seq / ranks, batch, hidden]; qr: latent of its queries.
        """
        shared = attention_mask if isinstance(attention_mask, index_sharing.Shared) else index_sharing.Shared(None)
        if self.settings.by_operators:
            return self._by_operators(query, key, value, shared, x, qr)
        length = query.shape[0]
        future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
        scores = None
        if self.indexer is not None:
            scores = self._scores(x.detach(), qr.detach()).masked_fill(future, float("-inf"))
            shared.indices = scores.detach().topk(min(self.settings.topk, length), -1).indices
        if shared.indices is None:
            raise RuntimeError("no earlier layer has chosen what this one sees")
        seen = torch.zeros_like(future).expand(query.shape[1], -1, -1).scatter(-1, shared.indices, True) & ~future
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        out = functional.scaled_dot_product_attention(q, k, v, seen.unsqueeze(1), scale=self.softmax_scale)
        out = out.permute(2, 0, 1, 3).flatten(2)
        if scores is None or not (self.training and torch.is_grad_enabled()) or not self.settings.loss_coefficient:
            return out
        target = self._target(q.detach(), k.detach(), seen).gather(-1, shared.indices)
        loss = self._loss(scores.gather(-1, shared.indices), target)
        return attach_loss(out, loss, self.place, self.config)

    def _by_operators(
        self, query: Tensor, key: Tensor, value: Tensor, shared: index_sharing.Shared, x: Tensor, qr: Tensor
    ) -> Tensor:
        """:meth:`forward` without a mask."""
        scores = None
        if self.indexer is not None:
            scores, shared.indices = self.indexer.choose(*self._whole(x.detach(), qr.detach()))
        if shared.indices is None:
            raise RuntimeError("no earlier layer has chosen what this one sees")
        q, k, v = (t.transpose(0, 1) for t in (query, key, value))
        values = None if self.settings.absorbed else v
        out, sums = torch.ops.mindspeed.sparse_attention(q, k, values, shared.indices, self.softmax_scale, v.shape[-1])
        out = out.transpose(0, 1)
        (attention,) = self.absorbed or (None,)
        out = out.flatten(2) if attention is None else absorbed_attention.values_of(attention, out)
        if scores is None or not (self.training and torch.is_grad_enabled()) or not self.settings.loss_coefficient:
            return out
        operands = q.detach(), k.detach(), shared.indices, sums.detach(), self.softmax_scale
        target = torch.ops.mindspeed.chosen_weights(*operands)
        target = collectives.all_reduce(target, self.tp_group) if size(self.tp_group) > 1 else target
        return attach_loss(out, self._loss(scores, target), self.place, self.config)

    def _scores(self, x: Tensor, latent: Tensor) -> Tensor:
        assert self.indexer is not None
        return self.indexer(*self._whole(x, latent))

    def _whole(self, x: Tensor, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Of all tokens."""
        if self.config.sequence_parallel and size(self.tp_group) > 1:
            from megatron.core.tensor_parallel import mappings

            x, latent = (mappings.gather_from_sequence_parallel_region(t, group=self.tp_group) for t in (x, latent))
        return x, latent

    def _target(self, q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
        """What all heads attend to, added up: [batch, seq, seq], without a gradient."""
        kind = torch.promote_types(q.dtype, torch.float32)
        with torch.no_grad():
            scores = (q.to(kind) @ k.to(kind).transpose(-1, -2)) * self.softmax_scale
            heads = scores.masked_fill(~seen.unsqueeze(1), float("-inf")).softmax(-1).sum(1)
            return collectives.all_reduce(heads, self.tp_group) if size(self.tp_group) > 1 else heads

    def _loss(self, scores: Tensor, target: Tensor) -> Tensor:
        """Of the chosen tokens' scores and what they are to be like, [batch, seq, topk]."""
        likely = scores.softmax(-1) + EPSILON
        wanted = functional.normalize(target, p=1.0, dim=-1) + EPSILON
        return (wanted * (wanted.log() - likely.log())).sum(-1).mean() * self.settings.loss_coefficient


def attach_loss(out: Tensor, loss: Tensor, place: int, config: Any, parts: int = 1) -> Tensor:
    """``out``, whose backward is that of an indexer's loss too; the loss is logged.

    It gets the scale of the routers' losses, which schedules set: that of a microbatch's main loss.

    Args:
        out: [rows, batch, ...] of the layer.
        loss: the mean over these tokens.
        place: where it is logged.
        config: Megatron's TransformerConfig.
        parts: context-parallel ranks, each with as many tokens; the loss is the mean over all.
    """
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    DSAIndexerLossLoggingHelper.tracker["values"][place] += loss.detach()
    if config.calculate_per_token_loss:  # gradients are divided by the number of all tokens at last
        return MoEAuxLossAutoScaler.apply(out, loss * (out.shape[0] * out.shape[1]))
    return MoEAuxLossAutoScaler.apply(out, loss / parts if parts > 1 else loss)


def prepare_log(config: Any) -> None:
    """Make the places where losses of indexers are logged, one a layer."""
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper

    places = torch.zeros(config.num_layers + (config.mtp_num_layers or 0), device=current_device())
    groups = dict(reduce_group=None, avg_group=None)
    for name, value in {"values": places, **groups}.items():
        DSAIndexerLossLoggingHelper.tracker.setdefault(name, value)


def add_indexers(model: Any, args: Namespace) -> None:
    """Give every latent attention of a GPTModel, or of a stage of one, an indexer or the choice of an earlier layer.

    Raises:
        ValueError: layers that share a choice are on different stages.
    """
    settings, layers = settings_of(args), model.config.num_layers
    prepare_log(model.config)
    sources = index_sharing.sources(args, layers)
    here = {layer.layer_number for layer in model.decoder.layers}
    for layer in model.decoder.layers:
        number = layer.layer_number
        source = sources[number - 1]
        if source not in here:
            raise ValueError(
                f"--index-topk-freq: layer {number} sees what layer {source} has chosen, which is on another stage; "
                "place layers so that such layers are together"
            )
        _make_sparse(layer.self_attention, settings, number - 1, is_sharing=source != number)
    for ahead, attention in enumerate(_attentions_ahead(model)):
        _make_sparse(attention, settings, layers + ahead, is_sharing=False)
    if any(source != number for number, source in enumerate(sources, 1)):
        index_sharing.hand_on(model.decoder.layers)


def _attentions_ahead(model: Any) -> list[Any]:
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    ahead = getattr(model, "mtp", None)
    return [] if ahead is None else [m for m in ahead.modules() if isinstance(m, MLASelfAttention)]


def _make_sparse(attention: Any, settings: Settings, place: int, is_sharing: bool) -> None:
    config = copy.copy(attention.config)
    config.experimental_attention_variant = "dsa"  # so that core attention gets the hidden states and the latent
    attention.config = config
    indexer = None if is_sharing else Indexer(config, settings, attention.rotary_pos_emb)
    attention.core_attention = SparseAttention(
        config, indexer, settings, attention.softmax_scale, attention.tp_group, place
    )
    if settings.absorbed:
        attention.core_attention.absorbed = (attention,)  # in a tuple, so that it is not a part of this module too
        absorbed_attention.absorb(attention)
