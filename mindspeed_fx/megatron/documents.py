"""Documents packed into the rows of a batch (``--reset-attention-mask``), by where they end instead of by a mask:
attention skips what a document does not see (:mod:`mindspeed_fx.kernels.varlen_attention`) instead of masking it.

A batch's mask [batch, 1, seq, seq] becomes its documents' ends [batch, ends] when the batch arrives; attention makes
the mask of them again, in the graph, where the compiler reads what it says.
"""

from __future__ import annotations

import torch
from torch import Tensor

MOST = 1024
"""Ends of one call of ``npu_fusion_attention_v3``, a row's length among them. Rows of a batch have as many ends,
whatever their documents, for the graph is one."""


def document_ends(mask: Tensor) -> Tensor | None:
    """Where the documents of a mask end. On a device the host waits once, for whether they say what the mask says.

    Args:
        mask: [batch, 1, seq, seq] bool, True where a token is not seen.

    Returns:
        [batch, ends] int64, in tokens from the row's start, in order, filled up with the sequence's length, as many
        for every mask of this shape; None where the mask is another than that of causal documents, or of too many.
    """
    if mask.dim() != 4 or mask.dtype != torch.bool or mask.shape[1] != 1 or mask.shape[2] != mask.shape[3]:
        return None
    batch, _, seq, _ = mask.shape
    begins = mask[:, 0].diagonal(-1, 1, 2)  # [batch, seq - 1]: a token that does not see the one before it
    ends = torch.where(begins, torch.arange(1, seq, device=mask.device), seq)
    ends = torch.nn.functional.pad(ends, (0, 1), value=seq).sort(-1).values
    ends = ends[:, : count_of_ends(batch, seq)].contiguous()
    return ends if torch.equal(mask_of(ends, seq), mask) else None


def count_of_ends(batch: int, seq: int) -> int:
    """How many ends stand for a row."""
    return max(1, min(seq, MOST // batch - 1))


def mask_of(ends: Tensor, seq: int, is_causal: bool = True) -> Tensor:
    """The mask of documents that end at ``ends`` [batch, ends]: [batch, 1, seq, seq] bool, True where a token is not
    seen: one of another document or, with ``is_causal``, a later one."""
    numbers = numbers_of(ends, seq)
    masked = numbers[:, None, :, None] != numbers[:, None, None, :]
    if not is_causal:
        return masked
    return masked | torch.ones(seq, seq, dtype=torch.bool, device=ends.device).triu(1)


def numbers_of(ends: Tensor, seq: int) -> Tensor:
    """The number of each token's document, [batch, seq], of ``ends`` [batch, ends]."""
    places = torch.arange(seq, device=ends.device)
    if ends.shape[0] == 1:
        return torch.searchsorted(ends[0], places, right=True)[None]
    return torch.searchsorted(ends, places.expand(ends.shape[0], -1).contiguous(), right=True)


def seen(mask: Tensor | None, seq: int) -> Tensor | None:
    """An ``attention_mask`` as attention takes it: documents' ends as their mask, any other as it is."""
    return mask_of(mask, seq) if mask is not None and mask.dtype == torch.int64 else mask
