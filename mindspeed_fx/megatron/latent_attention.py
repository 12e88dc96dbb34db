"""Megatron's own attention product for multi-latent attention, whose values may be wider or narrower than its keys."""

from __future__ import annotations

from typing import Any

from mindspeed_fx.megatron import patches

CORE = "transformer.dot_product_attention:DotProductAttention.__init__"


def core_init(
    self: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any
) -> None:
    """``DotProductAttention.__init__`` that can be told the width of a head's keys and values."""
    patches.original(CORE)(self, *args, **kwargs)
    if k_channels is not None:
        self.hidden_size_per_attention_head = k_channels
    if v_channels is not None:  # the width of the result
        self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition
