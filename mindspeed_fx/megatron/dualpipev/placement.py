"""Chunks in V shape: Megatron's second chunk of rank p - 1 - r lies on rank r.

Megatron places layers, embedding, loss and data by a rank's number in its pipeline group. Where it builds or runs the
second chunk, that group is the one with the ranks in reversed order (:func:`mirrored`), so that everything Megatron
does for "virtual stage 1 of rank p - 1 - r" is done here, on rank r. Checkpoints hold layers by their number in the
model, so that either placement reads them.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Iterator

import torch
import torch.distributed as dist

from mindspeed_fx.compat import distributed
from mindspeed_fx.megatron import groups, patches
from mindspeed_fx.megatron.run_arguments import training_arguments

INITIALIZE = "parallel_state:initialize_model_parallel"
ITERATORS = "megatron.training.training:build_train_valid_test_data_iterators"
_groups: dict[Any, Any] = {}
"""Megatron's group of a pipeline -> the same ranks in reversed order."""


def is_asked(args: Any = None) -> bool:
    """Whether the run's chunks lie in V shape."""
    args = training_arguments() if args is None else args
    return getattr(args, "schedules_method", None) == "dualpipev"


def mirrored_group() -> Any:
    """The pipeline group of this process with its ranks in reversed order; made when it is first asked for, by all
    processes of the job.
    """
    from megatron.core import parallel_state

    group = parallel_state.get_pipeline_model_parallel_group()
    if group not in _groups:
        own = dist.get_process_group_ranks(group)
        for ranks in groups.everybodys(group):  # every process makes every group
            mirrored_ranks = distributed.ordered_group(ranks[::-1])
            if list(ranks) == own:
                _groups[group] = mirrored_ranks
    return _groups[group]


@contextlib.contextmanager
def mirrored(when: bool = True) -> Iterator[None]:
    """Meanwhile rank r of Megatron's pipeline is rank p - 1 - r, where ``when``."""
    from megatron.core import parallel_state

    group, ranks = parallel_state._PIPELINE_MODEL_PARALLEL_GROUP, parallel_state._PIPELINE_GLOBAL_RANKS
    if not when or group in _groups.values():
        yield
        return
    parallel_state._PIPELINE_MODEL_PARALLEL_GROUP = mirrored_group()
    parallel_state._PIPELINE_GLOBAL_RANKS = ranks[::-1]
    try:
        yield
    finally:
        parallel_state._PIPELINE_MODEL_PARALLEL_GROUP, parallel_state._PIPELINE_GLOBAL_RANKS = group, ranks


def provider(original: Callable[..., Any]) -> Callable[..., Any]:
    """A model provider whose second chunk is that of the mirrored rank."""

    def build(pre_process: bool, post_process: bool, vp_stage: int = 0, **others: Any) -> Any:
        from megatron.core import parallel_state
        from megatron.core.process_groups_config import ProcessGroupCollection

        if vp_stage == 0:
            return original(pre_process=pre_process, post_process=post_process, vp_stage=0, **others)
        with mirrored():
            others["pg_collection"] = ProcessGroupCollection.use_mpu_process_groups()
            ends = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=1)
            return original(pre_process=False, post_process=ends, vp_stage=1, **others)

    return build


def initialize_model_parallel(*args: Any, **kwargs: Any) -> None:
    """``initialize_model_parallel``, in whose groups for embeddings is the first rank alone: both ends lie there."""
    if is_asked():
        kwargs["get_embedding_ranks"] = lambda ranks, *_: ranks[:1]
    patches.original(INITIALIZE)(*args, **kwargs)


def data_iterators(datasets: Any) -> Any:
    """``build_train_valid_test_data_iterators``, of the second chunk those of the mirrored rank."""
    is_second = isinstance(datasets, functools.partial) and datasets.keywords.get("vp_stage") == 1
    with mirrored(is_second and is_asked()):
        return patches.original(ITERATORS)(datasets)


def tie(chunks: list[Any]) -> None:
    """The second chunk's copy of the embedding, of tied output weights or for further tokens, is the first's."""
    for first, second in _shared(chunks):
        with torch.no_grad():
            second.copy_(first)


def add_shared_gradients(chunks: list[Any]) -> None:
    """Both copies of the embedding have the sum of their gradients, in main_grad."""
    for first, second in _shared(chunks):
        first.main_grad.add_(second.main_grad)
        second.main_grad.copy_(first.main_grad)


def _shared(chunks: list[Any]) -> list[tuple[Any, Any]]:
    from megatron.core.utils import unwrap_model

    first, second = unwrap_model(chunks)
    has_copy = second.share_embeddings_and_output_weights and second.post_process
    if not first.pre_process or not (has_copy or getattr(second, "mtp_process", False)):
        return []
    return [(first.shared_embedding_or_output_weight(), second.shared_embedding_or_output_weight())]


def table() -> list[patches.Patch]:
    """The patches of Megatron-core, which do nothing without the flag."""
    reason = "--schedules-method dualpipev has both ends of a model on the first rank"
    return [patches.Patch(INITIALIZE, initialize_model_parallel, reason, patches.EVERYWHERE)]
