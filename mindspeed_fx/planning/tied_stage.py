"""Weights that several stages of a pipeline share: an embedding that is the output layer's weight too.

Every rank with a stage that reads such a weight has it, once, with the first one's values. At the end of a step of the
schedule the gradients of these ranks are summed, so that equal optimizers keep the weights equal:

    stage 0: embedding      gradient a          after the step a + b
    stage 3: output layer   gradient b          after the step a + b

Two stages on one rank add to one gradient. The sum is started when the last of a rank's stages has done its last
backward, and waited for where its result is first read: torch's schedules may send a gradient to the stage before only
after they asked for the sum.
Source: Shoeybi et al. 2019; Megatron-core's all-reduce of embedding gradients over the embedding group.
"""

from __future__ import annotations

from typing import Any, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from mindspeed_fx.compat.distributed import sum_later
from mindspeed_fx.compat.dtensor import as_parts_of, local_part
from mindspeed_fx.compat.pipelining import PartedStage


class TiedStage(PartedStage):
    """torch's stage of a module with weights that other stages have too."""

    def __init__(self, *args: Any, weights: TiedWeights, **kwargs: Any):
        """
        Args:
            weights: of all stages of this rank.
        """
        super().__init__(*args, **kwargs)
        self.weights = weights
        self.own = [p for p in self.submod.parameters() if not weights.has(p)]

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        self.weights.begin(self.stage_index, self.has_backward)

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Of the weights that no other stage has."""
        for p in self.own if grad_scale_factor != 1 else ():
            if p.grad is not None:
                p.grad.div_(grad_scale_factor)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        super().perform_reduce_grad(grad_scale_factor)
        if self.has_backward:
            self.weights.end(self.stage_index, grad_scale_factor)


class TiedWeights:
    """Of one rank: the weights that several stages have.

    Args:
        tied: name -> the stages that have it; on every rank in the same order.
        parameters: those of this rank by name.
        stages: of this rank.
        rank_of: the rank of each stage in ``group``.
    """

    def __init__(
        self,
        tied: dict[str, list[int]],
        parameters: dict[str, torch.Tensor],
        stages: Sequence[int],
        rank_of: Sequence[int],
        group: Any,
    ):
        groups: dict[tuple[int, ...], Any] = {}
        self._weights = []
        for name, readers in tied.items():
            ranks = tuple(dict.fromkeys(dist.get_global_rank(group, rank_of[s]) for s in readers))
            if ranks not in groups:  # of their own: sends between neighbours must not wait for a sum
                alone = len(ranks) == 1
                groups[ranks] = None if alone else dist.new_group(sorted(ranks), use_local_synchronization=True)
            self._weights.append((parameters[name], groups[ranks], len(ranks)))
            if groups[ranks] is not None:
                dist.broadcast(local_part(parameters[name].detach()), src=ranks[0], group=groups[ranks])
        self._stages, self._ids = tuple(stages), {id(p) for p, _, _ in self._weights}
        self._before: list[torch.Tensor | None] = [None] * len(self._weights)
        self._open: set[int] = set()

    def has(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._ids

    def begin(self, stage: int, has_backward: bool) -> None:
        """A step begins: what its backwards add to a shared weight's gradient is kept apart from earlier steps'."""
        if not has_backward or stage != self._stages[0]:
            return
        self._open = set(self._stages)
        self._before = [p.grad for p, _, _ in self._weights]
        for p, _, _ in self._weights:
            p.grad = None

    def end(self, stage: int, factor: int) -> None:
        """A stage has done its backwards; after the last one gradients are divided and summed, once a step. What
        earlier steps left is on every rank: each adds its share of it to what it sends."""
        if stage not in self._open:
            return
        self._open.discard(stage)
        if self._open:
            return
        for (p, group, count), before in zip(self._weights, self._before):
            own = torch.zeros_like(p) if p.grad is None else p.grad
            own = own / factor if before is None else (own + before / count) / factor
            p.grad = own if group is None else _summed(own, group)
        self._before = [None] * len(self._weights)


def _summed(x: torch.Tensor, group: Any) -> torch.Tensor:
    return as_parts_of(x, sum_later(x.to_local(), group)) if isinstance(x, DTensor) else sum_later(x, group)
