"""A training step over microbatches: what a plan's ``microbatches`` asks of the loop where there is no pipeline."""

from __future__ import annotations

from typing import Any, Callable

import torch

from mindspeed_fx import arguments
from mindspeed_fx.sharding.plan import ShardingError


def accumulate(step: Callable[..., torch.Tensor], *args: Any, microbatches: int, **kwargs: Any) -> torch.Tensor:
    """Forward and backward of ``step`` over equal parts of the batch; gradients add up to those of the mean.

        loss = mindspeed_fx.accumulate(step, ids, labels, microbatches=plan.microbatches)
        optimizer.step()

    A loss that is a mean over the batch gives the loss and the gradients of the whole batch, where every part has as
    many labels.

    Args:
        step: the compiled model; returns its loss, a tensor of one element.
        args, kwargs: of the whole batch. Tensors are split along their first dimension; other values go to every part.
        microbatches: how many parts.

    Returns:
        The mean loss, without a graph; gradients are on the parameters.

    Raises:
        ShardingError: a batch that is no multiple of ``microbatches``; a step that returns no loss.
    """
    arguments.check_callable("accumulate", "step", step)
    if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
        raise ShardingError(f"microbatches is {microbatches!r}; a whole number from 1 on is expected")
    named = {**{f"number {i}": a for i, a in enumerate(args)}, **kwargs}
    parts = {name: _parts(name, value, microbatches) for name, value in named.items()}
    losses = []
    for i in range(microbatches):
        loss = step(*(parts[f"number {k}"][i] for k in range(len(args))), **{name: parts[name][i] for name in kwargs})
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ShardingError(f"accumulate: the step returned {what}; its loss, a tensor of one element, is expected")
        if not loss.requires_grad:
            raise ShardingError("accumulate: the step returned a loss without gradient; one that needs it is expected")
        (loss / microbatches).backward()
        losses.append(loss.detach())
    return torch.stack(losses).mean(0)


def _parts(name: str, value: Any, count: int) -> list[Any]:
    if not isinstance(value, torch.Tensor):
        return [value] * count
    return [rows_of(name, value, count, i) for i in range(count)]


def rows_of(name: str, value: torch.Tensor, count: int, index: int) -> torch.Tensor:
    """Part ``index`` of ``count`` of an argument, along dimension 0.

    Raises:
        ShardingError: it cannot be split evenly.
    """
    rows = value.shape[0] if value.ndim else 0
    if count < 1 or not rows or rows % count:
        raise ShardingError(
            f'argument "{name}" of shape {tuple(value.shape)} cannot be split into {count} microbatches '
            "along its first dimension"
        )
    size = rows // count
    return value[index * size : (index + 1) * size]
