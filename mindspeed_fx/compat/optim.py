"""Private and moving APIs of ``torch.optim``: part of :mod:`mindspeed_fx.compat`."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor


def orthogonalize_whole_matrices() -> None:
    """``torch.optim.Muon`` on DTensors: Newton-Schulz of the whole matrix on every rank, of which each keeps its part.

    It computes in bfloat16. Of a divided matrix every product would be a sum of the ranks' rounded products, 1e-4 away
    from what one device computes; nothing else of the optimizer joins elements. One matrix at a time is whole.
    """
    try:
        from torch.optim import _muon
    except ImportError:  # torch before 2.9 has no Muon
        return
    own = getattr(_muon, "_zeropower_via_newtonschulz", None)
    if own is None or getattr(own, "_whole", False):
        return

    @functools.wraps(own)
    def whole(grad: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(grad, DTensor):
            return own(grad, *args, **kwargs)
        result = own(grad.full_tensor(), *args, **kwargs)
        return distribute_tensor(result, grad.device_mesh, grad.placements, src_data_rank=None)

    whole._whole = True  # type: ignore[attr-defined]
    _muon._zeropower_via_newtonschulz = whole
