"""Megatron's buckets are told inside a compiled backward when a gradient is in ``main_grad``.

Megatron's DistributedDataParallel starts the collective of a bucket from hooks on its parameters, which autograd calls
of a compiled chunk when its whole backward is over, so that nothing overlaps. The graph does it where the gradient is
made (:mod:`mindspeed_fx.training.gradient_ready`): the last gradient of a bucket starts its collective. Whether a
micro-batch is the last one (``no_sync``), and what a bucket holds, is asked when the graph runs.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

from torch import Tensor

from mindspeed_fx.megatron import patches
from mindspeed_fx.training import gradient_ready

HOOK = "distributed.distributed_data_parallel:DistributedDataParallel._make_backward_post_hook"


def listen(wrapper: Any) -> None:
    """Have the graphs of a model in Megatron's ``DistributedDataParallel`` tell its buckets of their gradients."""
    if not getattr(wrapper.ddp_config, "overlap_grad_reduce", False):
        return
    for parameter in wrapper.module.parameters():
        if parameter.requires_grad and parameter in wrapper.param_to_bucket_group:
            references = weakref.ref(wrapper), weakref.ref(parameter)
            gradient_ready.listen(parameter, functools.partial(_register, *references))


def _register(wrapper: Any, parameter: Any) -> None:
    model, weight = wrapper(), parameter()
    if model is not None and weight is not None:
        model.param_to_bucket_group[weight].register_grad_ready(weight, model.force_all_reduce)


def make_backward_post_hook(self: Any, param: Tensor) -> Any:
    """``_make_backward_post_hook``: a hook that leaves alone what the graph has done."""
    hook = patches.original(HOOK)(self, param)

    def hook_unless_announced(*unused: Any) -> None:
        if param.grad is not None or gradient_ready.key_of(param) == gradient_ready.NOBODY:
            hook(*unused)

    return hook_unless_announced
