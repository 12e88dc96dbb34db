"""Random tensors of calls, in any layout."""

from __future__ import annotations

import torch

BNSD, BSND, SBND = (0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)
"""Orders of the dimensions [batch, heads, sequence, width] in memory."""


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Standard normal numbers, drawn in float32."""
    return torch.randn(*shape).to(dtype)


def stored(shape: tuple[int, ...], order: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A random tensor of ``shape`` whose dimensions lie in memory in ``order``."""
    return normal(*(shape[i] for i in order), dtype=dtype).permute([order.index(i) for i in range(len(order))])
