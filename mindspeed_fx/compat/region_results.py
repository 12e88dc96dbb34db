"""What Dynamo takes for the results of a marked region that it did not read: a part of :mod:`mindspeed_fx.compat`.

Torch 2.13 makes empty tensors that require a gradient, which are leaves: what writes into one (``y = layer(x); y *=
mask``) ends in autograd's error for leaves, where it is right for the layer that was read.
"""

from __future__ import annotations

from typing import Any

import torch

from mindspeed_fx.compat import region_reads


class _Made(torch.autograd.Function):
    """An empty tensor that something with a gradient made."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> None:
        raise NotImplementedError("results of a region are only looked at")


class _Torch:
    """``torch`` whose empty tensors are no leaves."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty_strided(*args: Any, **kwargs: Any) -> torch.Tensor:
        leaf = torch.empty_strided(*args, **kwargs)
        return _Made.apply(leaf) if leaf.requires_grad and not region_reads.is_transformed() else leaf


def are_no_leaves(regions: Any) -> None:
    """Have results of regions that were not read be as those of what was read: no leaves of autograd."""
    regions.torch = _Torch()
