"""Launches on an NPU: one program for each vector core, and the first tile that fits its buffer. Compiled and checked,
never run on one.

Which tile fits is known to the compiler alone (mindspeed_fx/kernels/triton/tiles.py), which refuses a kernel whose
buffers overflow; what it took is remembered for the process, and its binaries by triton-ascend's own cache.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from mindspeed_fx.kernels.triton import tiles

CORES = 40
"""Vector cores where triton-ascend does not say: the fewest of the 910B; programs loop, so that any number is right."""

_fitting: dict[tuple, dict[str, int]] = {}


@functools.cache
def cores(device: torch.device) -> int:
    """Vector cores of ``device``, as triton-ascend's driver has them."""
    import triton

    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return properties.get("num_vectorcore", CORES)


def start(kernel: Any, grid: int, args: tuple, constants: dict[str, Any]) -> None:
    """Start ``kernel`` with the first of :func:`tiles.candidates` whose compilation does not overflow.

    Raises:
        what triton-ascend raises, when it is no overflow or no tile is left.
    """
    key = (
        kernel,
        tuple(sorted(constants.items())),
        tuple(a.dtype if isinstance(a, torch.Tensor) else type(a) for a in args),
    )
    wanted = [_fitting[key]] if key in _fitting else tiles.candidates(constants)
    for i, tile in enumerate(wanted):
        try:
            kernel[(grid,)](*args, **{**constants, **tile})
        except Exception as e:
            if "overflow" not in str(e).lower() or i + 1 == len(wanted):
                raise
        else:
            _fitting[key] = tile
            return
