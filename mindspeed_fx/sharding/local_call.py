"""The compiled local program of a parallelized model as a function of the whole graph's arguments."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Sequence

from torch.distributed.tensor import DTensor

from mindspeed_fx.compat import distributed, local_parts
from mindspeed_fx.sharding.inputs import Comparison, InputCheck, own_part


@dataclasses.dataclass(frozen=True)
class Outside:
    """What is done before the program is called; the same in every start of a job, but not on every rank."""

    comparison: Comparison
    cuts: dict[int, Sequence[Any]]
    """Position -> placements of the arguments that are cut to this rank's part here."""


class LocalCall:
    """Takes parameters as DTensors and arguments as callers pass them, and calls ``compiled`` with this rank's parts.

    Args:
        check: of ``outside.comparison``.
        is_cacheable: every process group in ``compiled`` has a name by which another start finds it.
    """

    def __init__(self, outside: Outside, check: InputCheck, compiled: Callable, is_cacheable: bool):
        self.outside, self.check, self.compiled, self.is_cacheable = outside, check, compiled, is_cacheable
        self.mesh = check.sharding.mesh

    def __call__(self, *args: Any) -> Any:
        self.check(args)
        own = [local_parts.part_of(a) if isinstance(a, DTensor) else a for a in args]
        for i, placements in self.outside.cuts.items():
            own[i] = own_part(own[i], placements, self.mesh)
        return self.compiled(*own)


def call_loaded(outside: Outside, sharding: Any, compiled: Callable) -> LocalCall:
    """Of a program that another start compiled; this one's process groups get the names that its code has for them."""
    distributed.name_groups(sharding.mesh)
    return LocalCall(outside, InputCheck(sharding, outside.comparison), compiled, is_cacheable=True)
