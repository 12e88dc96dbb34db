"""DeepSeek-V4's layer, between whose sublayers a token has several streams, and where Megatron's specs have it."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from mindspeed_fx.megatron import square_root_router
from mindspeed_fx.megatron.deepseek4.attention import Attention
from mindspeed_fx.megatron.deepseek4.settings import Settings
from mindspeed_fx.megatron.deepseek4.streams import HyperConnection, expand


def make_layers(spec: Any, settings: Settings) -> Any:
    """The same spec with DeepSeek-V4's layers.

    Args:
        spec: Megatron's TransformerBlockSubmodules, the ModuleSpec of a layer, the submodules of a block of multi-token
            prediction, or None.
        settings: of the layers.
    """
    if spec is None:
        return None
    if hasattr(spec, "layer_specs"):
        return dataclasses.replace(spec, layer_specs=[make_layers(layer, settings) for layer in spec.layer_specs])
    if hasattr(spec.submodules, "transformer_layer"):
        layer = make_layers(spec.submodules.transformer_layer, settings)
        return dataclasses.replace(spec, submodules=dataclasses.replace(spec.submodules, transformer_layer=layer))
    attention = spec.submodules.self_attention
    attention = dataclasses.replace(
        attention, module=Attention, params={**attention.params, "settings": settings}, submodules=None
    )
    submodules = dataclasses.replace(spec.submodules, self_attention=attention)
    return dataclasses.replace(
        spec, module=layer_class(), submodules=submodules, params={**spec.params, "settings": settings}
    )


def layer_class() -> type:
    """The class, made where Megatron-core is at hand."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    class StreamsLayer(TransformerLayer):
        def __init__(self, *args: Any, settings: Settings, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.attn_mhc = HyperConnection(self.config, settings)
            self.mlp_mhc = HyperConnection(self.config, settings)

        def forward(
            self, hidden_states: Tensor, attention_mask: Any = None, padding_mask: Tensor | None = None, **others: Any
        ) -> tuple[Tensor, Any]:
            """Streams [seq, batch, n, hidden] of the same; ``padding_mask``: tokens, where a layer has a table."""
            x, post, mixing = self.attn_mhc(hidden_states)
            added = _with_bias(self.self_attention(self.input_layernorm(x), attention_mask))
            streams = expand(hidden_states, added, post, mixing)
            x, post, mixing = self.mlp_mhc(streams)
            tokens = padding_mask if square_root_router.has_table(self.mlp) else None
            added = _with_bias(self.mlp(self.pre_mlp_layernorm(x), padding_mask=tokens))
            return expand(streams, added, post, mixing), others.get("context")

    return StreamsLayer


def _with_bias(result: tuple[Tensor, Tensor | None]) -> Tensor:
    output, bias = result
    return output if bias is None else output + bias
