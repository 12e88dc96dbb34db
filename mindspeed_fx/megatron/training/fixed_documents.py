"""``--fix-sub-seq-length``: documents that end after so many tokens, whatever the data says."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_fx.megatron import patches
from mindspeed_fx.megatron.run_arguments import training_arguments

TARGET = "datasets.gpt_dataset:_get_ltor_masks_and_position_ids"


def masks_and_position_ids(data: Tensor, eod_token: int, *settings: Any) -> tuple[Tensor | None, Tensor, Tensor]:
    """Megatron's (attention mask [1, s, s], loss mask [s], positions [s]), the mask that of documents of one length.

    Positions and the loss mask follow the data, as in MindSpeed.
    """
    mask, loss_mask, positions = patches.original(TARGET)(data, eod_token, *settings)
    args = training_arguments()
    if (
        mask is not None
        and args is not None
        and args.reset_attention_mask
        and 0 < args.fix_sub_seq_length <= data.numel()
    ):
        mask = mask_of_documents(data.numel(), args.fix_sub_seq_length, mask.device)
    return mask, loss_mask, positions


def mask_of_documents(length: int, document: int, device: torch.device | str = "cpu") -> Tensor:
    """[1, length, length] bool, True where a token is not seen: a later one, or one of another document."""
    index = torch.arange(length, device=device)
    return ((index[:, None] < index) | (index[:, None] // document != index // document))[None]
