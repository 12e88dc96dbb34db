"""Dropout on NPU: torch's own operator, which torch_npu has a kernel for, and the additions around it.

torch_npu has no kernel of bias, dropout and residual addition together (MindSpeed's ``npu_dropout_add_layer_norm`` is not in it). The
parts are called, so that the graph shows what runs; the numbers are those of ``native_dropout`` on the device, as in the model.
"""

from __future__ import annotations

from mindspeed_fx.kernels.dropout_add import dropout_add
from mindspeed_fx.kernels.npu import lowering, typed

lowering(dropout_add, "aten native_dropout and additions", lambda x, bias, residual, p: typed(x=x, bias=bias, residual=residual))(dropout_add.reference)
