"""Megatron's random-number tracker in a captured graph, and over an NPU's or the CPU's generator where there is no
CUDA.

``fork`` switches to a named state: dropout in the tensor-parallel region draws from a stream of its own. A captured
graph cannot switch the generator, so there ``fork`` is a mode under which dropout is ``x * noise``, and the noise comes
from an operator that takes the named state and returns the next one. On a CPU the numbers are those of eager mode; on
CUDA and NPU, where eager dropout is one kernel, they are others of the same distribution.
"""

from __future__ import annotations

import contextlib
from typing import Any, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mindspeed_fx.megatron import groups, patches

DEFAULT = "default-rng"
TRACKER = "tensor_parallel.random:CudaRNGStatesTracker"
FORK = f"{TRACKER}.fork"


@torch.library.custom_op("mindspeed::dropout_noise", mutates_args=())
def dropout_noise(state: Tensor, like: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Noise shaped ``like``, 0 with probability ``p`` and 1 / (1 - p) otherwise, from generator ``state``; and the next
    state.
    """
    generator = torch.Generator(like.device)
    generator.set_state(state)
    noise = torch.empty_like(like).bernoulli_(1 - p, generator=generator).div_(1 - p)
    return noise, generator.get_state()


@dropout_noise.register_fake
def _(state: Tensor, like: Tensor, p: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(like), torch.empty_like(state)


@torch.library.custom_op("mindspeed::router_noise", mutates_args=())
def router_noise(state: Tensor, like: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Numbers shaped ``like`` from generator ``state``, uniform in [0, 1) or of an exponential distribution; and the
    next state.
    """
    generator = torch.Generator(like.device)
    generator.set_state(state)
    noise = torch.empty_like(like)
    noise.uniform_(generator=generator) if kind == "uniform" else noise.exponential_(generator=generator)
    return noise, generator.get_state()


@router_noise.register_fake
def _(state: Tensor, like: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(like), torch.empty_like(state)


class _ForkInGraph(TorchFunctionMode):
    """Dropout and noise of routers from the tracker's state ``name``; everything else as it is."""

    def __init__(self, tracker: Any, name: str) -> None:
        super().__init__()
        self.tracker, self.name = tracker, name

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is F.dropout:
            return _dropout(self.tracker, self.name, *args, **(kwargs or {}))
        if func in (torch.Tensor.exponential_, torch.Tensor.uniform_) and len(args) == 1 and not kwargs:
            kind = "uniform" if func is torch.Tensor.uniform_ else "exponential"
            noise, self.tracker.states_[self.name] = router_noise(self.tracker.states_[self.name], args[0], kind)
            return noise
        return func(*args, **(kwargs or {}))


def _dropout(
    tracker: Any, name: str, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if not training or p == 0.0:
        return input
    if p == 1.0:
        return input * 0.0
    noise, tracker.states_[name] = dropout_noise(tracker.states_[name], input.detach(), p)
    return input * noise


def fork_in_graph(self: Any, name: str = "model-parallel-rng") -> Any:
    """``CudaRNGStatesTracker.fork``."""
    if name not in self.states_:
        raise Exception(f"cuda rng state {name} is not added")
    return patches.original(FORK)(self, name) if self.use_cudagraphable_rng else _ForkInGraph(self, name)


def fork(self: Any, name: str = "model-parallel-rng") -> Any:
    """``CudaRNGStatesTracker.fork`` on the CPU generator. Where no state was added (the model was built without
    ``model_parallel_cuda_manual_seed``, which Megatron refuses) the default generator goes on.
    """
    if name not in self.states_:
        return contextlib.nullcontext()
    return _ForkInGraph(self, name) if torch.compiler.is_compiling() else _fork(self, name)


@contextlib.contextmanager
def _fork(tracker: Any, name: str) -> Iterator[None]:
    outer, before = tracker._current_state_name, torch.get_rng_state()
    if outer != DEFAULT:
        tracker.states_[outer] = before
    torch.set_rng_state(tracker.states_[name])
    tracker._current_state_name = name
    try:
        yield
    finally:
        tracker.states_[name] = torch.get_rng_state()
        tracker._current_state_name = outer
        torch.set_rng_state(before if outer == DEFAULT else tracker.states_[outer])


def add(self: Any, name: str, seed: int) -> None:
    """``CudaRNGStatesTracker.add``: name a new state seeded by ``seed``; neither may have been used."""
    if seed in self.seeds_:
        raise Exception(f"seed {seed} already exists")
    if name in self.states_:
        raise Exception(f"cuda rng state {name} already exists")
    self._is_initialized = True
    self.seeds_.add(seed)
    self.states_[name] = torch.Generator(groups.kind()).manual_seed(seed).get_state()


def _states() -> Any:
    """What has the state of this process's generator: ``torch``, or ``torch.npu``."""
    return torch if groups.kind() == "cpu" else getattr(torch, groups.kind())


def get_state(device: Any = "cpu", clone: bool = False, graph_safe: bool = False) -> Tensor:
    """``_get_cuda_rng_state``: the state of the NPU's generator, or the CPU's."""
    return _states().get_rng_state()


def set_state(new_state: Tensor, device: Any = -1, graph_safe: bool = False) -> None:
    """``_set_cuda_rng_state``: the same."""
    _states().set_rng_state(new_state)


def manual_seed(
    seed: int,
    te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
    tp_rank: int | None = None,
    ep_rank: int | None = None,
    etp_rank: int | None = None,
    force_reset_rng: bool = False,
) -> None:
    """``model_parallel_cuda_manual_seed`` on the NPU's or the CPU's generator, with Megatron's seeds: one stream for
    what all ranks of a tensor-parallel group hold, one of each rank's own, one for experts.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    tp_rank = parallel_state.get_tensor_model_parallel_rank() if tp_rank is None else tp_rank
    ep_rank = parallel_state.get_expert_model_parallel_rank() if ep_rank is None else ep_rank
    etp_rank = parallel_state.get_expert_tensor_parallel_rank() if etp_rank is None else etp_rank
    random.initialize_rng_tracker(te_rng_tracker, inference_rng_tracker, False, force_reset=force_reset_rng)
    tracker = random.get_cuda_rng_tracker()
    tracker.reset()
    torch.manual_seed(seed)
    tracker.add("data-parallel-rng", seed)
    tracker.add("model-parallel-rng", seed + 2718 + tp_rank)
    tracker.add("expert-parallel-rng", seed + 1024 + 100 * ep_rank + etp_rank)
