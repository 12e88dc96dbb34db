"""What Megatron-core asks of CUDA on a machine that has none: a device, scratch buffers, a random-number tracker."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator

import torch
from torch import Tensor


def rotary_get_emb(self: Any, max_seq_len: int, offset: int = 0) -> Tensor:
    """``RotaryEmbedding.get_emb`` with ``inv_freq`` left where the model is: angles [seq, 1, 1, dim]."""
    freqs = self.get_freqs_non_repeated(max_seq_len, offset)
    if self.rotary_interleaved:
        emb = torch.stack((freqs.view(-1, 1), freqs.view(-1, 1)), dim=-1).view(freqs.shape[0], -1)
    else:
        emb = torch.cat((freqs, freqs), dim=-1)
    return emb[:, None, None, :]


def causal_mask(sq: int) -> Tensor:
    """Boolean [sq, sq], True above the diagonal: masked. Made in the graph, so that a pass can read it."""
    return torch.ones(sq, sq, dtype=torch.bool).triu(1)


def sliding_window_causal_mask(sq: int, skv: int, window_size: tuple[int, int]) -> Tensor:
    """Boolean [sq, skv], True where masked: outside ``window_size`` around the diagonal that ends at the last key."""
    inside = torch.ones(sq, skv, dtype=torch.bool)
    inside = inside.triu(skv - sq - window_size[0]).tril(skv - sq + window_size[1])
    return ~inside


def buffer_get_tensor(self: Any, tensor_shape: Any, dtype: torch.dtype, name: str, mem_alloc_context: Any = None) -> Tensor:
    """``GlobalMemoryBuffer.get_tensor`` without the shared buffer, which a graph could not own."""
    return torch.empty(tuple(tensor_shape), dtype=dtype)


class CpuRngTracker:
    """``CudaRNGStatesTracker`` over the CPU generator: named states, forked for the tensor-parallel region.

    Inside a compiled graph random numbers come from the graph's own generator and ``fork`` does nothing: seed ranks
    differently where dropout in the tensor-parallel region must differ.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()

    def is_initialized(self) -> bool:
        return bool(self.states_)

    def get_states(self) -> dict[str, Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, Tensor]) -> None:
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        if seed in self.seeds_ or name in self.states_:
            raise Exception(f"cuda rng state {name} or seed {seed} already exists")
        self.seeds_.add(seed)
        self.states_[name] = torch.Generator().manual_seed(seed).get_state()

    def fork(self, name: str = "model-parallel-rng") -> Any:
        return contextlib.nullcontext() if torch.compiler.is_compiling() else self._fork(name)

    @contextlib.contextmanager
    def _fork(self, name: str) -> Iterator[None]:
        if name not in self.states_:
            # Megatron raises here; a model without parallel seeds draws from the default generator.
            yield
            return
        before = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(before)


_TRACKER = CpuRngTracker()


def get_rng_tracker(use_te_rng_tracker: bool = False, inference_rng_tracker: bool = False, use_cudagraphable_rng: bool = False) -> CpuRngTracker:
    return _TRACKER


def manual_seed(seed: int, *args: Any, tp_rank: int | None = None, ep_rank: int | None = None, etp_rank: int | None = None, **kwargs: Any) -> None:
    """``model_parallel_cuda_manual_seed`` on the CPU generator, with Megatron's seeds for each region."""
    from megatron.core import parallel_state as state

    tp_rank = state.get_tensor_model_parallel_rank() if tp_rank is None else tp_rank
    ep_rank = state.get_expert_model_parallel_rank() if ep_rank is None else ep_rank
    etp_rank = state.get_expert_tensor_parallel_rank() if etp_rank is None else etp_rank
    _TRACKER.reset()
    torch.manual_seed(seed)
    _TRACKER.add("data-parallel-rng", seed)
    _TRACKER.add("model-parallel-rng", seed + 2718 + tp_rank)
    _TRACKER.add("expert-parallel-rng", seed + 1024 + 100 * ep_rank + etp_rank)


def current_device() -> torch.device:
    """Stands in for ``torch.cuda.current_device`` where Megatron uses it as a device."""
    return torch.device("cpu")
