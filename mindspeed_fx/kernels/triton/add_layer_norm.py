"""Residual addition and LayerNorm in Triton: the kernels of LayerNorm, which add what they read before, or to what they
write.
"""

from mindspeed_fx.kernels.triton.layer_norm import gradients as backward
from mindspeed_fx.kernels.triton.layer_norm import normalize as forward

__all__ = ["forward", "backward"]
