"""Residual addition and RMSNorm in Triton: the kernels of RMSNorm, which add what they read before, or to what they
write.
"""

from mindspeed_fx.kernels.triton.rms_norm import gradients as backward
from mindspeed_fx.kernels.triton.rms_norm import normalize as forward

__all__ = ["forward", "backward"]
