"""``--init-norm-weight-in-fp32``: weights of norms in float32 in a model of 16 bits.

A norm computes in float32 then, and what it returns has the type of what it was given. Megatron keeps the weights in
buffers and optimizer groups of their own type.
"""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor, nn

from mindspeed_fx.megatron import patches
from mindspeed_fx.megatron.deepseek4 import streams
from mindspeed_fx.megatron.patches import EVERYWHERE, Patch
from mindspeed_fx.megatron.run_arguments import training_arguments

TARGET = "transformer.module:Float16Module.__init__"
LOAD = "optimizer.distrib_optimizer:DistributedOptimizer._set_main_param_and_optimizer_states"


def float16_module_init(self: Any, *args: Any, **kwargs: Any) -> None:
    """``Float16Module.__init__``, after which norms have float32 weights where the run asks for it, and the mixing of
    streams always."""
    patches.original(TARGET)(self, *args, **kwargs)
    streams.widen(self.module)
    if getattr(training_arguments(), "init_norm_weight_in_fp32", False):
        widen(self.module)


def widen(model: nn.Module) -> None:
    """Turn the weights and biases of a model's norms to float32, in place, the same parameters."""
    for norm in model.modules():
        if not isinstance(norm, (nn.RMSNorm, nn.LayerNorm)):
            continue
        narrow = norm.weight.dtype
        for parameter in norm.parameters():
            parameter.data = parameter.data.float()
        norm.register_forward_pre_hook(lambda module, inputs: (inputs[0].float(), *inputs[1:]))
        norm.register_forward_hook(_to(narrow))


def _to(narrow: torch.dtype) -> Callable[..., Tensor]:
    return lambda module, inputs, output: output.to(narrow)


@torch.no_grad()
def set_states(self: Any, *args: Any, **kwargs: Any) -> None:
    """``DistributedOptimizer._set_main_param_and_optimizer_states``, which writes float32 parameters themselves: views
    of leaves that require gradients.
    """
    patches.original(LOAD)(self, *args, **kwargs)


def table() -> list[Patch]:
    """The patches."""
    return [
        Patch(TARGET, float16_module_init, "--init-norm-weight-in-fp32 keeps norms in float32", EVERYWHERE),
        Patch(LOAD, set_states, "a checkpoint's values are written into parameters of float32", EVERYWHERE),
    ]
