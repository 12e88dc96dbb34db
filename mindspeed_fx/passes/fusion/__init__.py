"""Fusion: subgraphs become ``mindspeed::`` operators. One file per operator family."""

from mindspeed_fx.passes.fusion import activation, add_layer_norm, add_rms_norm, attention, clipped_swiglu, cross_entropy, dropout_add, gathered_experts, gelu, glu, grouped_matmul, layer_norm, linear_cross_entropy, linear_cross_entropy_backward, moe_permute, rms_norm, rope, scaled_masked_softmax, swiglu, weighted_swiglu  # noqa: F401
