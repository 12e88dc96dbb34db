"""What is known of each parallelized model: its plan, mesh and modules, by the number that its calls carry."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, Callable

import torch
from torch.distributed.device_mesh import DeviceMesh

from mindspeed_fx.sharding.plan import Plan

WHOLE, LOCAL = INPUTS = ("whole", "local")


@dataclass(eq=False)
class Sharding:
    """What ``parallelize`` decided for one model."""

    plan: Plan
    mesh: DeviceMesh | None
    modules: list[str]
    """Names of the model's modules."""
    inputs: str = WHOLE
    """What callers pass: "whole" tensors, or the "local" part of what the plan divides."""
    check_inputs: bool = True
    """Whether the ranks' arguments are compared."""
    checked: set[tuple] = field(default_factory=set)
    """Names, shapes and dtypes of arguments that were compared."""
    number: int = -1
    """That the model's calls carry."""
    reads_loops: bool = True
    """Whether loops over lists of experts are kept in one graph (:mod:`mindspeed_fx.sharding.expert_lists`)."""

    def __deepcopy__(self, memo: dict) -> "Sharding":
        """Itself: a copy of the model (a moving average) carries the same number and is divided alike, also when the
        model is gone."""
        return self


SHARDINGS: "weakref.WeakValueDictionary[int, Sharding]" = weakref.WeakValueDictionary()

PARAMETER, WHOLE_INPUT = "parameter", "whole_input"
SHOWN: dict[Any, str] = {}
"""Calls of a captured graph that show their first argument whole -> what that is: a parameter, or an argument of which
a rank passes its part. Their second argument is the key "number of the sharding:name".
"""


def shows_whole(what: str) -> Callable[[Callable], Callable]:
    """Decorator: calls of the function are kept in captured graphs, and known there (:data:`SHOWN`)."""

    def wrap(function: Callable) -> Callable:
        SHOWN[torch._dynamo.allow_in_graph(function)] = what
        return function

    return wrap
