"""Adam as Megatron's optimizers want it where there is neither Apex nor TransformerEngine.

Over torch's own Adam they lose a checkpoint: they read the number of steps before a first step has made it, give all
parameters one tensor that counts steps, which is then raised once for each of them, and miss it in the parameters'
states. Apex's and TransformerEngine's keep the number in the group, as this one does, so that checkpoints of either
can be loaded.
"""

from __future__ import annotations

import itertools
from typing import Any, Callable, Iterable

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from mindspeed_fx.megatron import patches
from mindspeed_fx.megatron.scaled_moments import ScaledMoment

MOMENTS = ("exp_avg", "exp_avg_sq")
AVERAGE = "ema_params"
"""The state that :mod:`mindspeed_fx.megatron.averages` is about, by MindSpeed's name."""
RESHARDABLE = "optimizer.distrib_optimizer:DistributedOptimizer.sharded_param_state_fully_reshardable"


class Adam(torch.optim.Optimizer):
    """Adam (Kingma and Ba 2015), or AdamW (Loshchilov and Hutter 2019), by torch's fused operators.

    Args:
        params: parameters or groups of them; the number of steps is the group's ``step``.
        lr, betas, eps, weight_decay: as of ``torch.optim.AdamW``.
        adam_w_mode: decay weights apart from the gradient (AdamW); False adds the decay to the gradient.

    Attributes:
        narrowed: of a parameter, the name of a moment and the moment: the form in which it is kept between steps; None:
            in the parameter's type. Each step is computed in that type, one parameter after the other where moments are
            narrower.
        average_decay: of the average of the parameters; None: there is none.
    """

    narrowed: Callable[[Tensor, str, Tensor], Tensor] | None = None
    average_decay: float | None = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.update = adamw if adam_w_mode else adam

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1
                self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        parameters = [p for p in group["params"] if p.grad is not None]
        if not parameters:
            return
        for p in parameters:
            state = self.state[p]
            if not state:
                state.update({name: torch.zeros_like(p, memory_format=torch.preserve_format) for name in MOMENTS})
            if self.narrowed is not None:  # whoever made them, a loaded checkpoint included
                state.update({name: self.narrowed(p, name, state[name]) for name in MOMENTS})
        if self.average_decay is not None:
            for p in parameters:
                self.state[p].setdefault(AVERAGE, p.detach().clone(memory_format=torch.preserve_format))
        for some in [parameters] if self.narrowed is None else [[p] for p in parameters]:
            self._update(group, some)
        if self.average_decay is not None:
            decay = min(self.average_decay, (1 + group["step"]) / (10 + group["step"]))
            torch._foreach_lerp_([self.state[p][AVERAGE] for p in parameters], parameters, 1 - decay)

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        kept = [[self.state[p][name] for p in parameters] for name in MOMENTS]
        moments = [[_whole(t).to(p.dtype) for t, p in zip(tensors, parameters)] for tensors in kept]
        before = torch.full((len(parameters),), float(group["step"] - 1), device=parameters[0].device)
        beta1, beta2 = group["betas"]
        self.update(
            parameters,
            [p.grad for p in parameters],
            *moments,
            [],
            list(before.unbind()),
            fused=True,
            amsgrad=False,
            maximize=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
        )
        for tensor, moment in zip(itertools.chain(*kept), itertools.chain(*moments)):
            if isinstance(tensor, ScaledMoment):
                tensor.keep(moment, group["step"])
            elif tensor is not moment:
                tensor.copy_(moment)


def adams_of(optimizer: Any, asked: str, instead: str) -> list[Any]:
    """The parts of Megatron's optimizer that step parameters, each by the Adam above.

    Args:
        asked: what a flag asks, before "mindspeed_fx's Adam" in a sentence.
        instead: what to give for it.

    Raises:
        ValueError: one steps by another package's.
    """
    parts = [part for part in getattr(optimizer, "chained_optimizers", [optimizer]) if part.optimizer is not None]
    for inner in (part.optimizer for part in parts):
        if not isinstance(inner, Adam):
            kind = f"{type(inner).__module__}'s {type(inner).__name__}"
            raise ValueError(f"{asked} mindspeed_fx's Adam, and this is {kind}; give {instead}")
    return parts


def _whole(moment: Tensor) -> Tensor:
    return moment.whole() if isinstance(moment, ScaledMoment) else moment


def sharded_param_state_fully_reshardable(self: Any, *args: Any, **kwargs: Any) -> Any:
    """``DistributedOptimizer.sharded_param_state_fully_reshardable``, whose gathered state has no padding between
    buckets: Megatron reads it at places that count the padding, and so stores what belongs to other parameters.
    """
    buffers = self.buffers
    self.buffers = [_Unpadded(buffer) for buffer in buffers]
    try:
        return patches.original(RESHARDABLE)(self, *args, **kwargs)
    finally:
        self.buffers = buffers


class _Unpadded:
    """Megatron's buffer of parameters, but that ``param_index_map`` tells places without padding between buckets."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer
        padding, end = [], 0
        for bucket in buffer.buckets:
            padding.append(bucket.offset - end)
            end += bucket.numel_unpadded
        self.param_index_map = {
            parameter: (start - padding[bucket], stop - padding[bucket], bucket)
            for parameter, (start, stop, bucket) in buffer.param_index_map.items()
        }

    def __getattr__(self, name: str) -> Any:
        return getattr(self._buffer, name)
