"""Megatron's optimizers over a small model, in one process: built, trained, counted in bytes, saved."""

from __future__ import annotations

import gc
from typing import Any, Callable, Iterator

import torch

from tests.megatron.gpt_models import batch, tiny_gpt


def build(
    sharded: bool,
    change: Callable[[Any], Any] | None = None,
    name: str = "adam",
    bf16: bool = True,
    **config: Any,
) -> Any:
    """(model in Megatron's wrappers, optimizer), the same weights in every call.

    Args:
        sharded: the distributed optimizer, over a group of one.
        change: makes another optimizer of it.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    torch.manual_seed(0)
    dtype = torch.bfloat16 if bf16 else torch.float32
    model = tiny_gpt(bf16=bf16, params_dtype=dtype)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=sharded, grad_reduce_in_fp32=True)
    wrapped = DistributedDataParallel(model.config, ddp, Float16Module(model.config, model) if bf16 else model)
    config = {"lr": 1e-2, "weight_decay": 0.1, "clip_grad": 0.5, **config}
    options = OptimizerConfig(optimizer=name, bf16=bf16, use_distributed_optimizer=sharded, **config)
    options.params_dtype = dtype
    optimizer = get_megatron_optimizer(options, [wrapped], use_gloo_process_groups=True)
    if change is not None:
        optimizer = change(optimizer)
    return wrapped, optimizer


def train(wrapped: Any, optimizer: Any, steps: int = 3, first: int = 0) -> list[float]:
    """The losses and the gradients' norms of some steps."""
    seen = []
    for number in range(first, first + steps):
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        torch.manual_seed(number)
        loss = wrapped(**batch()).float().mean()
        loss.backward()
        wrapped.finish_grad_sync()
        success, norm, _ = optimizer.step()
        assert success
        seen += [loss.item(), float(norm)]
    return seen


def bits(wrapped: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in wrapped.parameters()]


def tensors_of(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Every tensor that ``value`` holds: attributes, keys and values."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
        for further in (value.__dict__.values(), [value.grad] if value.is_leaf else []):
            for held in further:
                yield from tensors_of(held, seen)
    elif isinstance(value, dict):
        for pair in value.items():
            yield from tensors_of(pair[0], seen)
            yield from tensors_of(pair[1], seen)
    elif isinstance(value, (list, tuple, set)):
        for held in value:
            yield from tensors_of(held, seen)
    elif type(value).__module__.startswith(("megatron", "mindspeed_fx", "torch.optim")):
        yield from tensors_of(vars(value), seen)


def held_bytes(*owners: Any) -> int:
    """Bytes of all storages that the owners hold, each once."""
    gc.collect()
    storages = {}
    for tensor in tensors_of(list(owners), set()):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
