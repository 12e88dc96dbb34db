"""``--use-nanopipe``: gradients of weights are made while a rank of Megatron's interleaved schedule would wait.

A chunk's backward makes the gradient of its input, which the stage before waits for; those of its weights wait in a
queue (:mod:`mindspeed_fx.training.late_gradients`). Rank r of p lets r of them wait, and makes the oldest of more
before it waits for a gradient or runs a backward; the rest before gradients are reduced. Rank r keeps 2 r chunks fewer
than rank 0 for its forwards, so that what waits lies where rank 0 has activations.

The bubble is (p - 1)(F + D - W) of a chunk's forward F, gradient of input D and gradients of weights W, where the whole
backward leaves (p - 1)(F + D + W): ZB-H1 of Qi et al. 2023 (arXiv 2401.10241), over virtual stages.
"""

from __future__ import annotations

from typing import Any, Callable

from mindspeed_fx.training.late_gradients import Queue, put_off


class Run:
    """What one call of the schedule has put off.

    Args:
        queue: gradients of weights of all chunks of this rank.
        rank: of the pipeline: as many wait.
    """

    def __init__(self, queue: Queue, rank: int) -> None:
        self.queue, self.rank = queue, rank

    def begin_wait(self) -> None:
        """Before a gradient is waited for."""
        while len(self.queue) > self.rank:
            self.queue.run_one()

    begin_backward = begin_wait

    def end_backward(self) -> None:
        """Its gradients of weights wait; the gradient of its input is sent first."""

    def finish(self) -> None:
        """All that is left, before gradients are reduced."""
        while self.queue.waiting:
            self.queue.run_one()


def run_schedule(kwargs: dict[str, Any], run: Run, schedule: Callable[..., Any]) -> Any:
    """``schedule(**kwargs)``, whose gradients are complete before Megatron reduces them.

    Args:
        kwargs: of ``forward_backward_pipelining_with_interleaving``.
    """
    from megatron.core.utils import get_model_config

    config = get_model_config(kwargs["model"][0])
    finalize = config.finalize_model_grads_func

    def finish(*args: Any, **others: Any) -> Any:
        run.finish()
        return finalize(*args, **others) if finalize is not None else None

    config.finalize_model_grads_func = finish
    try:
        result = schedule(**kwargs)
        run.finish()
        return result
    finally:
        config.finalize_model_grads_func = finalize


def prepare(chunks: list[Any], swaps: bool = False) -> None:
    """Has the chunks of a rank put their gradients of weights off; before they compile.

    Args:
        chunks: in Megatron's wrappers.
        swaps: what they read waits in host memory.
    """
    queue = Queue(swaps)
    for chunk in chunks:
        chunk.late_gradients = queue
        put_off(chunk.parameters(), queue)
