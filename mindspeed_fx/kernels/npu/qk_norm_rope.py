"""Norm and rotation of heads on NPU: torch_npu has no differentiable operator for both, our Triton kernel is one."""

from mindspeed_fx.kernels import triton
from mindspeed_fx.kernels.qk_norm_rope import qk_norm_rope, qk_norm_rope_backward

triton.on_npu(qk_norm_rope)
triton.on_npu(qk_norm_rope_backward)
