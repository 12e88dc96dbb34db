"""torch's optimizers on the parameters of a parallelized model: which of them are refused, and why.

An optimizer that computes each element by itself (SGD, Adam and its kin, Adagrad, RMSprop ...) steps the parts as it steps the whole.
Muon joins the elements of a matrix, and is given the whole one (:func:`mindspeed_fx.compat_optim.orthogonalize_whole_matrices`). Those
in :data:`REFUSED` join elements in ways that DTensor does not carry out.
"""

from __future__ import annotations

import functools
from typing import Any, Iterable

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mindspeed_fx import compat_optim
from mindspeed_fx.passes.sharding.plan import ShardingError

REFUSED = {
    "LBFGS": "it joins all gradients in one vector",
    "Adafactor": "it joins rows and columns of each matrix",
    "SparseAdam": "it takes sparse gradients, and those of a plan are dense",
}
"""Optimizer of ``torch.optim`` -> why it cannot step parts."""

@functools.cache
def watch_optimizers() -> None:
    """From here on, steps of optimizers that cannot step the parameters of a parallelized model are refused."""
    compat_optim.orthogonalize_whole_matrices()
    register_optimizer_step_pre_hook(refuse)


def mark(parameters: Iterable[torch.nn.Parameter], plan: str) -> None:
    """Remember that ``parameters`` are those of a model that ``plan`` divides."""
    watch_optimizers()
    for p in parameters:
        p._mindspeed_fx_plan = plan  # type: ignore[attr-defined]


def refuse(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    """Before every step of every optimizer.

    Raises:
        ShardingError: a parallelized model's parameters and an optimizer of :data:`REFUSED`.
    """
    name = next((c.__name__ for c in type(optimizer).__mro__ if c.__name__ in REFUSED and c.__module__.startswith("torch.optim")), None)
    if name is None:
        return
    plans = [p._mindspeed_fx_plan for group in optimizer.param_groups for p in group["params"] if hasattr(p, "_mindspeed_fx_plan")]
    if plans:
        raise ShardingError(
            f'torch.optim.{name} cannot step the parameters of a model that plan "{plans[0]}" divides: {REFUSED[name]}; '
            "optimizers that step each element by itself (AdamW, SGD, Adagrad ...) and Muon can"
        )
