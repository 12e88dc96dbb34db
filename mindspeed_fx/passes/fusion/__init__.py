"""Fusion: subgraphs become ``mindspeed::`` operators. One file per operator family."""

from mindspeed_fx.passes.fusion import add_layer_norm, add_rms_norm, attention, cross_entropy, gathered_experts, gelu, glu, grouped_matmul, layer_norm, linear_cross_entropy, moe_permute, rms_norm, rope, swiglu  # noqa: F401
