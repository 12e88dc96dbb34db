"""Fused operators: one file each, with schema, reference, gradient and the kernel on every target.

Importing this package defines the ``torch.ops.mindspeed`` namespace.
"""

from mindspeed_fx.kernels import activation, add_layer_norm, add_rms_norm, attention, attention_blocked, attention_cpu, attention_dropout, attention_seeded, clipped_swiglu, cross_entropy, dropout_add, gemm, glu, grouped_matmul, layer_norm, linear, linear_cross_entropy, linear_cross_entropy_backward, moe_permute, ring_attention_update, rms_norm, rope, scaled_masked_softmax, swiglu, weighted_swiglu  # noqa: F401
from mindspeed_fx.kernels.npu import activation as _activation_npu, attention as _attention_npu, attention_seeded as _attention_seeded_npu, dropout as _dropout_npu, glu as _glu_npu, layer_norm as _layer_norm_npu, loss as _loss_npu, moe as _moe_npu, norm as _norm_npu, rope as _rope_npu, softmax as _softmax_npu  # noqa: F401
from mindspeed_fx.kernels.base import REGISTRY, Lowering, Operator, operator

__all__ = ["REGISTRY", "Lowering", "Operator", "operator"]
