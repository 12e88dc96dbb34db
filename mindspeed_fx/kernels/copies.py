"""Activations on their way to host memory and back, without anybody waiting who need not.

    host = offload(x)               starts the copy            forward, right after the last reader of x
    host = wait_copy(host, x)       x may be freed from here   forward, when the copy should be over
    x    = reload(host, device)     starts the copy back       backward, early enough
    x    = wait_copy(x, host)       x may be read from here    backward, right before its first reader

On cuda and npu copies run on two streams beside the one that computes, one each way, since links carry both ways at
once. ``wait_copy`` makes the stream that computes wait for an event; the host never waits. The tensor that is copied
from is an operand of ``wait_copy``, so that it stays alive until then and its memory is reused in the order of the
stream that computes, without ``record_stream``. Host buffers are pinned and come from torch's caching host allocator,
which hands one out again when the copies that use it are over; it rounds sizes up to powers of two. Written after the
documentation of ``torch.accelerator``; run on cpu only.

On cpu, where there is nothing to gain, the same operators stand for the others in tests: a copy takes place as late as
it may, in ``wait_copy``, and until then its result is NaN, so that a read too early or a write into what is being
copied shows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_fx.kernels.base import LIBRARY

_streams: dict[tuple[torch.device, str], torch.Stream] = {}
_events: dict[int, torch.Event] = {}
_late: dict[int, Tensor] = {}
"""On cpu: copies that have not taken place, by the address of their result -> what is copied."""


def _like(x: Tensor, device: torch.device | str, pinned: bool = False) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device, pin_memory=pinned)


def _start(out: Tensor, x: Tensor, device: torch.device, way: str) -> Tensor:
    """Begins to fill ``out`` with ``x`` when all is done that was given to the device so far."""
    if device.type == "cpu":
        _late[out.data_ptr()] = x
        return out.fill_(float("nan") if out.is_floating_point() or out.is_complex() else 0)
    compute = torch.accelerator.current_stream(device)
    if (device, way) not in _streams:
        _streams[device, way] = torch.Stream(device=device)
    stream = _streams[device, way]
    stream.wait_stream(compute)
    with stream:
        out.copy_(x, non_blocking=True)
        _events[out.data_ptr()] = stream.record_event()
    return out


def offload(x: Tensor) -> Tensor:
    """Starts to copy ``x``, dense and of any shape and type, to host memory.

    Returns:
        the copy on the cpu, with the strides of ``x``; to be given to :func:`wait_copy` before anything else.
    """
    return _start(_like(x, "cpu", pinned=x.device.type != "cpu"), x, x.device, "out")


def reload(host: Tensor, device: torch.device) -> Tensor:
    """Starts to copy ``host`` back to ``device``; the result is to be given to :func:`wait_copy` before it is read."""
    return _start(_like(host, device), host, device, "in")


def wait_copy(copy: Tensor, source: Tensor) -> Tensor:
    """``copy`` itself, when the copy of ``source`` that began with :func:`offload` or :func:`reload` is over.

    Raises:
        RuntimeError: no such copy is under way.
    """
    address = copy.data_ptr()
    if (source if copy.device.type == "cpu" else copy).device.type == "cpu":
        if (late := _late.pop(address, None)) is None and copy.numel():
            raise RuntimeError("wait_copy: no copy to this tensor is under way")
        return copy if late is None else copy.copy_(late)
    if (event := _events.pop(address, None)) is None and copy.numel():
        raise RuntimeError("wait_copy: no copy to this tensor is under way")
    if event is not None:
        torch.accelerator.current_stream(copy.device if copy.device.type != "cpu" else source.device).wait_event(event)
    return copy


LIBRARY.define("offload(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.define("reload(Tensor host, Device device) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.define("wait_copy(Tensor(a) copy, Tensor source) -> Tensor(a)", tags=(torch.Tag.pt2_compliant_tag,))
for _name, _run, _fake in (
    ("offload", offload, lambda x: _like(x, "cpu")),
    ("reload", reload, lambda host, device: _like(host, device)),
    ("wait_copy", wait_copy, lambda copy, source: copy),
):
    LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mindspeed::{_name}", _fake, lib=LIBRARY)
# Common subexpressions must not be joined and dead calls not dropped: a copy and its wait come in pairs.
for _name in ("offload", "reload", "wait_copy"):
    torch.fx.has_side_effect(getattr(torch.ops.mindspeed, _name).default)
