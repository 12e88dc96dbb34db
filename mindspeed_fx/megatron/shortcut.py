"""LongCat's layer, whose experts run beside the rest of it (shortcut-connected experts; arXiv 2509.01322, section 2.2):

    h = x + attention_0(norm x),  n = norm h,  h = h + mlp_0(n),  h = h + attention_1(norm h),  h = h + mlp_1(norm h),

and h + experts(n) at last. The second half is a layer of Megatron's without experts.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor


def make_shortcuts(spec: Any) -> Any:
    """Layers with experts as LongCat's.

    Args:
        spec: Megatron's TransformerBlockSubmodules, all of whose layers have experts, or the ModuleSpec of a layer.
    """
    if not hasattr(spec, "layer_specs"):
        return dataclasses.replace(spec, module=layer_class())
    layers = [dataclasses.replace(layer, module=layer_class()) for layer in spec.layer_specs]
    return dataclasses.replace(spec, layer_specs=layers)


def layer_class() -> type:
    """The class, made where Megatron-core is at hand."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module
    from megatron.core.transformer.transformer_layer import TransformerLayer

    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    dense = ModuleSpec(module=MLP, submodules=linears)

    class ShortcutLayer(TransformerLayer):
        def __init__(self, config: Any, submodules: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, submodules, *args, **kwargs)
            self.dense_mlp = build_module(dense, config=config, tp_group=self.tp_group)
            half = dataclasses.replace(submodules, mlp=dense)
            self.second_half = TransformerLayer(config, half, *args, **kwargs)

        def forward(
            self, hidden_states: Tensor, attention_mask: Any = None, context: Tensor | None = None, **kwargs: Any
        ) -> tuple[Tensor, Tensor | None]:
            kwargs.pop("dynamic_inference_decode_only", None)
            hidden, context = self._forward_attention(hidden_states, attention_mask, context, **kwargs)
            normed = self.pre_mlp_layernorm(hidden)
            routed, _ = self.mlp(normed)
            with self.bias_dropout_add_exec_handler():
                add = self.mlp_bda(self.training, self.config.bias_dropout_fusion)
                hidden = add(self.dense_mlp(normed), hidden, self.hidden_dropout)
            hidden, context = self.second_half(hidden, attention_mask=attention_mask, context=context, **kwargs)
            return hidden + routed, context

    return ShortcutLayer
