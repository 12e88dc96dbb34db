"""A sequence divided over tensor-parallel ranks (sequence parallelism) and context-parallel ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindspeed_fx.megatron.context_parallel import sequence
from mindspeed_fx.megatron.groups import size


@dataclass(frozen=True, eq=False)
class Ranks:
    """Who has the rest of a sequence.

    Args:
        tensor: ranks among which a context-parallel rank's tokens are divided; None where they are whole.
        context: ranks with two chunks each, in Megatron's balanced split.
    """

    tensor: Any
    context: Any

    @property
    def parts(self) -> int:
        """Context-parallel ranks."""
        return size(self.context)

    def own(self, x: Tensor) -> Tensor:
        """[rows, ...] of a context-parallel rank, in its own order, of every tensor-parallel rank's part."""
        if size(self.tensor) == 1:
            return x
        from megatron.core.tensor_parallel import mappings

        return mappings.gather_from_sequence_parallel_region(x, group=self.tensor)

    def gather(self, x: Tensor) -> Tensor:
        """[positions, batch, width], in order; the gradient is the sum over ranks of what each has of its part."""
        x = self.own(x)
        if self.parts == 1:
            return x
        (whole,) = sequence.gather([x.unsqueeze(2)], self.context)
        return whole.squeeze(2)

    def positions(self, rows: int, device: torch.device) -> Tensor:
        """[rows]: where in the sequence the tokens of a context-parallel rank are."""
        if self.parts == 1:
            return torch.arange(rows, device=device)
        return sequence.own_positions(rows, self.parts, self.context.rank(), device)
