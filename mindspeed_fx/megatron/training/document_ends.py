"""Batches of ``--reset-attention-mask`` arrive with where their documents end instead of with a mask."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from mindspeed_fx.megatron import documents, patches
from mindspeed_fx.megatron.context_parallel.settings import read_settings
from mindspeed_fx.megatron.run_arguments import training_arguments
from mindspeed_fx.megatron.training.compile_chunks import wants_compile

TARGET = "megatron.training.utils:get_batch_on_this_tp_rank"
_log = logging.getLogger(__name__)


def batch_on_this_rank(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """``get_batch_on_this_tp_rank``, the mask as its documents' ends where the chunks are compiled and a rank attends
    over the whole sequence."""
    batch = patches.original(TARGET)(*args, **kwargs)
    mask = batch.get("attention_mask")
    if mask is None or not (wants_compile() and are_skipped(training_arguments())):
        return batch
    ends = documents.document_ends(mask)
    if ends is None:
        _say_masked(tuple(mask.shape))
        return batch
    return {**batch, "attention_mask": ends}


def are_skipped(args: Any) -> bool:
    """Whether a run with these arguments hands documents' ends to the chunks that it compiles."""
    return bool(getattr(args, "reset_attention_mask", False)) and read_settings(args).ring == 1


@cache
def _say_masked(shape: tuple[int, ...]) -> None:
    _log.warning(
        "attention_mask %s is none of documents, each a causal one, or of more than %d: scores between documents are "
        "computed and masked",
        list(shape),
        documents.MOST,
    )
