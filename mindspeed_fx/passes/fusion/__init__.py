"""Fusion: subgraphs become ``mindspeed::`` operators. One file per operator family."""

from mindspeed_fx.passes.fusion import add_rms_norm, attention, cross_entropy, gelu, glu, linear_cross_entropy, rms_norm, rope, swiglu  # noqa: F401
