"""Whether DTensor pads what ranks share unevenly: part of :mod:`mindspeed_fx.compat`."""

from __future__ import annotations

import functools
from typing import Any, Callable

from torch.distributed.tensor import placement_types


def padded_so_far() -> int:
    """How often, in this process, DTensor filled up a rank's part before sending it, or cut what was filled up. Ranks
    whose part is the longest do less of it: their graphs lack slices that the others' have. Counted from the first call
    on; on every rank more than before, where a value was sent in parts of unequal sizes.
    """
    return _counter()[0]


@functools.cache
def _counter() -> list[int]:
    """One number, which DTensor's padding counts up from here on."""
    times = [0]

    def counted(function: Callable) -> Callable:
        @functools.wraps(function)
        def call(tensor: Any, dim: int, size: Any) -> Any:
            times[0] += isinstance(size, int) and size > 0
            return function(tensor, dim, size)

        return call

    for name in ("pad_tensor", "unpad_tensor"):
        setattr(placement_types, name, counted(getattr(placement_types, name)))
    return times
