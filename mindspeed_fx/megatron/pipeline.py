"""Pipeline parallelism over gloo."""

from __future__ import annotations

from typing import Any, Callable

from torch import Tensor

from mindspeed_fx.megatron import patches

SENDERS = ("pipeline_parallel.p2p_communication:_p2p_ops", "pipeline_parallel.p2p_communication:_batched_p2p_ops")


def keep_what_is_sent(target: str) -> Callable:
    """The function of Megatron that sends tensors, with their memory kept until they are sent.

    Megatron takes the storage from the output of a chunk as soon as the send has begun. On a CUDA stream nothing
    overwrites it before; gloo reads it later, and the receiver would get whatever lies there then.
    """

    def send(*, tensor_send_prev: Tensor | None, tensor_send_next: Tensor | None, **others: Any) -> Any:
        return patches.original(target)(
            tensor_send_prev=_alias(tensor_send_prev), tensor_send_next=_alias(tensor_send_next), **others
        )

    return send


def _alias(x: Tensor | None) -> Tensor | None:
    """Another tensor on the storage of ``x``, which setting ``x.data`` leaves alone."""
    return None if x is None else x.detach()
