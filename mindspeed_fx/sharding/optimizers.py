"""torch's optimizers on the parameters of a parallelized model: which of them are refused, and why.

An optimizer that computes each element by itself (SGD, Adam and its kin, Adagrad, RMSprop ...) steps the parts as it
steps the whole. Muon joins the elements of a matrix, and is given the whole one (:mod:`mindspeed_fx.compat.optim`).
Those in :data:`REFUSED` need what DTensor does not carry out.
"""

from __future__ import annotations

import functools
from typing import Any, Iterable

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mindspeed_fx.compat import optim
from mindspeed_fx.sharding.plan import ShardingError

REFUSED = {
    "LBFGS": "it joins all gradients in one vector",
    "Adafactor": "it joins rows and columns of each matrix",
    "SparseAdam": "it takes sparse gradients, and those of a plan are dense",
    "Rprop": "DTensor has no sharding rule for what it writes by index",
}
"""Optimizer of ``torch.optim`` -> why it cannot step parts."""
REFUSED_FUSED = ("SGD", "Adagrad")
"""Optimizers of which DTensor (2.13) has no sharding rule for ``fused=True``; it has those of Adam and AdamW."""


@functools.cache
def watch_optimizers() -> None:
    """From here on, steps of optimizers that cannot step the parameters of a parallelized model are refused."""
    optim.orthogonalize_whole_matrices()
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
    own = [c.__name__ for c in type(optimizer).__mro__ if c.__module__.startswith("torch.optim")]
    name = next((n for n in own if n in REFUSED or n in REFUSED_FUSED), None)
    groups = [g for g in optimizer.param_groups if name in REFUSED or (name and g.get("fused"))]
    plans = [p._mindspeed_fx_plan for g in groups for p in g["params"] if hasattr(p, "_mindspeed_fx_plan")]
    if plans and name in REFUSED_FUSED:
        raise ShardingError(
            f'torch.optim.{name}(fused=True) cannot step parameters that plan "{plans[0]}" divides: '
            f"DTensor has no sharding rule for it; torch.optim.{name}(foreach=True) can"
        )
    if plans:
        raise ShardingError(
            f'torch.optim.{name} cannot step parameters that plan "{plans[0]}" divides: {REFUSED[name]}; '
            "optimizers that step each element by itself (AdamW, SGD, Adagrad ...) and Muon can"
        )
