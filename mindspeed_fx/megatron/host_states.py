"""``--swap-optimizer``: main weights and the states of an optimizer wait in host memory between steps.

In a step they are copied to the device in ``--swap-optimizer-times`` parts, stepped, and copied back: while a part is
stepped the next is on its way, so that of 12 bytes a weight (float32 main weight and Adam's two moments) two parts are
on the device and a third while it is copied back. On an accelerator host memory is pinned and copies run on a stream of
their own; on a CPU the host is the same memory, and copies are copies.

A weight that is float32 in the model stays on the device, and its states wait on the host.
"""

from __future__ import annotations

import contextlib
from typing import Any, Iterator

import torch
from torch import Tensor

from mindspeed_fx.megatron import lean_optimizer

FLAG = "--swap-optimizer"
MAIN = "main weight"
"""The name of the main weight among the states of one weight."""


class SideStream:
    """Copies between host and device beside the device's own work; on a CPU at once.

    Copies run one after another, so that what is copied to the host and back is in order. A copy to the host waits for
    the work that the device was given before; :meth:`wait` has further work wait for copies to the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_host = device.type == "cpu"
        if not self.is_host:
            self.module = torch.get_device_module(device)
            self.stream = self.module.Stream(device=device)

    def to_device(self, host: Tensor) -> Tensor:
        if self.is_host:
            return host.clone()
        with self.module.stream(self.stream):
            copy = host.to(self.device, non_blocking=True)
        copy.record_stream(self.module.current_stream())
        return copy

    def to_host(self, value: Tensor, host: Tensor) -> None:
        with self._after_work():
            host.copy_(value, non_blocking=True)
        if not self.is_host:
            value.record_stream(self.stream)

    @contextlib.contextmanager
    def _after_work(self) -> Iterator[None]:
        if self.is_host:
            yield
            return
        self.stream.wait_stream(self.module.current_stream())
        with self.module.stream(self.stream):
            yield

    def wait(self) -> None:
        """Work that the device is given from here on waits for the copies begun."""
        if not self.is_host:
            self.module.current_stream().wait_stream(self.stream)

    def synchronize(self) -> None:
        """The host waits for the copies begun."""
        if not self.is_host:
            self.stream.synchronize()

    def empty_host(self, like: Tensor) -> Tensor:
        """Host memory for a tensor, pinned where that means something."""
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=not self.is_host)


class HostStates:
    """Keeps a main weight and its states on the host (:class:`lean_optimizer.Keeper`).

    Args:
        model: the 16-bit weight of ``main``; None where ``main`` is a float32 weight of the model.
        main: the weight that ``optimizer`` steps.
    """

    def __init__(self, model: Tensor | None, main: Tensor, optimizer: Any, stream: SideStream) -> None:
        self.model, self.main, self.optimizer, self.stream = model, main, optimizer, stream
        self.host: dict[str, Tensor] = {}
        self.arrivals: dict[str, Tensor] = {}
        if model is not None:
            self._keep(MAIN, main.data)
            main.data = lean_optimizer.absent(main)

    def prefetch(self) -> None:
        if not self.arrivals:
            self.arrivals = {name: self.stream.to_device(host) for name, host in self.host.items()}

    def restore(self) -> None:
        self.prefetch()
        self.stream.wait()
        arrivals, self.arrivals = self.arrivals, {}
        if MAIN in arrivals:
            self.main.data = arrivals.pop(MAIN)
        if arrivals:
            self.optimizer.state[self.main].update(arrivals)

    @torch.no_grad()
    def release(self) -> None:
        if self.model is not None:
            self.model.detach().copy_(self.main.detach())
            self._keep(MAIN, self.main.data)
        self.discard()

    def discard(self) -> None:
        if self.model is not None:
            self.main.data = lean_optimizer.absent(self.main)
        self.keep_states()

    def keep_states(self) -> None:
        state = self.optimizer.state.get(self.main, {})
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == self.main.shape and value is not self.host.get(name):
                state[name] = self._keep(name, value)

    def float32(self) -> Tensor:
        return self.host[MAIN] if self.model is not None else self.main

    def settle(self) -> None:
        self.stream.synchronize()

    def device_bytes(self) -> int:
        """Bytes of the weight's main weight and states that are on the device now."""
        values = dict(self.optimizer.state.get(self.main, {}))
        if self.model is not None:
            values[MAIN] = self.main.data
        states = [v for n, v in values.items() if isinstance(v, Tensor) and v is not self.host.get(n)]
        # What is absent is one number, expanded.
        whole = [v for v in (*states, *self.arrivals.values()) if v.untyped_storage().nbytes() >= v.nbytes]
        return sum(v.nbytes for v in whole)

    def _keep(self, name: str, value: Tensor) -> Tensor:
        """``value`` on the host."""
        if name not in self.host:
            self.host[name] = self.stream.empty_host(value)
        self.stream.to_host(value, self.host[name])
        return self.host[name]


def swap_states(optimizer: Any, times: int) -> Any:
    """An optimizer of Megatron's whose main weights and states wait on the host between its steps.

    Args:
        optimizer: what ``get_megatron_optimizer`` returns, before its first step; not to be used afterwards.
        times: parts of a step, at least one; the largest weight is a part at least.

    Raises:
        OptionError: it is of a class that is not known here.
    """
    return lean_optimizer.make_lean(optimizer, FLAG, _host_states, times)


def _host_states(optimizer: Any) -> list[lean_optimizer.Keeper]:
    narrow = {main: model for model, main in lean_optimizer.weight_pairs(optimizer)}
    weights = [weight for group in optimizer.optimizer.param_groups for weight in group["params"]]
    if not weights:  # of a distributed optimizer this rank may have none
        return []
    stream = SideStream(weights[0].device)
    return [HostStates(narrow.get(weight), weight, optimizer.optimizer, stream) for weight in weights]
