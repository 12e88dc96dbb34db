"""What the flags say of DeepSeek-V4's layers."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

NAME = "deepseek4"
"""Value of ``mindspeed_layers``."""
CHOSEN = 4
"""The ratio of layers whose entries an indexer chooses, and whose pools overlap."""


@dataclass(frozen=True)
class Settings:
    """Of the layers.

    Args:
        ratios: tokens that each layer pools into one entry; up to 1: the layer sees its window alone.
        window: tokens that a token sees, itself included.
        output_groups, output_rank: of the output projection: heads in groups, each with a down-projection to the rank.
        index_heads, index_width, index_topk: of the indexer: its heads, their width, entries that a token sees at most.
        loss_coefficient: of the indexer's loss.
        theta: base of the rotation of layers that pool nothing.
        pooled_theta: base of the rotation of others, whose frequencies YaRN changes by the next four.
        factor, beta_fast, beta_slow, original_length: of YaRN; ``original_length`` 0: it changes nothing.
        streams: residual streams of a token.
        iterations: of Sinkhorn's algorithm.
        stream_epsilon: added where streams are mixed.
    """

    ratios: tuple[int, ...]
    window: int
    output_groups: int
    output_rank: int
    index_heads: int
    index_width: int
    index_topk: int
    loss_coefficient: float
    theta: float
    pooled_theta: float
    factor: float
    beta_fast: float
    beta_slow: float
    original_length: int
    streams: int
    iterations: int
    stream_epsilon: float

    def ratio_of(self, layer: int) -> int:
        """Of a layer, counted from one; 1 for layers of multi-token prediction, which are behind the last."""
        return max(self.ratios[layer - 1], 1) if layer <= len(self.ratios) else 1


def settings_of(args: Namespace) -> Settings:
    """Of MindSpeed-LLM's flags, after ``flags.llm_deepseek4`` has read them."""
    return Settings(
        ratios=tuple(args.ratios_of_layers),
        window=args.sliding_window_size,
        output_groups=args.o_groups,
        output_rank=args.o_lora_rank,
        index_heads=args.index_n_heads,
        index_width=args.index_head_dim,
        index_topk=args.index_topk,
        loss_coefficient=args.indexer_loss_coeff,
        theta=args.rope_theta,
        pooled_theta=args.compress_rope_theta,
        factor=args.rope_factor,
        beta_fast=args.beta_fast,
        beta_slow=args.beta_slow,
        original_length=args.original_seq_len,
        streams=args.hc_mult,
        iterations=args.hc_sinkhorn_iters,
        stream_epsilon=args.hc_eps,
    )
