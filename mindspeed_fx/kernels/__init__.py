"""Fused operators: one file each, with schema, reference, gradient and the kernel on every target.

Importing this package defines the ``torch.ops.mindspeed`` namespace.
"""

from mindspeed_fx.kernels.base import REGISTRY, Lowering, Operator, operator
from mindspeed_fx.modules import import_all

import_all(__name__)
import_all(f"{__name__}.cpu")
import_all(f"{__name__}.npu")

__all__ = ["REGISTRY", "Lowering", "Operator", "operator"]
