"""Megatron's buckets and a compiled chunk: gradients are told to them where the backward makes them, and parameters
that they gather are waited for where the forward first uses them.

Megatron's DistributedDataParallel starts and ends the collectives of buckets from hooks on parameters and modules. Of a
compiled chunk the former run when its whole backward is over, and the latter not at all. The graph does both instead
(:mod:`mindspeed_fx.training.gradient_ready`, :mod:`mindspeed_fx.training.param_gather`). Whether a micro-batch is the
last one (``no_sync``), what a bucket holds and whether gathers are on is asked when the graph runs.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor

from mindspeed_fx.megatron import patches
from mindspeed_fx.training import gradient_ready, param_gather

WRAPPER = "distributed.distributed_data_parallel:DistributedDataParallel"
BACKWARD_HOOK, FORWARD_HOOK = f"{WRAPPER}._make_backward_post_hook", f"{WRAPPER}._make_forward_pre_hook"


def listen(wrapper: Any) -> bool:
    """Have the graphs of a model in Megatron's ``DistributedDataParallel`` call its buckets.

    Returns:
        Whether they do: such a graph is this model's alone.
    """
    gathers = getattr(wrapper, "use_forward_hook", False)
    reduces = getattr(wrapper.ddp_config, "overlap_grad_reduce", False)
    if gathers:
        groups: dict[int, list[Any]] = {}
        for parameter, group in wrapper.param_to_bucket_group.items():
            groups.setdefault(id(group), []).append(parameter)
        for parameters in groups.values():
            group = wrapper.param_to_bucket_group[parameters[0]]
            listener = functools.partial(_finish_gather, weakref.ref(wrapper), weakref.ref(group))
            param_gather.listen(parameters, listener)
    for parameter in wrapper.module.parameters() if reduces else ():
        if parameter.requires_grad and parameter in wrapper.param_to_bucket_group:
            references = weakref.ref(wrapper), weakref.ref(parameter)
            gradient_ready.listen(parameter, functools.partial(_register, *references))
    return gathers or reduces


def _register(wrapper: Any, parameter: Any) -> None:
    model, weight = wrapper(), parameter()
    if model is not None and weight is not None:
        model.param_to_bucket_group[weight].register_grad_ready(weight, model.force_all_reduce)


def _finish_gather(wrapper: Any, group: Any) -> None:
    model, bucket_group = wrapper(), group()
    if model is None or bucket_group is None or not model.remove_forward_pre_hook_handles:
        return  # gathers are off: before the first step and while the model is evaluated they were made at once
    at_once = model.ddp_config.align_param_gather or model.overlap_param_gather_with_optimizer_step
    bucket_group.finish_param_sync(skip_next_bucket_dispatch=at_once)


def make_forward_pre_hook(self: Any) -> Any:
    """``_make_forward_pre_hook``: a hook that a captured graph leaves to the operators in it."""
    hook = patches.original(FORWARD_HOOK)(self)

    def hook_outside_graphs(module: Any, *unused: Any) -> None:
        if not torch.compiler.is_compiling():
            hook(module, *unused)

    return hook_outside_graphs


def make_backward_post_hook(self: Any, param: Tensor) -> Any:
    """``_make_backward_post_hook``: a hook that leaves alone what the graph has done."""
    hook = patches.original(BACKWARD_HOOK)(self, param)

    def hook_unless_announced(*unused: Any) -> None:
        if param.grad is not None or gradient_ready.key_of(param) == gradient_ready.NOBODY:
            hook(*unused)

    return hook_unless_announced


PARTITION = "distributed.param_and_grad_buffer:partition_buckets"


def partition_buckets(buffers: list[Any], force_single_bucket_group: bool = False) -> list[Any]:
    """``partition_buckets``, whose groups have one type each: gloo gathers what is in a group as if it were of one."""
    partition = patches.original(PARTITION)
    if not force_single_bucket_group:
        return partition(buffers)
    return [group for buffer in buffers for group in partition([buffer], True)]
