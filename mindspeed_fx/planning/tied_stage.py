"""A pipeline stage that shares weights with other stages: an embedding that is the output layer's weight too.

Every stage that reads such a weight has it, with the first one's values. At the end of a step of the schedule their
gradients are summed over a group of these stages, so that equal optimizers keep the weights equal:

    stage 0: embedding      gradient a          after the step a + b
    stage 3: output layer   gradient b          after the step a + b

The sum is started when a stage has done its last backward, and waited for where its result is first read: torch's
schedules may send a gradient to the stage before only after they asked for the sum.
Source: Shoeybi et al. 2019; Megatron-core's all-reduce of embedding gradients over the embedding group.
"""

from __future__ import annotations

from typing import Any, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from mindspeed_fx.compat.distributed import sum_later
from mindspeed_fx.compat.dtensor import local_part


class TiedStage(PipelineStage):
    """torch's stage of a module with weights that other stages have too."""

    def __init__(self, submodule: nn.Module, index: int, *args: Any, tied: dict[str, list[int]], **kwargs: Any):
        """
        Args:
            tied: parameter of ``submodule`` -> the stages that have it; on every stage in the same order.
        """
        super().__init__(submodule, index, *args, **kwargs)
        parameters = dict(submodule.named_parameters())
        groups: dict[tuple[int, ...], Any] = {}
        self._tied = [
            (parameters[name], _group_of(stages, self.group, groups), len(stages)) for name, stages in tied.items()
        ]
        self._before: list[torch.Tensor | None] = [None] * len(tied)
        self._is_open = False
        for p, group, _ in self._tied:
            dist.broadcast(local_part(p.detach()), group_src=0, group=group)

    def clear_runtime_states(self) -> None:
        """A step begins: what its backwards add to a shared weight's gradient is kept apart from earlier steps'."""
        super().clear_runtime_states()
        self._is_open = self.has_backward
        if self._is_open:
            self._before = [p.grad for p, _, _ in self._tied]
            for p, _, _ in self._tied:
                p.grad = None

    def scale_grads(self, grad_scale_factor: int) -> None:
        super().scale_grads(grad_scale_factor)
        self._sum_gradients()

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        super().perform_reduce_grad(grad_scale_factor)
        self._sum_gradients()

    def _sum_gradients(self) -> None:
        """Once a step. What earlier steps left is on every stage: each adds its share of it to what it sends."""
        if not self._is_open:
            return
        self._is_open = False
        for (p, group, count), before in zip(self._tied, self._before):
            own = torch.zeros_like(p) if p.grad is None else p.grad
            p.grad = _summed(own if before is None else own + before / count, group)


def _group_of(stages: Sequence[int], pipeline: Any, groups: dict[tuple[int, ...], Any]) -> Any:
    """The processes of ``stages``, in a group of their own: sends between neighbours must not wait for a sum."""
    ranks = tuple(dist.get_global_rank(pipeline, s) for s in stages)
    if ranks not in groups:
        groups[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
    return groups[ranks]


def _summed(x: torch.Tensor, group: Any) -> torch.Tensor:
    if not isinstance(x, DTensor):
        return sum_later(x, group)
    local = sum_later(x.to_local(), group)
    return DTensor.from_local(local, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())
