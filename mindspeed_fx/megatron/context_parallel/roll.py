"""The next token's chunk may be another rank's: what multi-token prediction shifts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor

from mindspeed_fx.megatron import patches

ROLL = "transformer.multi_token_prediction:roll_tensor"


def roll_tensor(
    tensor: Tensor, shifts: int = -1, dims: int = -1, cp_group: Any = None, packed_seq_params: Any = None
) -> tuple[Tensor, Tensor]:
    """``roll_tensor`` whose messages are one gather of the chunks' first elements, which a graph can own.

    Args:
        tensor: a rank's two chunks along ``dims``.

    Returns:
        each element's successor in the whole sequence, zero behind the last, and the sum of the rank's own.
    """
    if cp_group is None or cp_group.size() == 1 or packed_seq_params is not None:
        return patches.original(ROLL)(tensor, shifts, dims, cp_group, packed_seq_params)
    if shifts != -1:
        raise ValueError(f"roll_tensor with shifts={shifts} and context parallelism; valid: -1")
    ranks, rank = cp_group.size(), cp_group.rank()
    chunks = torch.stack(tensor.movedim(dims, -1).chunk(2, -1))
    firsts = functional.wait_tensor(functional.all_gather_tensor(chunks[..., 0].contiguous(), 0, cp_group))
    firsts = torch.cat([firsts, torch.zeros_like(firsts[:1])])  # of both chunks of every rank, and behind the last
    low = 2 * (rank + 1) if rank + 1 < ranks else 2 * rank + 1
    high = 2 * rank - 1 if rank else 2 * ranks
    following = torch.cat([firsts.narrow(0, low, 1), firsts.narrow(0, high, 1)]).unsqueeze(-1)
    rolled = torch.cat([chunks[..., 1:], following], -1)
    rolled = torch.cat([rolled[0], rolled[1]], -1).movedim(-1, dims)
    return rolled, rolled.sum()
