"""Counts what is copied to host memory."""

from __future__ import annotations

from typing import Any

import torch

from mindspeed_fx.kernels import copies


class MovedBytes:
    """Within it, ``bytes`` and ``copies`` that started on their way to the host."""

    def __init__(self) -> None:
        self.start, self.bytes, self.copies = copies._start, 0, 0

    def __enter__(self) -> MovedBytes:
        def start(out: torch.Tensor, x: torch.Tensor, device: torch.device, way: str) -> torch.Tensor:
            if way == "out":
                self.bytes, self.copies = self.bytes + x.nbytes, self.copies + 1
            return self.start(out, x, device, way)

        copies._start = start
        return self

    def __exit__(self, *error: Any) -> None:
        copies._start = self.start
