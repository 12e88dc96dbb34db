"""Bodies of checkpointed regions, on divided values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable

from torch.utils import _pytree as pytree

from mindspeed_fx.sharding.spmd import padded


@dataclass
class CheckpointedBody:
    """The body of a checkpointed region, whose packed arguments come as DTensors."""

    planned: Any
    again: list[Callable[[Any], Any]]
    dims: list[Callable[[Any], Any]]
    """What makes results padded values again; filled by the run."""

    def run(self, *values: Any) -> Any:
        results = self.planned.run(*(pack(x) for pack, x in zip(self.again, values, strict=True)))
        self.dims[:] = [padded.same_padding(x) for x in pytree.tree_leaves(results)]
        return pytree.tree_map(padded.stored_of, results)
