"""Whether DTensor pads what ranks share unevenly: part of :mod:`mindspeed_fx.compat`."""

from __future__ import annotations

import functools
from typing import Any, Callable

from torch.distributed.tensor import placement_types

_PADDED = [0]
_COUNTED: set[str] = set()


def padded_so_far() -> int:
    """How often, in this process, DTensor filled up a rank's part before sending it, or cut what was filled up. Ranks
    whose part is the longest do less of it: their graphs lack slices that the others' have. Counted from the first call
    on; on every rank more than before, where a value was sent in parts of unequal sizes.
    """
    for name in {"pad_tensor", "unpad_tensor"} - _COUNTED:
        _COUNTED.add(name)
        setattr(placement_types, name, _counted(getattr(placement_types, name)))
    return _PADDED[0]


def _counted(function: Callable) -> Callable:
    @functools.wraps(function)
    def counted(tensor: Any, dim: int, size: Any) -> Any:
        _PADDED[0] += isinstance(size, int) and size > 0
        return function(tensor, dim, size)

    return counted
